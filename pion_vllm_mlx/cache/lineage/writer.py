"""Storing what was captured: the one thread that writes to the store.

1. the lock of the tree, 2. what is there by now, 3. room, 4. rows and states, 5. completion
records, 6. the index, at one moment. Whatever ends before 6 is invisible. Everything here
is bytes: no MLX stream is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from crc32c import crc32c

from pion_vllm_mlx.cache.completion import (
    COMPLETION_LAYER,
    CompletionRecord,
    Run,
)
from pion_vllm_mlx.cache.lanes_codec import layout_of
from pion_vllm_mlx.cache.leaf import LeafSpec
from pion_vllm_mlx.cache.lineage.blocks import root_field
from pion_vllm_mlx.cache.lineage.budget import Budget, Gauge, OverBudget
from pion_vllm_mlx.cache.lineage.capture import Captured, Rows
from pion_vllm_mlx.cache.lineage.carrying import SharedWith, read_rows, shared_rows
from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.lineage.counters import Counters
from pion_vllm_mlx.cache.lineage.index import Found, Gone, Index, Names, Segment
from pion_vllm_mlx.cache.lineage.locks import PATIENCE_SECONDS, TreeLock, acquire, release, renew
from pion_vllm_mlx.cache.lineage.merging import Tail, joined, tails
from pion_vllm_mlx.cache.lineage.plan import (
    RECORD_BYTES,
    RUN_RECORD_BYTES,
    TOKEN_BYTES,
    Job,
    Lost,
    Target,
    missing_rows,
    needed_bytes,
    row_bytes,
    targets_of,
    windows_after,
)
from pion_vllm_mlx.cache.lineage.publish import Change, Publisher
from pion_vllm_mlx.cache.lineage.reader import DamagedPiece
from pion_vllm_mlx.cache.lineage.records import (
    Claim,
    link,
    proved,
    within,
    without_overlap,
)
from pion_vllm_mlx.cache.lineage.states import store_state
from pion_vllm_mlx.cache.store_client import Registration
from pion_vllm_mlx.errors import DamagedData, NewerFormat, PionError

__all__ = ["Job", "Lost", "Writer"]

log = logging.getLogger("pion_vllm_mlx")

RUN_BYTES = 256 << 20
"""A longer run is cut: one bulk string has to stay under the server's limit."""

_MOST_GONE = 8
"""So many branches of one prompt that the server evicted are taken out for one store."""

_Planned = tuple[Job, list[Target]]
_AtWork = Callable[[], None]


