"""Storing what was captured: the one thread that writes to the store.

1. the lock of the tree, 2. what is there by now, 3. room, 4. rows and states, 5. completion
records, 6. the index, at one moment. Whatever ends before 6 is invisible. Everything here
is bytes: no MLX stream is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crc32c import crc32c

from pion_vllm_mlx.cache.completion import (
    COMPLETION_LAYER,
    CompletionRecord,
    Run,
    StateSum,
    TokenIds,
)
from pion_vllm_mlx.cache.lanes_codec import layout_of
from pion_vllm_mlx.cache.layers import leaves_json
from pion_vllm_mlx.cache.leaf import LeafSpec
from pion_vllm_mlx.cache.lineage.blocks import root_field
from pion_vllm_mlx.cache.lineage.budget import Budget
from pion_vllm_mlx.cache.lineage.capture import Captured, HeldRows
from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.lineage.counters import Counters
from pion_vllm_mlx.cache.lineage.coverage import Ranges, Window, clipped, merged, without
from pion_vllm_mlx.cache.lineage.index import Found, Index, Names, Segment
from pion_vllm_mlx.cache.lineage.locks import PATIENCE_SECONDS, TreeLock, acquire, release, renew
from pion_vllm_mlx.cache.lineage.policy import thinned
from pion_vllm_mlx.cache.lineage.publish import Change, Publisher
from pion_vllm_mlx.cache.lineage.records import (
    Claim,
    checkpoint_sid,
    link,
    proved,
    within,
    without_overlap,
)
from pion_vllm_mlx.cache.lineage.shape import window_leaves
from pion_vllm_mlx.cache.lineage.types import Checkpoint, KeepKind
from pion_vllm_mlx.cache.store_client import Registration
from pion_vllm_mlx.errors import DamagedData, NewerFormat, PionError
from pion_vllm_mlx.formats import get_format

RUN_BYTES = 256 << 20
"""A longer run is cut: one bulk string has to stay under the server's limit."""

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


@dataclass
class _Target:
    """A segment that is being written: what it will be, and where its new rows begin."""

    segment: Segment
    record: CompletionRecord | None
    was_end: int
    is_new: bool = False
    new_runs: list[Run] = field(default_factory=list)


