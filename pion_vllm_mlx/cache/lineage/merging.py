"""Joining the many short runs of a segment that grew turn by turn into longer ones.

Every run is a tensor of its own in the server's files: a restore opens, maps and joins each.
When a leaf has several short runs at its end, the next store reads them back, proves them,
and sends them again together with its new rows. A row is sent again until its run is long
enough, about twice. Who still reads by the record from before finds the files changed and
gets the same rows over the socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pion_vllm_mlx.cache.completion import CompletionRecord, Run
from pion_vllm_mlx.cache.lanes_codec import run_bytes
from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.errors import DamagedData

SHORT_ROWS = 4096
"""A run of fewer rows is short."""

MOST_SHORT_RUNS = 8

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Tail:
    """Short runs, one behind the other, that end where a leaf's rows end."""

    runs: tuple[Run, ...]

    @property
    def start(self) -> int:
        return self.runs[0].start

    @property
    def end(self) -> int:
        return self.runs[-1].start + self.runs[-1].rows


def tails(record: CompletionRecord, rows: int) -> dict[tuple[int, str], Tail]:
    """Per leaf and side the runs to be joined with what comes at row ``rows``."""
    by_leaf: dict[tuple[int, str], list[Run]] = {}
    for run in record.runs:
        by_leaf.setdefault((run.layer, run.side), []).append(run)
    found = {}
    for place, runs in by_leaf.items():
        tail = _short_tail(sorted(runs, key=_start), rows)
        if len(tail) >= MOST_SHORT_RUNS:
            found[place] = Tail(tuple(tail))
    return found


def _short_tail(runs: Sequence[Run], end: int) -> list[Run]:
    tail: list[Run] = []
    for run in reversed(runs):
        if run.start + run.rows != end or run.rows >= SHORT_ROWS:
            break
        tail.insert(0, run)
        end = run.start
    return tail


def _start(run: Run) -> int:
    return run.start


def joined(
    client: LineageClient, namespace: str, record: CompletionRecord, tail: Tail, more: Any
) -> Bytes:
    """The rows of a tail and those behind it as the bytes of one run.

    ``more`` are the bytes of the new rows in the same format and layout. Raises DamagedData
    for rows that do not verify, StoreUnavailable.
    """
    leaf = record.leaves[tail.runs[0].layer]
    sizes = [run_bytes(leaf, run) for run in tail.runs]
    blobs = client.fetch_ranges(namespace, tail.runs, sum(sizes))
    parts = []
    for run, size, blob in zip(tail.runs, sizes, blobs, strict=True):
        if blob is None or blob.nbytes != size or crc32c(blob.data) != run.crc:
            raise DamagedData(f"{namespace}: leaf {run.layer} {run.side} does not verify")
        parts.append(blob)
    parts.append(np.frombuffer(more, np.uint8))
    first = tail.runs[0]
    heads = int(leaf["heads"]) if first.layout == "HND" else 1
    row_bytes = sizes[0] // first.rows // heads
    table = np.concatenate([part.reshape(heads, -1, row_bytes) for part in parts], axis=1)
    return np.ascontiguousarray(table).reshape(-1)
