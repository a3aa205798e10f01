r"""Patterns of KEYS and SCAN: ``*``, ``?``, ``[a-z]``, ``[^a]`` and ``\`` to quote."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=64)
def compiled(pattern: bytes) -> re.Pattern[bytes]:
    """A pattern whose ``fullmatch`` decides; takes linear time however many stars there are.

    A star takes the shortest run after which the fixed part behind it fits, and never
    another: each fixed part is found once, and matching does not go back over it.
    """
    parts = _parts(pattern)
    out = [parts[0]]
    for number, part in enumerate(parts[1:-1]):
        if part:
            out.append(b"(?=(?P<g%d>.*?%b))(?P=g%d)" % (number, part, number))
    if len(parts) > 1:
        out.append(b".*" + parts[-1])
    return re.compile(b"".join(out), re.DOTALL)


def _parts(pattern: bytes) -> list[bytes]:
    """The pieces between stars, each as an expression of fixed length."""
    parts = [b""]
    at = 0
    while at < len(pattern):
        letter = pattern[at : at + 1]
        at += 1
        if letter == b"*":
            parts.append(b"")
        elif letter == b"?":
            parts[-1] += b"."
        elif letter == b"[":
            expression, at = _one_of(pattern, at)
            parts[-1] += expression
        else:
            if letter == b"\\" and at < len(pattern):
                letter = pattern[at : at + 1]
                at += 1
            parts[-1] += re.escape(letter)
    return parts


def _one_of(pattern: bytes, at: int) -> tuple[bytes, int]:
    """The expression of ``[…]`` whose inside begins at ``at``, and where it has ended."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    allowed: set[int] = set()
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            allowed.add(pattern[at + 1])
            at += 2
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at], pattern[at + 2]))
            allowed.update(range(low, high + 1))
            at += 3
        else:
            allowed.add(pattern[at])
            at += 1
    chosen = allowed ^ set(range(256)) if negated else allowed
    letters = b"".join(b"\\x%02x" % byte for byte in sorted(chosen))
    return (b"[" + letters + b"]" if letters else b"(?!)"), at + 1