class Writer:
    """Carries out jobs, one after the other, for any number of models."""

    def __init__(self, client: LineageClient, budget_bytes: int, counters: Counters) -> None:
        self._client = client
        self._budget_bytes = budget_bytes
        self._counters = counters
        self.patience = PATIENCE_SECONDS

    def write(self, job: Job) -> list[str]:
        """Stores what of a job is not stored yet; the namespaces that got rows.

        Raises PionError for what could not be stored.
        """
        written: list[str] = []
        if 0 < job.anchor < job.tokens.size:
            written += self._write(_up_to(job, job.anchor))
        return written + self._write(job)

    def forget_damaged(self, names: Names, number: int, record: bytes | None) -> None:
        """Drops a segment that did not verify, unless its record is another one by now."""
        if self._client.record(names.namespace(number)) != record:
            return
        (segment,) = Index(self._client, names).segments([number])
        gone = segment or Segment(number, -1, 0, 0)
        Publisher(self._client, names).remove(gone, None, with_kids=True)

    def _write(self, job: Job) -> list[str]:
        root = root_field(job.tokens)
        if root is None:
            return []
        lock = acquire(self._client, job.names, root, self.patience)
        try:
            return self._write_locked(job, lock)
        finally:
            release(self._client, job.names, lock)

    def _write_locked(self, job: Job, lock: TreeLock) -> list[str]:
        index = Index(self._client, job.names)
        found = index.find(job.tokens, whole=True)
        try:
            targets = self._targets(job, found)
        except DamagedData as error:
            # what the index names cannot be served: out with it, and once more
            self._counters.add("damaged", why=str(error))
            self._forget(job, found)
            found = index.find(job.tokens, whole=True)
            targets = self._targets(job, found)
        if targets:
            self._fill(job, found, targets, lock)
        else:
            Publisher(self._client, job.names).touch([one.number for one in found.chain])
        return [job.names.namespace(one.segment.number) for one in targets if one.new_runs]

    # -- what goes where ----------------------------------------------------------

    def _targets(self, job: Job, found: Found) -> list[_Target]:
        """The segments that get something, root first; new ones have no number yet.

        Raises Lost where rows are missing that nobody has, DamagedData for a segment that
        does not verify.
        """
        targets = [
            _Target(_pinned(job, segment), None, segment.end)
            for segment in found.chain
            if self._amends(job, segment, found)
        ]
        total = job.tokens.size
        if found.common < total:
            _require_rows(job.captured, found.common, total)
            last = self._new_or_longer(job, found)
            targets = [one for one in targets if one.segment.number != last.segment.number]
            targets.append(last)
        for target in targets:
            if not target.is_new:
                target.record = self._record_of(job, target.segment, found)
        return targets

    def _new_or_longer(self, job: Job, found: Found) -> _Target:
        """The leaf, to be extended in place, or a new segment at the divergence."""
        leaf, total = found.leaf, int(job.tokens.size)
        kind = "anchor" if job.kind == "anchor" else ""
        if leaf is not None and found.common == leaf.end and not leaf.kids and not leaf.kind:
            return _Target(replace(leaf, end=total, kind=kind), None, leaf.end)
        up = tuple((one.number, one.base) for one in found.chain)
        parent = leaf.number if leaf is not None else -1
        segment = Segment(0, parent, found.common, total, up, kind=kind)
        return _Target(segment, None, found.common, is_new=True)

    def _amends(self, job: Job, segment: Segment, found: Found) -> bool:
        """Whether a segment that stays as long as it is gets windows, a state or a pin."""
        end = _end_in(segment, found)
        if self._owns_checkpoint(job, segment, end):
            return True
        if _pinned(job, segment) != segment:
            return True
        return any(
            without(clipped(held, segment.base, end), segment.windows.get(window, ()))
            for window, held in _held_windows(job.captured).items()
        )

    def _owns_checkpoint(self, job: Job, segment: Segment, end: int) -> bool:
        """Whether the state of this job belongs to a segment, and is not there."""
        total = job.tokens.size
        if not job.captured.states or not segment.base < total <= end:
            return False
        there = {one.length: one.kind for one in segment.checkpoints}
        return total not in there or (job.kind == "anchor" and there[total] != "anchor")

    def _record_of(self, job: Job, segment: Segment, found: Found) -> CompletionRecord:
        """The record of an existing segment. Raises DamagedData where it does not prove it."""
        namespace = job.names.namespace(segment.number)
        blob = self._client.record(namespace)
        try:
            proof = proved(blob, _claim(job, segment))
        except NewerFormat as error:
            raise Lost(str(error)) from error
        if proof.shared < _end_in(segment, found):
            raise DamagedData(f"segment {namespace}: its record is of other tokens")
        return proof.record

    # -- writing ------------------------------------------------------------------

    def _fill(self, job: Job, found: Found, targets: list[_Target], lock: TreeLock) -> None:
        budget = Budget(self._client, job.names, self._budget_bytes)
        publisher = Publisher(self._client, job.names)
        wanted = job.captured.num_bytes + TOKEN_BYTES * job.tokens.size
        try:
            budget.make_room(wanted, {one.number for one in found.chain})
        finally:
            self._counters.add("evicted", budget.evicted)
        for target in targets:
            if target.is_new:
                self._open(job, target, publisher)
            try:
                self._store(job, target, publisher, lock)
            except PionError:
                if target.is_new:
                    self._give_up(job, target, publisher)
                raise

    def _open(self, job: Job, target: _Target, publisher: Publisher) -> None:
        """Gives a new segment its number and its namespace."""
        number = publisher.reserve()
        target.segment = replace(target.segment, number=number)
        namespace = job.names.namespace(number)
        self._client.drop(namespace)  # numbers begin anew where the keys were flushed
        self._client.register(namespace, registration(job.captured.leaves))

    def _store(self, job: Job, target: _Target, publisher: Publisher, lock: TreeLock) -> None:
        """Rows, states, records, then the index."""
        segment = target.segment
        namespace = job.names.namespace(segment.number)
        end = min(segment.end, int(job.tokens.size))
        sent = self._client.store_rows(namespace, self._encoded(job, target, end, lock))
        self._counters.add("bytes_rows", sent)
        segment, state_bytes, dropped = self._store_checkpoint(job, segment, namespace, end)
        segment = replace(segment, windows=_windows_after(job.captured, segment, end))
        record = self._record(job, target, segment)
        sent += state_bytes
        self._counters.add("bytes_written", sent + self._store_record(namespace, namespace, record))
        grown = segment.end - target.was_end
        added = sent + TOKEN_BYTES * grown + RUN_RECORD_BYTES * len(target.new_runs)
        added += RECORD_BYTES * target.is_new - state_bytes * len(dropped)
        if grown > 0:
            layout = _layout(job.captured)
            change = Change(segment, job.tokens, target.was_end, added, job.identity, layout)
            publisher.publish(change, [*(n for n, _ in segment.up), segment.number], lock)
        else:
            publisher.amend(segment, added, lock)
        for checkpoint in dropped:
            self._client.drop_states(namespace, checkpoint.sid)

    def _encoded(
        self, job: Job, target: _Target, end: int, lock: TreeLock
    ) -> Iterator[tuple[Run, Any]]:
        """The rows that are missing in a target, as they are sent."""
        segment, captured = target.segment, job.captured
        windows = window_leaves(captured.slots)
        for held in captured.rows:
            leaf = captured.leaves[held.layer]
            window = windows.get(held.layer)
            if window is None:
                there: Ranges = ((0, target.was_end),)
            else:
                there = segment.windows.get(window, ())
            span = (max(held.start, segment.base), min(held.end, end))
            for start, last in without([span], there):
                for first, stop in _cut(start, last, held, leaf):
                    renew(self._client, job.names, lock)
                    blob = held.encoded(first, stop, leaf)
                    form = (leaf.format_of(held.side), layout_of(leaf, held.side))
                    place = (held.layer, held.side, first - segment.base, stop - first)
                    run = Run(*place, *form, crc32c(blob.data))
                    target.new_runs.append(run)
                    yield run, blob

    def _store_checkpoint(
        self, job: Job, segment: Segment, namespace: str, end: int
    ) -> tuple[Segment, int, Sequence[Checkpoint]]:
        """The states at the end of the job, if they belong here; what is thinned for them."""
        if not self._owns_checkpoint(job, segment, end):
            return segment, 0, ()
        length = int(job.tokens.size)
        sid = checkpoint_sid(namespace, length)
        sums, blobs = [], []
        for slot, blob in job.captured.state_blobs():
            sums.append(StateSum(slot, crc32c(blob), len(blob)))
            blobs.append((slot, blob, sums[-1].crc))
        sent = self._client.store_states_at(namespace, sid, blobs)
        record = CompletionRecord(
            link(job.identity, job.tokens, segment.base),
            job.tokens[segment.base :],
            job.captured.slots,
            _leaves_json(job.captured),
            states=sums,
        )
        sent += self._store_record(namespace, sid, record)
        others = [one for one in segment.checkpoints if one.length != length]
        stay, gone = thinned([*others, Checkpoint(length, job.kind, sid)])
        return replace(segment, checkpoints=tuple(stay)), sent, gone

    def _record(self, job: Job, target: _Target, segment: Segment) -> CompletionRecord:
        """The record of a segment as it is now."""
        new = target.new_runs
        if target.record is None:
            return CompletionRecord(
                link(job.identity, job.tokens, segment.base),
                job.tokens[segment.base : segment.end],
                job.captured.slots,
                _leaves_json(job.captured),
                new,
            )
        old = target.record
        if segment.end == target.was_end:  # other tokens than ours may follow in it
            return replace(old, runs=without_overlap(old.runs, new))
        known = within(old.runs, target.was_end - segment.base)
        return replace(
            old,
            ids=job.tokens[segment.base : segment.end],
            slots=job.captured.slots,
            runs=without_overlap(known, new),
        )

    def _store_record(self, namespace: str, sid: str, record: CompletionRecord) -> int:
        blob = record.encode()
        states = [(COMPLETION_LAYER, blob, crc32c(blob))]
        return self._client.store_states_at(namespace, sid, states)

    def _give_up(self, job: Job, target: _Target, publisher: Publisher) -> None:
        """Frees what a store that failed has written; else the sweep will."""
        try:
            publisher.free(job.names.namespace(target.segment.number))
        except PionError:
            return

    def _forget(self, job: Job, found: Found) -> None:
        """Takes a chain whose records do not verify out of the index, leaf first."""
        publisher = Publisher(self._client, job.names)
        for segment in reversed(found.chain):
            namespace = job.names.namespace(segment.number)
            try:
                proved(self._client.record(namespace), _claim(job, segment))
            except DamagedData:
                publisher.remove(segment, None, with_kids=True)


