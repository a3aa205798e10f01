"""A reply that is stored while it grows, faster than it can be written.

Each time what is new is handed over, and waits behind what was handed over before.  What still
waits of one reply becomes one thing to write: the rows of all of it, the state of the last.  So
what waits is as much as there are replies, however many tokens they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pion_vllm_mlx.cache.lanes_codec import layout_of
from pion_vllm_mlx.cache.leaf import LeafSpec, Side
from pion_vllm_mlx.cache.lineage.bringing import Bytes
from pion_vllm_mlx.cache.lineage.capture import Captured, Rows, Since, Taken
from pion_vllm_mlx.cache.lineage.plan import row_bytes


@dataclass(frozen=True)
class Grown:
    """What a reply's caches have that is new since ``since``, of ``length`` tokens."""

    taken: Taken
    since: Since
    length: int


@dataclass(frozen=True)
class JoinedRows:
    """Rows of one side of a leaf in several parts, one behind the other: see ``HeldRows``."""

    parts: tuple[Rows, ...]

    @property
    def layer(self) -> int:
        return self.parts[0].layer

    @property
    def side(self) -> Side:
        return self.parts[0].side

    @property
    def start(self) -> int:
        return self.parts[0].start

    @property
    def end(self) -> int:
        return self.parts[-1].end

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def until(self, end: int) -> Rows:
        """The rows before token ``end``; at least the first of them."""
        return JoinedRows(tuple(one.until(end) for one in self.parts if one.start < end))

    def encoded(self, start: int, end: int, leaf: LeafSpec) -> Bytes:
        """The bytes of rows ``[start, end)`` in the leaf's format and layout."""
        heads = leaf.heads if layout_of(leaf, self.side) == "HND" else 1
        width = row_bytes(leaf, self.side) // heads
        tables = [
            one.encoded(max(start, one.start), min(end, one.end), leaf).reshape(heads, -1, width)
            for one in self.parts
            if one.start < end and start < one.end
        ]
        return np.ascontiguousarray(np.concatenate(tables, axis=1)).reshape(-1)


def together(former: Captured, later: Captured) -> Captured:
    """What two captures of one growing reply have, with the state of the later one."""
    return replace(later, rows=_joined(former.rows, later.rows))


def _joined(former: Sequence[Rows], later: Sequence[Rows]) -> list[Rows]:
    behind = {(one.layer, one.side, one.start): one for one in later}
    rows: list[Rows] = []
    for one in former:
        other = behind.pop((one.layer, one.side, one.end), None)
        rows.append(one if other is None else JoinedRows((*_parts(one), *_parts(other))))
    return [*rows, *behind.values()]


def _parts(rows: Rows) -> tuple[Rows, ...]:
    return rows.parts if isinstance(rows, JoinedRows) else (rows,)
