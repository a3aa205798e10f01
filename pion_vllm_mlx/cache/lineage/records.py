"""Completion records of segments and checkpoints: what proves a hit over a chain.

Each segment has one under its namespace: the key, all token ids from the root to its end,
and the checksum of every run; runs count rows from the segment's base. A checkpoint has one
under ``<namespace>@<length>``: key, ids, the metadata of every slot at that length, and the
checksums of its states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.completion import CompletionRecord, Run, TokenIds
from pion_vllm_mlx.cache.identity_names import first_difference
from pion_vllm_mlx.cache.lineage.coverage import Ranges, Window, merged
from pion_vllm_mlx.cache.lineage.shape import window_leaves
from pion_vllm_mlx.errors import DamagedData


def checkpoint_sid(namespace: str, length: int) -> str:
    """Where the states of a checkpoint lie."""
    return f"{namespace}@{length}"


@dataclass(frozen=True)
class Proof:
    """A record that belongs to a key and to the first tokens of a prompt.

    ``shared`` tokens of the prompt are those of the record.
    """

    record: CompletionRecord
    shared: int


def proved(blob: bytes | None, identity: dict[str, Any], tokens: TokenIds, what: str) -> Proof:
    """The record in ``blob``, as far as it is of this prompt.

    Raises DamagedData where there is none, where it does not verify, or where it is of another
    key; NewerFormat.
    """
    if blob is None:
        raise DamagedData(f"{what}: its completion record is gone")
    record = CompletionRecord.decode(blob)
    differing = first_difference(record.identity, identity)
    if differing is not None:
        raise DamagedData(f"{what}: key field {differing} differs")
    count = min(record.ids.size, tokens.size)
    unequal = np.flatnonzero(record.ids[:count] != tokens[:count])
    return Proof(record, int(unequal[0]) if unequal.size else count)


def runs_for(
    record: CompletionRecord, base: int, wanted: dict[tuple[int, str], Ranges], end: int
) -> list[Run]:
    """The runs of a segment at ``base`` with a row of ``wanted`` before token ``end``."""
    found = []
    for run in record.runs:
        first, last = run.start + base, min(run.start + run.rows + base, end)
        ranges = wanted.get((run.layer, run.side), ())
        if any(max(a, first) < min(b, last) for a, b in ranges):
            found.append(run)
    return found


def covered(record: CompletionRecord, base: int, end: int) -> dict[Window, Ranges]:
    """Which positions before ``end`` have rows in every leaf of a window."""
    by_leaf: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for run in record.runs:
        span = (run.start + base, min(run.start + run.rows + base, end))
        by_leaf.setdefault((run.layer, run.side), []).append(span)
    leaves = window_leaves(record.slots)
    found: dict[Window, Ranges] = {}
    for (layer, _), spans in by_leaf.items():
        window = leaves.get(layer)
        if window is not None:
            ranges = merged(spans)
            found[window] = _both(found[window], ranges) if window in found else ranges
    return found


def _both(left: Ranges, right: Ranges) -> Ranges:
    return merged((max(a, c), min(b, d)) for a, b in left for c, d in right)


def within(runs: Iterable[Run], rows: int) -> list[Run]:
    """The runs that end at or before local row ``rows``: what a broken store left goes."""
    return [run for run in runs if run.start + run.rows <= rows]


def without_overlap(runs: Sequence[Run], new: Sequence[Run]) -> list[Run]:
    """The runs of which the new ones overwrite nothing, and the new ones."""
    taken: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for run in new:
        taken.setdefault((run.layer, run.side), []).append((run.start, run.start + run.rows))
    kept = [
        run
        for run in runs
        if not any(
            max(a, run.start) < min(b, run.start + run.rows)
            for a, b in taken.get((run.layer, run.side), ())
        )
    ]
    return [*kept, *new]


def pruned(record: CompletionRecord, runs: list[Run]) -> CompletionRecord:
    """The record with these runs only, for a lane to load."""
    return replace(record, runs=runs)