def _up_to(job: Job, length: int) -> Job:
    """The rows of a job up to its anchor, as an anchor of their own."""
    rows = [
        replace(held, end=min(held.end, length))
        for held in job.captured.rows
        if held.start < length
    ]
    captured = replace(job.captured, rows=rows, states={})
    return replace(job, tokens=job.tokens[:length], kind="anchor", captured=captured, anchor=0)


def _pinned(job: Job, segment: Segment) -> Segment:
    """The segment as an anchor, if it ends where an anchor was kept."""
    ends_there = job.kind == "anchor" and segment.end == job.tokens.size
    return replace(segment, kind="anchor") if ends_there else segment


def _claim(job: Job, segment: Segment) -> Claim:
    key = link(job.identity, job.tokens, segment.base)
    return Claim(key, job.tokens, segment.base, f"segment {job.names.namespace(segment.number)}")


def _end_in(segment: Segment, found: Found) -> int:
    """How far a segment of a chain agrees with the prompt."""
    ends = {
        one.number: child.base for one, child in zip(found.chain, found.chain[1:], strict=False)
    }
    return ends.get(segment.number, found.common)


def _held_windows(captured: Captured) -> dict[Window, Ranges]:
    """Which positions of each window were captured: the same in all of its leaves."""
    leaves = window_leaves(captured.slots)
    found: dict[Window, list[tuple[int, int]]] = {}
    for held in captured.rows:
        if held.layer in leaves:
            found.setdefault(leaves[held.layer], []).append((held.start, held.end))
    return {window: merged(spans) for window, spans in found.items()}


