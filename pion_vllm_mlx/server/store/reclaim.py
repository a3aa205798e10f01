"""Giving dead bytes back, in quiet moments and a bounded step at a time.

The state names the groups that got untidy: something in them died, or their runs are many.
A step copies one group's live bytes out of segments that are mostly dead (``compaction``);
then these go. When all is tidy, a step looks for rows that are stored twice (``sharing``).
Who needs room has dead bytes given back at once, as far as there is room to copy what lives.
While it copies nobody waits; the write lock is held as for any store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from pion_vllm_mlx.server.store.compaction import Job, RowsCopy, plan, room_for
from pion_vllm_mlx.server.store.records import Record
from pion_vllm_mlx.server.store.sharing import Sharer
from pion_vllm_mlx.server.store.store import Store
from pion_vllm_mlx.server.store.verifying import drop_damaged, drop_damaged_state

T = TypeVar("T")

log = logging.getLogger(__name__)

#: bytes that one step copies, at most by one run more.
STEP_BYTES = 32 << 20
_LEAST_STEP_BYTES = 1 << 20
#: how long one step may look for something to do, on the event loop.
_LOOK_SECONDS = 0.002


class Reclaimer:
    """See the module's docstring. Used on the store's event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._sharer = Sharer(store)
        self._one_at_a_time = asyncio.Lock()
        #: that gave no room when somebody needed it; a quiet moment looks at them again
        self._later: dict[bytes, None] = {}
        budget = store.space.disk_budget
        # for a moment what is copied is there twice
        part = max(_LEAST_STEP_BYTES, budget // 64) if budget else STEP_BYTES
        self._step_bytes = min(STEP_BYTES, part)

    async def step(self) -> bool:
        """Tidy a group or share a session's rows, or a part; whether there was something to do.

        Raises CommandError or OSError when the disk refuses; the group is then left alone
        until it changes again.
        """
        store = self.store
        if store.saver.binds():
            return False
        if store.space.emptied.segments():
            # the flush that they wait for has failed
            await store.flush()
        async with self._one_at_a_time:
            if not store.saver.binds() and await self._tidy():
                return True
        if store.state.untidy or not store.config.share_equal:
            return False
        return await _to_its_end(self._sharer.step())

    async def make_room(self, nbytes: int) -> None:
        """Gives dead bytes back until ``nbytes`` fit the disk budget, or no more can be.

        Raises CommandError or OSError when the disk refuses.
        """
        state, space = self.store.state, self.store.space
        looked_at = time.monotonic()
        async with self._one_at_a_time:
            short = space.excess(nbytes) > 0
            while short and state.untidy and not self.store.saver.binds():
                group = next(iter(state.untidy))
                del state.untidy[group]
                if await self._give_back(group, nbytes):
                    state.untidy[group] = None  # there may be more for who comes next
                    short = space.excess(nbytes) > 0
                else:
                    self._later[group] = None
                if time.monotonic() > looked_at + _LOOK_SECONDS:
                    await asyncio.sleep(0)
                    looked_at = time.monotonic()

    async def _give_back(self, group: bytes, nbytes: int) -> bool:
        """Rewrites the mostly dead segments of a group, where there is room to copy them.

        Until ``nbytes`` fit; whether it has begun.
        """
        store, begun = self.store, False
        while not store.saver.binds():
            needed = room_for(store.state, store.segments, group)
            if not 0 < needed <= store.space.room_to_copy():
                break
            step = self._step_bytes
            copies = plan(store.state, store.segments, group, step, merge=False)
            if not copies:
                break
            begun = True
            await _to_its_end(self._carry_out(Job.begin(store.segments, copies)))
            if store.space.excess(nbytes) <= 0:
                break
        return begun

    async def _tidy(self) -> bool:
        store = self.store
        untidy, ends_at = store.state.untidy, time.monotonic() + _LOOK_SECONDS
        if not untidy:
            untidy.update(self._later)
            self._later.clear()
        while untidy and time.monotonic() < ends_at:
            group = next(iter(untidy))
            del untidy[group]
            copies = plan(store.state, store.segments, group, self._step_bytes)
            if copies:
                await _to_its_end(self._carry_out(Job.begin(store.segments, copies)))
                untidy[group] = None
                return True
        return False

    async def _carry_out(self, job: Job) -> None:
        store = self.store

        def build() -> list[Record]:
            # a save may have begun since this step did
            return [] if store.saver.binds() else job.effects(store.state)

        try:
            await store.run(job.carry_out)
            if job.damaged is None:
                await store.commit(build, copied=True)
        finally:
            self._end(job)
        if job.damaged is None:
            store.counters.bytes_copied += sum(copy.nbytes for copy in job.copies)
            return
        log.warning("a copy ended: %s", job.why)
        if isinstance(job.damaged, RowsCopy):
            await drop_damaged(store, [job.damaged.session], job.why)
        else:
            await drop_damaged_state(store, job.damaged.sid, job.damaged.blob, job.why)

    def _end(self, job: Job) -> None:
        """Nobody writes to the segment any more. It goes, unless something lives there now."""
        broken = self.store.vstore_wal.broken or self.store.ssm_wal.broken
        for region in job.regions:
            if broken:
                # the log's end may name the segment: the next start finds out
                region.release()
            else:
                self.store.space.release(region, kept=True)


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that ends also when its caller is cancelled: a segment that a log names stays."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
