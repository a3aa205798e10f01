"""What a store has to write, and where: decided before anything is written.

A prompt that continues a leaf extends it in place; one that leaves its lineage becomes a
child there. Segments that the prompt only passes through get what they lack up to where it
leaves them: rows of windows, a state, a pin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pion_vllm_mlx.cache.completion import CompletionRecord, Run, TokenIds
from pion_vllm_mlx.cache.leaf import LeafSpec, Side
from pion_vllm_mlx.cache.lineage.capture import Captured, Rows
from pion_vllm_mlx.cache.lineage.coverage import Ranges, Window, clipped, merged, without
from pion_vllm_mlx.cache.lineage.index import Found, Names, Segment
from pion_vllm_mlx.cache.lineage.shape import needs_checkpoints, window_leaves
from pion_vllm_mlx.cache.lineage.types import KeepKind
from pion_vllm_mlx.errors import PionError
from pion_vllm_mlx.formats import get_format

RECORD_BYTES, RUN_RECORD_BYTES = 4096, 64
"""About what a completion record has beside its ids, and what a run adds to it."""

TOKEN_BYTES = 8
"""What a token costs beside its rows: its id, in the index and in the record."""


class Lost(PionError):
    """What this store builds on is not there any more; the next one brings all of it."""


@dataclass(frozen=True)
class Job:
    """A prompt whose caches were captured, and the key it is stored under."""

    tokens: TokenIds
    kind: KeepKind
    captured: Captured
    identity: dict[str, Any]
    names: Names
    anchor: int = 0

    @property
    def length(self) -> int:
        return int(self.tokens.size)

    @property
    def owns_checkpoint(self) -> bool:
        """Whether these caches can be restored where the prompt ends, and only there."""
        return needs_checkpoints(self.captured.slots)

    def up_to_anchor(self) -> Job:
        """The rows up to the anchor, as an anchor of their own."""
        rows = [one.until(self.anchor) for one in self.captured.rows if one.start < self.anchor]
        captured = replace(self.captured, rows=rows, states={})
        tokens = self.tokens[: self.anchor]
        return replace(self, tokens=tokens, kind="anchor", captured=captured, anchor=0)


@dataclass
class Target:
    """A segment that is being written, as it will be.

    Up to ``end`` it agrees with the prompt; ``was_end`` is where it ended before, its base
    for a new one. ``above`` are the segments that it stands on, each with where the prompt
    leaves it. ``again_bytes`` are those of rows that are sent once more, joined.
    """

    segment: Segment
    end: int
    was_end: int
    is_new: bool = False
    above: Sequence[tuple[Segment, int]] = ()
    record: CompletionRecord | None = None
    new_runs: list[Run] = field(default_factory=list)
    again_bytes: int = 0

    def owns_state(self, job: Job) -> bool:
        """Whether the state of a job belongs here, and is not there."""
        if not job.owns_checkpoint or not self.segment.base < job.length <= self.end:
            return False
        there = {one.length: one.kind for one in self.segment.checkpoints}
        return job.length not in there or (job.kind == "anchor" and there[job.length] != "anchor")


def targets_of(job: Job, found: Found) -> list[Target]:
    """The segments that get something, root first; a new one has no number yet.

    Raises Lost where rows are missing that nobody has.
    """
    through = [
        Target(_pinned(job, segment), end, segment.end)
        for segment, end in zip(found.chain, found.ends, strict=True)
    ]
    amended = [one for one in through if _lacks(job, one)]
    amended += [
        one
        for one, segment in zip(through, found.chain, strict=True)
        if one not in amended and one.segment != segment
    ]
    if found.common < job.length:
        _require_rows(job.captured, found.common, job.length)
        last = _new_or_longer(job, found)
        amended = [one for one in amended if one.segment.number != last.segment.number]
        amended.append(last)
    chain = list(zip(found.chain, found.ends, strict=True))
    for target in amended:
        target.above = [one for one in chain if one[0].base < target.segment.base]
    return amended


def _new_or_longer(job: Job, found: Found) -> Target:
    """The leaf, to be extended in place, or a new segment at the divergence."""
    leaf, total = found.leaf, job.length
    kind = "anchor" if job.kind == "anchor" else ""
    if leaf is not None and found.common == leaf.end and not leaf.kids and not leaf.kind:
        return Target(replace(leaf, end=total, kind=kind), total, leaf.end)
    up = tuple((one.number, one.base) for one in found.chain)
    parent = leaf.number if leaf is not None else -1
    segment = Segment(0, parent, found.common, total, up, kind=kind)
    return Target(segment, total, found.common, is_new=True)


def _pinned(job: Job, segment: Segment) -> Segment:
    """The segment as an anchor, if it ends where an anchor was kept."""
    ends_there = job.kind == "anchor" and segment.end == job.length
    return replace(segment, kind="anchor") if ends_there else segment


def _lacks(job: Job, target: Target) -> bool:
    """Whether a segment that stays as long as it is gets rows of windows or a state."""
    segment = target.segment
    return target.owns_state(job) or any(
        without(clipped(held, segment.base, target.end), segment.windows.get(window, ()))
        for window, held in held_windows(job.captured).items()
    )


def missing_rows(job: Job, target: Target) -> Iterator[tuple[Rows, int, int]]:
    """What of the captured rows a target lacks: those of tokens ``[start, end)``."""
    segment = target.segment
    windows = window_leaves(job.captured.slots)
    for held in job.captured.rows:
        window = windows.get(held.layer)
        there: Ranges = ((0, target.was_end),)
        if window is not None:
            there = segment.windows.get(window, ())
        span = (max(held.start, segment.base), min(held.end, target.end))
        for start, end in without([span], there):
            yield held, start, end


def row_bytes(leaf: LeafSpec, side: Side) -> int:
    """What one row of a side of a leaf takes where it is stored."""
    return get_format(leaf.format_of(side)).row_bytes(leaf.width(side))


def needed_bytes(job: Job, targets: Iterable[Target]) -> int:
    """What the targets will hold more than before; of their records an estimate."""
    captured, total = job.captured, 0
    for target in targets:
        for held, start, end in missing_rows(job, target):
            total += (end - start) * row_bytes(captured.leaves[held.layer], held.side)
            total += RUN_RECORD_BYTES
        total += TOKEN_BYTES * max(0, target.segment.end - target.was_end)
        total += RECORD_BYTES * target.is_new
        if target.owns_state(job):
            leaves = [leaf.as_json() for leaf in captured.leaves]
            total += captured.state_bytes + len(json.dumps([captured.slots, leaves]))
            total += RECORD_BYTES + TOKEN_BYTES * (job.length - target.segment.base)
    return total


def held_windows(captured: Captured) -> dict[Window, Ranges]:
    """Which positions of each window were captured: the same in all of its leaves."""
    leaves = window_leaves(captured.slots)
    found: dict[Window, list[tuple[int, int]]] = {}
    for held in captured.rows:
        if held.layer in leaves:
            found.setdefault(leaves[held.layer], []).append((held.start, held.end))
    return {window: merged(spans) for window, spans in found.items()}


def windows_after(captured: Captured, target: Target) -> dict[Window, Ranges]:
    """The windows of a segment once the captured rows are in it."""
    segment = target.segment
    found = dict(segment.windows)
    for window, held in held_windows(captured).items():
        mine = clipped(held, segment.base, target.end)
        found[window] = merged([*found.get(window, ()), *mine])
    return found


def _require_rows(captured: Captured, common: int, total: int) -> None:
    """Raises Lost where rows from ``common`` on are missing in a leaf that needs all."""
    windows = window_leaves(captured.slots)
    for layer, leaf in enumerate(captured.leaves):
        if layer in windows:
            continue
        for side in ("k", "v"):
            spans = merged(
                (held.start, held.end)
                for held in captured.rows
                if held.layer == layer and held.side == side
            )
            if leaf.width(side) and without([(common, total)], spans):
                raise Lost(f"rows from token {common} on are not stored any more")
