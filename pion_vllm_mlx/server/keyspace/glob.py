r"""Patterns of KEYS, SCAN and CONFIG GET: ``*``, ``?``, ``[a-z]``, ``[^a]`` and ``\`` to quote.

No regular expression: compiling what a client sends, or going back over a name, would take
longer than others can wait. A pattern has a longest length, and a name is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Protocol

from pion_vllm_mlx.errors import CommandError

#: a longer pattern is refused.
MAX_PATTERN_BYTES = 1024
_ANY = frozenset(range(256))

Matches = Callable[[bytes], bool]


class Part(Protocol):
    """What stands between two stars: so many bytes, each one of some."""

    length: int

    def lies_at(self, name: bytes, at: int) -> bool:
        """Whether it fits ``name`` at an offset where so many bytes are left."""

    def end_in(self, name: bytes, at: int) -> int:
        """Where it has ended at the first place from ``at`` on where it fits; -1: nowhere."""


class _Bytes:
    """A part without alternatives."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.length = len(text)

    def lies_at(self, name: bytes, at: int) -> bool:
        return name.startswith(self.text, at)

    def end_in(self, name: bytes, at: int) -> int:
        found = name.find(self.text, at)
        return found if found < 0 else found + self.length


class _Letters:
    """A part with alternatives. Searched for at all places at once, a bit for each.

    Bit i of ``_fits[byte]``: the byte may stand at i. While a name is read, bit i says that
    its last i + 1 bytes fit the first i + 1 of the part.
    """

    def __init__(self, letters: list[frozenset[int]]) -> None:
        self.length = len(letters)
        self._last = 1 << self.length - 1
        places: dict[frozenset[int], int] = {}
        for index, allowed in enumerate(letters):
            places[allowed] = places.get(allowed, 0) | 1 << index
        self._fits = [0] * 256
        for allowed, bits in places.items():
            for byte in allowed:
                self._fits[byte] |= bits

    def lies_at(self, name: bytes, at: int) -> bool:
        fits = self._fits
        return all(fits[name[at + i]] >> i & 1 for i in range(self.length))

    def end_in(self, name: bytes, at: int) -> int:
        fits, last, state = self._fits, self._last, 0
        for end, byte in enumerate(memoryview(name)[at:], at + 1):
            state = (state << 1 | 1) & fits[byte]
            if state & last:
                return end
        return -1


@lru_cache(maxsize=64)
def matcher(pattern: bytes) -> Matches:
    """Says whether a name matches; in linear time however many stars there are.

    A star takes the shortest run after which the part behind it fits, and never
    another: matching does not go back over a name. Raises CommandError for a pattern
    that is too long.
    """
    if len(pattern) > MAX_PATTERN_BYTES:
        raise CommandError(f"pattern is longer than {MAX_PATTERN_BYTES} bytes")
    first, *others = [_part(letters) for letters in _letters(pattern)]
    if not others:
        return partial(_fits_whole, first)
    middle = tuple(part for part in others[:-1] if part.length)
    return partial(_fits, first, middle, others[-1])


def _fits_whole(part: Part, name: bytes) -> bool:
    return len(name) == part.length and part.lies_at(name, 0)


def _fits(first: Part, middle: Iterable[Part], last: Part, name: bytes) -> bool:
    end = len(name) - last.length
    if end < first.length or not first.lies_at(name, 0) or not last.lies_at(name, end):
        return False
    at = first.length
    for part in middle:
        at = part.end_in(name, at)
        if at < 0:
            return False
    return at <= end


def _part(letters: list[frozenset[int]]) -> Part:
    if all(len(allowed) == 1 for allowed in letters):
        return _Bytes(bytes(byte for allowed in letters for byte in allowed))
    return _Letters(letters)


def _letters(pattern: bytes) -> list[list[frozenset[int]]]:
    """The parts between stars, each as what may stand in each of its places."""
    parts: list[list[frozenset[int]]] = [[]]
    at = 0
    while at < len(pattern):
        letter = pattern[at : at + 1]
        at += 1
        if letter == b"*":
            parts.append([])
        elif letter == b"?":
            parts[-1].append(_ANY)
        elif letter == b"[":
            allowed, at = _one_of(pattern, at)
            parts[-1].append(allowed)
        else:
            if letter == b"\\" and at < len(pattern):
                letter = pattern[at : at + 1]
                at += 1
            parts[-1].append(frozenset(letter))
    return parts


def _one_of(pattern: bytes, at: int) -> tuple[frozenset[int], int]:
    """The bytes that ``[…]`` allows whose inside begins at ``at``, and where it has ended."""
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
    return (_ANY - allowed if negated else frozenset(allowed)), at + 1
