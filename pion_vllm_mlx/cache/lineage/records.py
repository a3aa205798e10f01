"""Completion records of segments and checkpoints: what proves a hit over a chain.

Each segment has one under its namespace: the key, its token ids, and the checksum of every
run; ids and runs count from the segment's base. What lies before the base is named in the key
by its length and a 256-bit digest of its ids: the ids themselves are compared in the records
of the segments that own them. A checkpoint has a record under ``<namespace>@<length>``: key,
ids from the base on, the metadata of every slot at that length, the checksums of its states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.completion import CompletionRecord, Run, TokenIds
from pion_vllm_mlx.cache.identity_names import first_difference
from pion_vllm_mlx.cache.lineage.blocks import common_tokens
from pion_vllm_mlx.cache.lineage.coverage import Ranges, Window, merged
from pion_vllm_mlx.cache.lineage.shape import window_leaves
from pion_vllm_mlx.errors import DamagedData

Identity = dict[str, Any]


def checkpoint_sid(namespace: str, length: int) -> str:
    """Where the states of a checkpoint lie."""
    return f"{namespace}@{length}"


def links(identity: dict[str, Any], tokens: TokenIds, bases: Iterable[int]) -> list[Identity]:
    """The key of what begins at each of the ascending ``bases`` of a prompt."""
    raw = np.ascontiguousarray(tokens, "<u4").data.cast("B")
    digest = hashlib.blake2b(digest_size=32)
    found, at = [], 0
    for base in bases:
        digest.update(raw[4 * at : 4 * base])
        at = base
        before = {"base": base, "prefix": digest.hexdigest()}
        found.append({**identity, "lineage": before} if base else identity)
    return found


def link(identity: dict[str, Any], tokens: TokenIds, base: int) -> Identity:
    """The key of what begins at ``base`` of a prompt."""
    return links(identity, tokens, [base])[0]


@dataclass(frozen=True)
class Claim:
    """What a record has to be of: a key, and a prompt from ``base`` on. ``what`` names it."""

    key: Identity
    tokens: TokenIds
    base: int
    what: str


@dataclass(frozen=True)
class Proof:
    """A record that belongs to a key; ``shared`` tokens of the prompt agree with it."""

    record: CompletionRecord
    shared: int


def proved(blob: bytes | None, claim: Claim) -> Proof:
    """The record in ``blob``, as far as it is of this prompt.

    Raises DamagedData where there is none, where it does not verify, or where it is of another
    key; NewerFormat.
    """
    if blob is None:
        raise DamagedData(f"{claim.what}: its completion record is gone")
    record = CompletionRecord.decode(blob)
    differing = first_difference(record.identity, claim.key)
    if differing is not None:
        raise DamagedData(f"{claim.what}: key field {differing} differs")
    return Proof(record, claim.base + common_tokens(record.ids, claim.tokens[claim.base :]))


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
