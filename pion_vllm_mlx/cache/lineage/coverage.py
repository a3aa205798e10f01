"""Which token positions have rows, and where a sliding window can therefore be restored.

Ranges are half open, sorted, disjoint and not touching. A window of ``size`` rows of which
the first ``keep`` tokens of the prompt never leave (mlx-lm's RotatingKVCache) needs, at n
tokens, rows ``[0, keep)`` and the last ``min(n, size) - keep`` before n.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pion_vllm_mlx.errors import DamagedData

Ranges = tuple[tuple[int, int], ...]


class Window(NamedTuple):
    """The geometry of a sliding window."""

    size: int
    keep: int


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges as one sorted tuple without overlap; empty ones go."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return tuple(found)


def clipped(ranges: Ranges, start: int, end: int) -> Ranges:
    """What of the ranges lies in ``[start, end)``."""
    return merged((max(a, start), min(b, end)) for a, b in ranges)


def without(wanted: Iterable[tuple[int, int]], there: Ranges) -> Ranges:
    """What of ``wanted`` is not in ``there``."""
    left: list[tuple[int, int]] = []
    for start, end in wanted:
        for a, b in clipped(there, start, end):
            left.append((start, a))
            start = b
        left.append((start, end))
    return merged(left)


def needed(window: Window, length: int) -> Ranges:
    """The rows that a window of ``length`` tokens consists of."""
    tail = min(length, window.size) - min(length, window.keep)
    return merged([(0, min(length, window.keep)), (length - tail, length)])


def latest_point(limit: int, windows: Mapping[Window, Ranges]) -> int:
    """The largest length, at most ``limit``, at which every window has all its rows."""
    length = limit
    settled = False
    while length > 0 and not settled:
        settled = True
        for window, ranges in windows.items():
            fits = _latest_of(length, window, ranges)
            if fits < length:
                length, settled = fits, False
    return max(length, 0)


def _latest_of(limit: int, window: Window, ranges: Ranges) -> int:
    """``latest_point`` of one window."""
    kept = clipped(ranges, 0, window.keep) == ((0, window.keep),) if window.keep else True
    for start, end in reversed(ranges):
        length = min(limit, end)
        whole = kept and length - start >= window.size - window.keep
        if length > start and (start == 0 or whole):
            return length
    return 0


def as_text(windows: Mapping[Window, Ranges]) -> str:
    """How a segment's metadata carries it: ``size.keep=a-b,c-d;…``."""
    return ";".join(
        f"{w.size}.{w.keep}=" + ",".join(f"{a}-{b}" for a, b in ranges)
        for w, ranges in sorted(windows.items())
    )


def from_text(text: str) -> dict[Window, Ranges]:
    """The inverse of ``as_text``. Raises DamagedData."""
    found: dict[Window, Ranges] = {}
    try:
        for part in filter(None, text.split(";")):
            name, _, body = part.partition("=")
            size, _, keep = name.partition(".")
            pairs = (item.split("-") for item in filter(None, body.split(",")))
            ranges = merged((int(a), int(b)) for a, b in pairs)
            found[Window(int(size), int(keep))] = ranges
    except ValueError as error:
        raise DamagedData(f"windows of a segment: {error}") from error
    return found


def joined(parts: Sequence[tuple[Mapping[Window, Ranges], int, int]]) -> dict[Window, Ranges]:
    """The coverage of a chain: each part's ranges as far as ``[start, end)`` is its own."""
    found: dict[Window, list[tuple[int, int]]] = {}
    for windows, start, end in parts:
        for window, ranges in windows.items():
            found.setdefault(window, []).extend(clipped(ranges, start, end))
    return {window: merged(ranges) for window, ranges in found.items()}
