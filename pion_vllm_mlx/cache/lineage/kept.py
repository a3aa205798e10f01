"""The side of a lineage store that takes caches, and has them written behind the caller's back.

What ``keep`` costs its caller, who generates, is the copies of what is new, or nothing where the
caches are given away; a background thread plans, writes, evicts and publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.background import Line, Task
from pion_vllm_mlx.cache.lineage.beginnings import Beginnings
from pion_vllm_mlx.cache.lineage.blocks import FIRST_TOKENS
from pion_vllm_mlx.cache.lineage.budget import OverBudget
from pion_vllm_mlx.cache.lineage.capture import Captured, Since, Taken, capture, captured_of
from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.lineage.growing import Grown, together
from pion_vllm_mlx.cache.lineage.lending import (
    Schedule,
    Steps,
    at_once,
    can_be_lent,
    done_now,
    lend,
    lend_copies,
)
from pion_vllm_mlx.cache.lineage.plan import Job
from pion_vllm_mlx.cache.lineage.publish import Publisher
from pion_vllm_mlx.cache.lineage.shape import Shape
from pion_vllm_mlx.cache.lineage.stored import Stored
from pion_vllm_mlx.cache.lineage.tokens import Tokens, token_ids
from pion_vllm_mlx.cache.lineage.types import KeepKind
from pion_vllm_mlx.cache.lineage.writer import Writer
from pion_vllm_mlx.errors import CommandError, UnsupportedCache

ROWS, NOTE = "rows", "note"
"""What waits of a reply: what its caches had new, and what its journal is to say."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """What a task is to store, and the anchor that lies in it; each is another."""

    captured: Callable[[], Captured]
    anchor: int
    over: Callable[[], None]


def _nothing() -> None:
    """Nobody waits for something to be written."""


def _scheduled(arrays: Sequence[Any], then: Callable[[], None]) -> None:
    """Of arrays that are scheduled already."""
    then()


class Kept(Stored):
    """What a store of one model is given to keep; one that bypasses keeps nothing."""

    _back: LineageClient
    _writer: Writer
    _shape: Shape
    _anchors: Beginnings
    _refused: Beginnings
    _unsealed: dict[str, None]
    _swept: bool

    def keep(
        self,
        tokens: Tokens,
        caches: Sequence[Any],
        kind: KeepKind = "final",
        *,
        given: bool = False,
        schedule: Schedule = at_once,
    ) -> bool:
        """Has ``caches``, which hold exactly ``tokens``, stored; returns at once.

        Copies what is new on this thread's stream and hands it to a background thread.
        ``given``: nobody writes to these caches any more, so that the thread may take them
        apart. ``schedule`` has the arrays computed, on this thread. False, and counted, where
        they were not taken: nothing new, the queue is full, a cache that does not fit. Never
        raises for a reason of the store.
        """
        return done_now(self.keeping(tokens, caches, kind, given=given, schedule=schedule))

    def keeping(
        self,
        tokens: Tokens,
        caches: Sequence[Any],
        kind: KeepKind = "final",
        *,
        given: bool = False,
        schedule: Schedule = at_once,
        over: Callable[[], None] = _nothing,
    ) -> Steps[bool]:
        """``keep`` in steps, on this thread: before anything else is kept, once it has begun.

        First is found out what is new, with the others it is taken. ``over`` is called when it is
        written, or will not be: by any thread, maybe more than once.
        """
        queued = False
        try:
            new = yield from self._new(tokens, caches, given)
            if new is not None:
                ids, taken, anchor = new
                queued = self._queued(ids, kind, replace(taken, over=over), anchor, schedule)
        finally:
            if not queued:
                over()
        return queued

    def growing(self, known: TokenIds, caches: Sequence[Any], length: int) -> Grown | None:
        """What is new in the caches of a reply, which hold ``length`` tokens and grow on.

        To be called while a step is being made: its arrays, ``taken.arrays``, are to be computed
        with it, before the next one writes into these caches. ``known`` are the first of those
        tokens, as many as are known by then; ``grew`` is told all of them. None where nothing is
        to be stored; never raises for a reason of the store.
        """
        if known.size < self._least or self._bypass is not None:
            return None
        since, _ = self._recent.since(known)
        try:
            taken = done_now(self._taken(caches, length, since, given=False))
            return Grown(taken, since, length)
        except UnsupportedCache as error:
            self._faults.refused(error)
            return None

    def grew(self, ids: TokenIds, grown: Grown, reply: object) -> bool:
        """Has what a reply's caches had new stored as a guard, its arrays being scheduled.

        With what still waits to be stored of ``reply``, an object of its own: the newest state is
        enough. False, and counted, where it was not taken.
        """
        if int(ids.size) != grown.length:
            return False
        anchor = self._anchors.longest(ids)
        anchor = anchor if grown.since.rows < anchor else 0
        return self._queued(ids, "guard", grown.taken, anchor, _scheduled, reply)

    # -- inside ---------------------------------------------------------------

    @property
    def _least(self) -> int:
        return max(self.options.min_gain, FIRST_TOKENS)

    def _new(
        self, tokens: Tokens, caches: Sequence[Any], given: bool
    ) -> Steps[tuple[TokenIds, Taken, int] | None]:
        """What is new, and the anchor that lies in it; None, and counted, where nothing is."""
        ids, why = token_ids(tokens)
        if ids is None or self._bypass is not None or ids.size < self._least:
            self._counters.add("not_kept", why=why or self._bypass or "the prompt is too short")
            return None
        since, known = self._recent.since(ids)
        if since.rows == since.fresh == ids.size and (known or not self._shape.stateful):
            self._counters.add("known")
            return None
        anchor = self._anchors.longest(ids)
        anchor = anchor if since.rows < anchor else 0  # else it is stored, or inside of something
        yield
        try:
            taken = yield from self._taken(caches, int(ids.size), since, given)
        except UnsupportedCache as error:
            self._faults.refused(error)
            return None
        yield
        return ids, taken, anchor

    def _taken(self, caches: Sequence[Any], length: int, since: Since, given: bool) -> Steps[Taken]:
        """What the background thread is to have of caches. Raises UnsupportedCache."""
        shape, vquant = self._shape, self.options.vquant
        if given:
            whole = can_be_lent()
            lent = lend(caches) if whole else (yield from lend_copies(caches, since.rows))
            new = lent.num_bytes * (length - since.rows) // length if whole else lent.num_bytes
            found = partial(captured_of, lent, length, since, shape, vquant)
            return Taken(lent.raw, found, new)
        captured = capture(caches, length, since, shape, vquant)
        return Taken(captured.arrays, lambda: captured, captured.num_bytes)

    def _queued(
        self,
        ids: TokenIds,
        kind: KeepKind,
        taken: Taken,
        anchor: int,
        schedule: Schedule,
        reply: object = None,
    ) -> bool:
        """Has ``taken`` written when its arrays are scheduled; False where the queue is full."""
        full: list[bool] = []
        what = _Waiting(taken.captured, anchor, taken.over)

        def queue() -> None:
            task = self._task(ids, kind, (what,), reply)
            if not self._background.put(replace(task, num_bytes=taken.num_bytes)):
                self._counters.add("queue_full", why="more waits to be stored than the queue holds")
                self._recent.forget(ids)
                full.append(True)
                taken.over()

        # a reply's state is not stored where it waits, and a later one comes
        point = int(ids.size) if self._shape.stateful and reply is None else None
        self._coming.expect(what, ids)
        self._recent.note(ids, int(ids.size), int(ids.size), point)
        schedule(taken.arrays, queue)
        self._counters.add("kept", not full)
        return not full

    def _task(
        self, ids: TokenIds, kind: KeepKind, what: tuple[_Waiting, ...], reply: object
    ) -> Task:
        """Has ``what`` written as one; the parts of one reply, one behind the other."""
        key = self._key
        anchor = next((one.anchor for one in what if one.anchor), 0)

        def write() -> None:
            captured = reduce(together, (one.captured() for one in what))
            self._write(Job(ids, kind, captured, key.identity, key.names, anchor))

        def over() -> None:
            for one in what:
                one.over()

        def with_former(former: tuple[_Waiting, ...]) -> Task:
            return self._task(ids, kind, (*former, *what), reply)

        line = Line(reply, ROWS, with_former, what) if reply is not None else None
        return Task(write, partial(self._failed, ids), line=line, over=over, patient=True)

    def _in_background(self, run: Callable[[], None], reply: object = None) -> None:
        """Has ``run`` done; of those of one ``reply`` that wait behind its rows the last alone."""

        def failed(error: BaseException) -> None:
            self._counters.add("failed", why=str(error))

        def task(former: object = None) -> Task:
            line = Line(reply, NOTE, task, behind=True) if reply is not None else None
            return Task(run, failed, line=line)

        if not self._background.put(task()):
            self._counters.add("queue_full")

    # on the background thread

    def _write(self, job: Job) -> None:
        if not self._swept:
            self._swept = True
            Publisher(self._back, job.names).sweep()
        written = self._writer.write(job)
        self._counters.add("written")
        self._faults.stored()
        self._front.endpoint.door.answered()  # those who wait for it need not find that out
        self._unsealed.update(dict.fromkeys(written))
        if self.options.durable:
            (reply,) = self._back.pipeline(job.names.route, [("KV.PREFIX.COMMIT",)])
            if isinstance(reply, CommandError):
                self._faults.not_durable(reply)

    def _when_idle(self) -> None:
        """Has new files sealed, so that the next process can map them."""
        unsealed, self._unsealed = list(self._unsealed), {}
        for namespace in unsealed:
            self._back.publish(namespace)

    def _failed(self, ids: TokenIds, error: BaseException) -> None:
        self._recent.forget(ids)
        if isinstance(error, OverBudget):
            self._refused.expect(ids)
        if isinstance(error, UnsupportedCache):
            self._faults.refused(error)
        else:
            self._faults.failed(error)