class Writer:
    """Carries out jobs, one after the other, for any number of models."""

    def __init__(self, client: LineageClient, budget_bytes: int, counters: Counters) -> None:
        self._client = client
        self._budget_bytes, self._gauge = budget_bytes, Gauge()
        self._counters = counters
        self.patience = PATIENCE_SECONDS

    def write(self, job: Job) -> list[str]:
        """Stores what of a job is not stored yet; the namespaces that got rows.

        Raises PionError for what could not be stored.
        """
        written: list[str] = []
        if 0 < job.anchor < job.tokens.size:
            written += self._write(job.up_to_anchor())
        return written + self._write(job)

    def forget_damaged(self, names: Names, damage: DamagedPiece) -> bool:
        """Drops a segment or checkpoint that did not verify; whether it was damage.

        It is none where the record is another one by now, the checkpoint was thinned out, or the
        server has evicted the segment.
        """
        publisher, namespace = Publisher(self._client, names), names.namespace(damage.segment)
        sid = damage.sid or namespace
        (now,) = self._client.demand(namespace, [("SSM.PREFIX.FETCH", sid, COMPLETION_LAYER)])
        if now != damage.record:
            return False
        if damage.sid is not None:
            return publisher.delist(damage.segment, damage.sid)
        index = Index(self._client, names)
        (segment,) = index.segments([damage.segment])
        evicted = index.gone(segment) if segment is not None and now is None else None
        if evicted is not None and evicted.evicted:
            self._take_out(names, evicted)
            return False
        publisher.remove(segment or Segment(damage.segment, -1, 0, 0), None, with_kids=True)
        return True

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
        found = self._find(job)
        # before anything has to leave the server for what is stored now
        Publisher(self._client, job.names).touch([one.number for one in found.chain])
        try:
            targets = self._targets(job, found)
        except DamagedData as error:
            # what the index names cannot be served: out with it, and once more
            self._counters.add("damaged", why=str(error))
            self._forget(job, found)
            found = self._find(job)
            targets = self._targets(job, found)
        if targets:
            job, targets = self._with_room(job, found, targets, lock)
            self._fill(job, targets, lock)
        return [job.names.namespace(one.segment.number) for one in targets if one.new_runs]

    def _find(self, job: Job) -> Found:
        """What a prompt agrees with; what its server has evicted of that goes out of the index."""
        index = Index(self._client, job.names)
        found = index.find(job.tokens, whole=True)
        for _ in range(_MOST_GONE):
            if found.gone is None:
                break
            self._take_out(job.names, found.gone)
            found = index.find(job.tokens, whole=True)
        return found

    def _take_out(self, names: Names, gone: Gone) -> None:
        name = "evicted_by_server" if gone.evicted else "gone"
        self._counters.add(name, why=gone.sentence)
        log.info("stored rows are gone: %s", gone.sentence)
        Budget(self._client, names, self._budget_bytes).take_out(names, gone.segment)

    def _targets(self, job: Job, found: Found) -> list[Target]:
        """What is to be written, with the records of what is there. Raises DamagedData."""
        targets = targets_of(job, found)
        for target in targets:
            if not target.is_new:
                target.record = self._record_of(job, target.segment, target)
        return targets

    def _record_of(self, job: Job, segment: Segment, target: Target) -> CompletionRecord:
        """The record of an existing segment. Raises DamagedData where it does not prove it."""
        agrees = min(target.end, target.was_end)
        key = link(job.identity, job.tokens, segment.base)
        namespace = job.names.namespace(segment.number)
        claim = Claim(key, job.tokens, segment.base, f"segment {namespace}")
        try:
            proof = proved(self._client.record(namespace), claim)
        except NewerFormat as error:
            raise Lost(str(error)) from error
        if proof.shared < agrees:
            raise DamagedData(f"segment {namespace}: its record is of other tokens")
        return proof.record

    # -- room ---------------------------------------------------------------------

    def _with_room(self, job: Job, found: Found, targets: list[Target], lock: TreeLock) -> _Planned:
        """The job and its targets, once there is room for them.

        Where there is none beside the conversations that the prompt left, it begins anew behind
        the last anchor, with the rows that it shared with them: then they may go, too.
        Raises OverBudget, Lost.
        """
        budget = Budget(self._client, job.names, self._budget_bytes, self._gauge)
        try:
            at_work = partial(renew, self._client, job.names, lock)
            return self._room(job, found, targets, budget, at_work)
        except OverBudget as error:
            raise OverBudget(f"{job.length:,} tokens: {error}") from error
        finally:
            self._counters.add("evicted", budget.evicted)

    def _room(
        self, job: Job, found: Found, targets: list[Target], budget: Budget, at_work: _AtWork
    ) -> _Planned:
        stays = _what_stays(found)
        try:
            budget.make_room(needed_bytes(job, targets), _numbers(found))
            return job, targets
        except OverBudget:
            if stays == found:
                raise
        job = self._behind(job, stays, found, budget, at_work)
        index = Index(self._client, job.names)
        return job, self._targets(job, index.find(job.tokens, whole=True))

    def _behind(
        self, job: Job, stays: Found, found: Found, budget: Budget, at_work: _AtWork
    ) -> Job:
        """The job with the rows that it needs behind ``stays``, once there is room for those."""
        captured = job.captured
        shared = shared_rows(captured, stays.common, self._records_behind(job, stays, found))
        anew = replace(job, captured=replace(captured, rows=[*shared, *captured.rows]))
        needed = needed_bytes(anew, targets_of(anew, stays))
        budget.make_room(needed, _numbers(stays), only_try=True)
        try:
            read = list(read_rows(self._client, shared, captured.leaves, at_work))
        except DamagedData as error:
            raise Lost(str(error)) from error
        at_work()
        budget.make_room(needed, _numbers(stays))
        at_work()
        return replace(job, captured=replace(captured, rows=[*read, *captured.rows]))

    def _records_behind(self, job: Job, stays: Found, found: Found) -> Iterator[SharedWith]:
        """Those of the segments that a prompt agrees with behind ``stays``."""
        for segment, end in zip(found.chain, found.ends, strict=True):
            if end > stays.common:
                record = self._record_of(job, segment, Target(segment, end, segment.end))
                yield SharedWith(job.names.namespace(segment.number), segment.base, end, record)

    # -- writing ------------------------------------------------------------------

    def _fill(self, job: Job, targets: list[Target], lock: TreeLock) -> None:
        publisher = Publisher(self._client, job.names)
        for target in targets:
            lock.last = target is targets[-1]
            if target.is_new:
                self._open(job, target, publisher)
            try:
                self._store(job, target, publisher, lock)
            except PionError:
                if target.is_new:
                    self._give_up(job, target, publisher)
                raise

    def _open(self, job: Job, target: Target, publisher: Publisher) -> None:
        """Gives a new segment its number and its namespace."""
        number = publisher.reserve()
        target.segment = replace(target.segment, number=number)
        namespace = job.names.namespace(number)
        self._client.drop(namespace)  # numbers begin anew where the keys were flushed
        self._client.register(namespace, Registration.of(job.captured.leaves))

    def _store(self, job: Job, target: Target, publisher: Publisher, lock: TreeLock) -> None:
        """Rows, states, records, then the index."""
        segment = target.segment
        namespace = job.names.namespace(segment.number)
        sent = self._client.store_rows(namespace, self._encoded(job, target, lock))
        sent -= target.again_bytes
        self._counters.add("bytes_rows", sent)
        self._counters.add("bytes_merged", target.again_bytes)
        state = store_state(self._client, job, target, namespace)
        segment = replace(state.segment, windows=windows_after(job.captured, target))
        record = self._record(job, target, segment)
        sent += state.num_bytes
        self._counters.add("bytes_written", sent + self._store_record(namespace, namespace, record))
        grown = segment.end - target.was_end
        added = sent + TOKEN_BYTES * grown + RUN_RECORD_BYTES * len(target.new_runs)
        added += RECORD_BYTES * target.is_new - state.num_bytes * len(state.own)
        for number, sid in state.above:
            publisher.delist(number, sid, freed=state.num_bytes)
        if grown > 0:
            layout = _layout(job.captured)
            change = Change(segment, job.tokens, target.was_end, added, job.identity, layout)
            publisher.publish(change, [*(n for n, _ in segment.up), segment.number], lock)
        else:
            publisher.amend(segment, added, lock)
        for sid in state.own:
            self._client.drop_states(namespace, sid)

    def _encoded(self, job: Job, target: Target, lock: TreeLock) -> Iterator[tuple[Run, Any]]:
        """The rows that are missing in a target, as they are sent."""
        segment, captured = target.segment, job.captured
        short = tails(target.record, target.was_end - segment.base) if target.record else {}
        for held, start, last in missing_rows(job, target):
            for first, stop in _cut(start, last, held, captured.leaves[held.layer]):
                renew(self._client, job.names, lock)
                tail = short.get((held.layer, held.side))
                if tail is not None and tail.end != first - segment.base:
                    tail = None
                run, blob = self._run(job, target, held, (first, stop), tail)
                target.new_runs.append(run)
                yield run, blob

    def _run(
        self, job: Job, target: Target, held: Rows, span: tuple[int, int], tail: Tail | None
    ) -> tuple[Run, Any]:
        """Rows ``span`` as a run, behind those of ``tail`` if there are any."""
        leaf, base = job.captured.leaves[held.layer], target.segment.base
        blob = held.encoded(*span, leaf)
        start = span[0] - base
        if tail is not None and target.record is not None:
            namespace = job.names.namespace(target.segment.number)
            new_bytes = blob.nbytes
            blob = joined(self._client, namespace, target.record, tail, blob)
            target.again_bytes += blob.nbytes - new_bytes
            start = tail.start
        form = (leaf.format_of(held.side), layout_of(leaf, held.side))
        rows = span[1] - base - start
        return Run(held.layer, held.side, start, rows, *form, crc32c(blob.data)), blob

    def _record(self, job: Job, target: Target, segment: Segment) -> CompletionRecord:
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

    def _give_up(self, job: Job, target: Target, publisher: Publisher) -> None:
        """Frees what a store that failed has written; else the sweep will."""
        try:
            publisher.free(job.names.namespace(target.segment.number))
        except PionError:
            return

    def _forget(self, job: Job, found: Found) -> None:
        """Takes the segments whose records do not verify out of the index, leaf first."""
        publisher = Publisher(self._client, job.names)
        for segment, end in reversed(list(zip(found.chain, found.ends, strict=True))):
            try:
                self._record_of(job, segment, Target(segment, end, segment.end))
            except DamagedData:
                publisher.remove(segment, None, with_kids=True)


def _numbers(found: Found) -> set[int]:
    return {segment.number for segment in found.chain}


def _what_stays(found: Found) -> Found:
    """The chain to its last anchor or pin: what is behind that is of conversations alone."""
    held = [at for at, one in enumerate(found.chain) if one.pinned or one.kind == "anchor"]
    if not held:
        return Found()
    return Found(found.chain[: held[-1] + 1], found.ends[held[-1]])


def _cut(start: int, end: int, held: Rows, leaf: LeafSpec) -> Iterator[tuple[int, int]]:
    step = max(1, RUN_BYTES // max(row_bytes(leaf, held.side), 1))
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