def _windows_after(captured: Captured, segment: Segment, end: int) -> dict[Window, Ranges]:
    """The windows of a segment once the captured rows up to ``end`` are in it."""
    found = dict(segment.windows)
    for window, held in _held_windows(captured).items():
        mine = clipped(held, segment.base, end)
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


def _cut(start: int, end: int, held: HeldRows, leaf: LeafSpec) -> Iterator[tuple[int, int]]:
    row_bytes = get_format(leaf.format_of(held.side)).row_bytes(leaf.width(held.side))
    step = max(1, RUN_BYTES // max(row_bytes, 1))
    for first in range(start, end, step):
        yield first, min(first + step, end)


def _leaves_json(captured: Captured) -> list[dict[str, Any]]:
    return [leaf.as_json() for leaf in captured.leaves]


def _layout(captured: Captured) -> str:
    """``n_layers,n_kv_heads,head_dim,dtype,enc`` of the first leaf."""
    if not captured.leaves:
        return "0,0,0,none,native"
    first = captured.leaves[0]
    width = (first.k_width or first.v_width) // max(first.heads, 1)
    return f"{len(captured.leaves)},{first.heads},{width},{first.format},native"


def registration(leaves: Sequence[LeafSpec]) -> Registration:
    """How the sessions of a segment are made."""
    if not leaves:  # recurrent layers only: the sessions exist, and stay empty
        return Registration(1, "fp16", 1, None, 0)
    first = leaves[0]
    opaque = first.format.startswith("raw:")
    return Registration(
        kv_dim=first.k_width or first.v_width or 1,
        vquant="fp16" if opaque else first.format,
        heads=first.heads,
        leaves=leaves_json(leaves),
        prefill_ms=0,
    )
