"""The store of one worker: everything that is durable, behind one object.

Bulk bytes are written outside the write lock, into regions handed out by the
event loop. Under the lock an effect is checked, logged and applied; nobody sees
it before it is logged. Blocking calls run on the store's threads; the state
belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.server.store.counters import Counters, Replayed
from pion_vllm_mlx.server.store.eviction import (
    EvictionPolicy,
    LeastRecentlyUsed,
    PinLimits,
    drop_expired,
)
from pion_vllm_mlx.server.store.files import not_rewritten, raise_file_limit
from pion_vllm_mlx.server.store.folder_use import FolderUse
from pion_vllm_mlx.server.store.records import Drop, DropStates, Record, told_sids
from pion_vllm_mlx.server.store.recovery import Paths, Recovery
from pion_vllm_mlx.server.store.reserve import Reserve, is_full
from pion_vllm_mlx.server.store.saving import Saver
from pion_vllm_mlx.server.store.sealing import SealJob, begin_seal
from pion_vllm_mlx.server.store.segment import Region, Segment
from pion_vllm_mlx.server.store.space import Space, disk_error
from pion_vllm_mlx.server.store.wal import Logged, append_together

T = TypeVar("T")

log = logging.getLogger(__name__)

#: how long sealing waits for stores that are under way.
SEAL_WAIT_SECONDS = 1.0
#: how long after a save that failed no store waits for another one.
CATCH_UP_AGAIN_SECONDS = 10.0
#: flushes of what is written, before one for which stores wait: it has little left to do.
_FLUSHES_AHEAD = 2
#: while the disk keeps so many files in a row that should go, nobody leaves to make room.
_MANY_KEPT = 4
#: how many sessions past their deadline are dropped at once.
_EXPIRE_BATCH = 256


async def _nothing_to_give() -> None:
    return


async def _nothing_dead(nbytes: int) -> None:
    """Of a store that nobody reclaims."""


class Store:
    """See the module's docstring. Created and used on one event loop."""

    def __init__(self, config: StoreConfig, policy: EvictionPolicy | None = None) -> None:
        """Recover the folder's content. Blocks; raises DamagedData, NewerFormat, OSError."""
        self.config = config
        raise_file_limit()
        self.paths = Paths(config.folder, config.worker)
        found = Recovery(self.paths, config.wal, config.salvage).run()
        self.state = found.state
        self.segments = found.folder
        pins = PinLimits.half_of(config.max_sessions, config.disk_budget)
        use = FolderUse(config.folder, config.worker, config.workers)
        use.logs += (found.vstore_wal, found.ssm_wal)
        self.space = Space(
            found.state,
            found.folder,
            policy or LeastRecentlyUsed(pins),
            config.disk_budget,
            config.max_sessions,
            pins,
            use,
            workers=config.workers,
            disk_allows=config.disk_allows,
        )
        self.space.disk_bytes()  # looks at every file, while nobody waits
        self.vstore_wal = found.vstore_wal
        self.ssm_wal = found.ssm_wal
        self.replayed = Replayed(found.vstore_replayed, found.ssm_replayed, found.notes)
        self.counters = Counters(damaged=found.damaged)
        self.last_write = time.monotonic()
        #: told which sessions changed or went, after every effect
        self.on_change: Callable[[list[bytes]], None] = lambda sids: None
        #: told every effect, once it is applied
        self.on_effects: Callable[[Sequence[Record]], None] = lambda effects: None
        #: saves what counts beside prefixes, where that gives much back
        self.give_back: Callable[[], Awaitable[None]] = _nothing_to_give
        #: gives dead bytes back, for so many that are to fit
        self.tidy: Callable[[int], Awaitable[None]] = _nothing_dead
        found.state.compares = config.share_equal
        if not config.share_equal:
            found.state.unshared.clear()
        found.state.untidy.update((s.group, None) for s in found.folder.segments.values())
        self.write_lock = asyncio.Lock()
        self.io = ThreadPoolExecutor(4, thread_name_prefix="store-io")
        self._log_thread = ThreadPoolExecutor(1, thread_name_prefix="store-log")
        self.saver = Saver(self)
        self._catching_up = asyncio.Lock()
        self._catch_up_again = 0.0
        self._reserve = Reserve(self.paths.reserve) if config.wal else None
        if found.salvaged:  # also without logs: what was repaired is to stay so
            self.saver.write_files()
        if self._reserve is not None:
            self._reserve.fill()

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking ``work`` off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.io, work)

    # -- effects ---------------------------------------------------------------

    async def commit(self, build: Callable[[], Sequence[Record]], copied: bool = False) -> None:
        """Check and log one command's effects, then apply them.

        ``build`` runs under the write lock, on the event loop, and may refuse by raising
        CommandError; then nothing happens. ``copied``: the effects only move what is there;
        where it was goes when the records are on stable storage.
        """

        async def locked() -> None:
            async with self.write_lock:
                if self.space.look_is_due():
                    await self.run(self.space.look)
                await self._log(list(build()), copied)

        await _going_on(locked())
        await self.close_retired()  # who drops to make room has it with the answer

    async def _log(self, effects: Sequence[Record], copied: bool = False) -> bool:
        """Log and apply; False where what was emptied waits for a flush that the disk refused.

        Under the write lock. Raises CommandError.
        """
        if not effects:
            return True
        loop = asyncio.get_running_loop()
        leaving = self.space.leaving(effects)
        for entry in await loop.run_in_executor(self._log_thread, self._append, effects):
            self.state.apply(entry)
        self.space.left(leaving)
        self.on_change([sid for effect in effects for sid in told_sids(effect)])
        self.on_effects(effects)
        if not copied:
            self.last_write = time.monotonic()
        if copied or self.config.appendfsync == "always":
            await self._flush_at_once()
        return await self._discard(flushed=copied or self.config.appendfsync == "always")

    def _append(self, effects: Sequence[Record]) -> list[Logged]:
        """Log all effects or none; on a full disk what only frees room has the reserve. Blocks."""
        # states first: without its completion record a prefix is no hit
        logs = ((self.ssm_wal, "ssm"), (self.vstore_wal, "vstore"))
        batches = [(wal, [e for e in effects if e.log == name]) for wal, name in logs]
        try:
            self.segments.write_rows(effects)
            return append_together(batches)
        except OSError as error:
            raise disk_error(error) from error
        except CommandError as error:
            drops = all(isinstance(effect, (Drop, DropStates)) for effect in effects)
            if not (is_full(error) and drops and self._reserve and self._reserve.give()):
                raise
        return append_together(batches)

    async def _discard(self, flushed: bool = False) -> bool:
        """Unlink what nothing lives in, once the records that say so are on stable storage.

        ``flushed``: they are. Where the disk refuses the flush the segments stay until it does
        not, and False is returned; so where it keeps file after file. Under the write lock.
        """
        refused = False
        emptied = self.space.emptied.segments()
        if self.space.emptied.await_flush() and self.config.wal and not flushed:
            try:
                await asyncio.get_running_loop().run_in_executor(self._log_thread, self._flush)
            except OSError as error:
                log.error("dropped rows stay on disk: %s", error)
                emptied, refused = [], True
        self.space.emptied.discard(emptied)
        return not refused and self.segments.kept_in_a_row < _MANY_KEPT

    async def _flush_at_once(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._log_thread, self._flush)
        except OSError as error:
            raise CommandError(f"stored, but not flushed: {error.strerror}") from error

    def flush_soon(self) -> bool:
        """Whether something written is not yet on stable storage."""
        due = self.vstore_wal.dirty or self.ssm_wal.dirty or bool(self.segments.dirty())
        return due or self.space.emptied.await_flush()

    def _flush(self) -> None:
        self.segments.flush()
        self.vstore_wal.flush()
        self.ssm_wal.flush()

    async def flush(self) -> None:
        """Segments, then logs, to stable storage: everything acknowledged so far.

        A log that is flushed names no rows that are not: what came meanwhile is under the lock.
        """

        async def locked() -> None:
            async with self.write_lock:
                await self._flush_locked()

        for _ in range(_FLUSHES_AHEAD):
            await self.run(self.segments.flush)
        await _going_on(locked())

    async def _flush_locked(self) -> None:
        emptied = self.space.emptied.segments()
        await asyncio.get_running_loop().run_in_executor(self._log_thread, self._flush)
        self.space.emptied.discard(emptied)

    async def mend(self) -> None:
        """Try again what the disk refused: to delete files, to cut logs. Raises CommandError."""
        self.segments.delete_again()
        if self.vstore_wal.broken or self.ssm_wal.broken:
            async with self.write_lock:
                await asyncio.get_running_loop().run_in_executor(self._log_thread, self._append, ())

    async def expire(self) -> None:
        """Drop namespaces past their deadline, some at a time. Raises CommandError."""
        if self.state.timed:
            now_ms = int(time.time() * 1000)
            if drop_expired(self.state, now_ms, 1):
                await self.commit(lambda: drop_expired(self.state, now_ms, _EXPIRE_BATCH))

    # -- room ------------------------------------------------------------------

    async def make_room(self, nbytes: int) -> None:
        """Evict until ``nbytes`` more fit the disk budget.

        Raises CommandError, and evicts nothing, when even an empty store would not do, and
        evicts no more when the disk refuses to flush the log.
        """
        if self.space.excess(nbytes) <= 0:
            return
        self.segments.delete_again()
        if self.saver.behind():
            await self._catch_up(self.saver.behind)
        if self.space.excess(nbytes) > 0:
            await self.give_back()
        await self._tidied(nbytes)
        async with self.write_lock:
            await self.make_room_locked(nbytes)

    async def _tidied(self, nbytes: int) -> None:
        """What is dead goes before anybody does."""
        with suppress(CommandError, OSError):  # then others leave
            await self.tidy(nbytes)

    async def make_room_locked(self, nbytes: int) -> None:
        """As ``make_room``, by eviction alone. Under the write lock."""
        flushed = await self._discard()
        while (excess := self.space.excess(nbytes)) > 0:
            if self.space.spare():
                self.space.use.look_again()
                continue
            if not flushed:
                raise CommandError("the disk refused to flush the log, or to delete what left")
            if self.space.look_is_due(evicting=True):
                await self.run(self.space.look)
            flushed = await self._log(self.space.evict_for_bytes(excess))
            await self.close_retired()
            # an upload may have broken off meanwhile, in what was emptied before
            flushed = flushed and await self._discard()

    async def _catch_up(self, behind: Callable[[], bool]) -> None:
        """Let the logs give back what nobody needs; a save that is under way may do."""
        async with self._catching_up:
            async with self.saver.one_at_a_time:
                pass
            if not self.config.wal or time.monotonic() < self._catch_up_again or not behind():
                return
            try:
                await self.save_in_steps()
            except CommandError:  # then the folder is larger for a while
                self._catch_up_again = time.monotonic() + CATCH_UP_AGAIN_SECONDS

    async def make_little_room(self, nbytes: int) -> None:
        """As ``make_room``, for what rides in any log: mostly without a look at the disk."""
        if not self.space.fits(nbytes):
            await self.make_room(nbytes)

    async def make_room_in_log(self, nbytes: int) -> None:
        """As ``make_little_room``; whoever is faster than the saves waits for one."""
        if self.saver.overdue():
            await self._catch_up(self.saver.overdue)
        await self.make_little_room(nbytes)

    async def close_retired(self) -> None:
        """Let go of files that went and that nobody reads any more; refill the reserve."""
        if retired := self.segments.files.retired:
            await self.run(retired.close)
        if self._reserve is not None and not self._reserve.held:
            # where records are logged: what it gave is theirs until they are
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._log_thread, self._reserve.fill)

    async def reserve(self, group: bytes, nbytes: int, tensors: int) -> Region:
        """Make room, and take a region of it. Raises CommandError when the disk is full."""
        await self.make_room(nbytes)
        return self.space.reserve(group, nbytes, tensors)

    # -- sealing and saving ----------------------------------------------------

    async def seal(self, group: bytes) -> None:
        """Publish everything a group holds. Raises CommandError when it cannot."""

        async def locked() -> None:
            async with self.write_lock:
                await self.seal_locked([group])

        await self.wait_for_writers(self.segments.unsealed(group))
        await _going_on(locked())

    def unsealed_segments(self) -> list[Segment]:
        return [s for s in self.segments.segments.values() if not s.sealed]

    async def wait_for_writers(self, segments: list[Segment]) -> None:
        """Give no more room in these segments, and let what is being written there end."""
        deadline = time.monotonic() + SEAL_WAIT_SECONDS
        for segment in segments:
            segment.closed = True
        while any(s.writers for s in segments) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def seal_locked(self, groups: Sequence[bytes], most_bytes: int = sys.maxsize) -> int:
        """Publish groups, as many as ``most_bytes`` of short runs allow; how many are complete.

        Under the write lock. Raises CommandError.
        """
        jobs: list[SealJob] = []
        try:
            for group in groups:
                jobs.append(begin_seal(self.state, self.segments, group, most_bytes))
                most_bytes -= jobs[-1].mover.nbytes
                if most_bytes <= 0:
                    break
            seals = await self.run(lambda: [seal for job in jobs for seal in job.carry_out()])
            await self._log(seals)
            self.space.measure_again()
            return sum(job.mover.complete for job in jobs)
        except (OSError, ValueError) as error:
            raise not_rewritten("sealing", error) from error
        finally:
            # a log that could not be cut may name a segment that was made here
            for job in jobs if not self.vstore_wal.broken else ():
                job.give_up()

    async def save(self, path: Path | None = None) -> None:
        """Seal, write both snapshots, shorten the logs to what is logged meanwhile.

        With a portable copy at ``path`` writes wait while it is written. Raises CommandError;
        then each log holds what its snapshot, the previous or the new one, does not.
        """
        await self.wait_for_writers(self.unsealed_segments())
        saver = self.saver
        await _going_on(saver.in_steps(whole=True) if path is None else saver.at_once(path))

    async def save_in_steps(self) -> None:
        """Save while stores go on; the logs keep what they log meanwhile. Raises CommandError."""
        await _going_on(self.saver.in_steps())

    # -- the end ---------------------------------------------------------------

    async def close(self) -> None:
        """Flush and let the threads end; a save under way ends first."""
        async with self.saver.one_at_a_time, self.write_lock:
            await self._flush_locked()
        self._log_thread.shutdown()
        self.io.shutdown()


async def _going_on(work: Coroutine[Any, Any, None]) -> None:
    """Await work that goes on when its caller is cancelled: what is logged gets applied."""
    await asyncio.shield(asyncio.create_task(work))
