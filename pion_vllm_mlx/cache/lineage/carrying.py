"""Rows that a prompt shares with a conversation that has to go: read before that, to be kept.

Where the budget has no room for both, a prompt that left another conversation behind an anchor
begins anew there. What it shared with it is read back, proved, and written again as its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pion_vllm_mlx.cache.completion import CompletionRecord, Run
from pion_vllm_mlx.cache.lanes_codec import layout_of
from pion_vllm_mlx.cache.leaf import LeafSpec, Side
from pion_vllm_mlx.cache.lineage.capture import Captured
from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.lineage.coverage import merged, without
from pion_vllm_mlx.cache.lineage.plan import Lost, row_bytes
from pion_vllm_mlx.errors import DamagedData

Bytes = NDArray[np.uint8]

MOST_SHARED_BYTES = 1 << 30
"""So much is held in memory at most; the next store of the prompt brings all of it."""


@dataclass(frozen=True)
class SharedRows:
    """Rows ``[start, end)`` that a run of a segment at ``base`` has; ``blob`` once they are read.

    ``size`` is that of a row.
    """

    namespace: str
    base: int
    run: Run
    start: int
    end: int
    size: int
    blob: Bytes | None = None

    @property
    def layer(self) -> int:
        return self.run.layer

    @property
    def side(self) -> Side:
        return self.run.side

    @property
    def num_bytes(self) -> int:
        return (self.end - self.start) * self.size

    def until(self, end: int) -> SharedRows:
        """The rows before token ``end``."""
        return replace(self, end=min(self.end, end))

    def encoded(self, start: int, end: int, leaf: LeafSpec) -> Bytes:
        """The bytes of rows ``[start, end)``, which were stored in the leaf's format."""
        if self.blob is None:
            raise DamagedData(f"{self.namespace}: rows were not read")
        table = _table(self.blob, self.run, leaf.heads, self.size)
        return np.ascontiguousarray(table[:, start - self.start : end - self.start]).reshape(-1)

    def out_of(self, run: Bytes, heads: int) -> SharedRows:
        """The same with the bytes, of those of the whole run."""
        first = self.run.start + self.base
        mine = _table(run, self.run, heads, self.size)[:, self.start - first : self.end - first]
        return replace(self, blob=mine.copy().reshape(-1))


@dataclass(frozen=True)
class SharedWith:
    """A segment at ``base`` that agrees with a prompt up to token ``end``, and its record."""

    namespace: str
    base: int
    end: int
    record: CompletionRecord


def shared_rows(captured: Captured, start: int, chain: Iterable[SharedWith]) -> list[SharedRows]:
    """What a chain has of a prompt from ``start`` on, and ``captured`` has not; nothing is read.

    Raises Lost for rows in another format, and for more than are read at once.
    """
    found: list[SharedRows] = []
    for one in chain:
        for run in one.record.runs:
            leaf = captured.leaves[run.layer]
            if (run.format, run.layout) != (leaf.format_of(run.side), layout_of(leaf, run.side)):
                raise Lost(f"{one.namespace}: its rows are in another format")
            span = (max(run.start + one.base, start), min(run.start + run.rows + one.base, one.end))
            for first, end in without([span], _captured(captured, run)):
                size = row_bytes(leaf, run.side)
                found.append(SharedRows(one.namespace, one.base, run, first, end, size))
    if sum(rows.num_bytes for rows in found) > MOST_SHARED_BYTES:
        raise Lost("more is shared with another conversation than is read back")
    return found


def read_rows(
    client: LineageClient,
    rows: Iterable[SharedRows],
    leaves: Sequence[LeafSpec],
    at_work: Callable[[], None],
) -> Iterator[SharedRows]:
    """The rows with their bytes; ``at_work`` is called before each run, which is read once.

    Raises DamagedData, StoreUnavailable.
    """
    for (namespace, run), spans in groupby(rows, key=lambda one: (one.namespace, one.run)):
        at_work()
        mine = list(spans)
        blob = _fetched(client, namespace, run, mine[0].size)
        for one in mine:
            yield one.out_of(blob, leaves[one.layer].heads)


def _fetched(client: LineageClient, namespace: str, run: Run, size: int) -> Bytes:
    """The bytes of a run of rows of ``size``, proved. Raises DamagedData, StoreUnavailable."""
    blob = client.fetch_range(namespace, run, run.rows * size)
    if blob is None or blob.nbytes != run.rows * size or crc32c(blob.data) != run.crc:
        raise DamagedData(f"{namespace}: leaf {run.layer} {run.side} does not verify")
    return blob


def _captured(captured: Captured, run: Run) -> tuple[tuple[int, int], ...]:
    """Which rows of the leaf and side of a run were captured."""
    return merged(
        (held.start, held.end)
        for held in captured.rows
        if (held.layer, held.side) == (run.layer, run.side)
    )


def _table(blob: Bytes, run: Run, heads: int, size: int) -> Bytes:
    """Bytes as ``[heads, rows, bytes]``, of rows of ``size``; as one head where a row has all."""
    parts = heads if run.layout == "HND" else 1
    return blob.reshape(parts, -1, size // parts)
