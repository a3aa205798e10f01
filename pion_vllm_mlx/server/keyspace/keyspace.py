"""The keyspace of one worker: check, log, apply; save, expire, watch.

Everything but the log's bytes happens on the event loop. Under the write lock a
command's changes are worked out at one moment, logged, then applied: nobody sees
what is not logged, and the keys a command read are as it saw them.

On a full disk changes that only take away are logged in a reserve of 64 KiB, some 1,500 keys
deleted one by one. What they free lies in the log and in the snapshot, and is given back by a save
once what lives fits beside them. If it never does, and the reserve is used up, deletions are
refused until others make room; another reserve is left for FLUSHALL, which gives back everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.keyspace.changes import (
    MAX_BATCH_BYTES,
    Change,
    Verb,
    change,
    pieces,
    size_of,
)
from pion_vllm_mlx.server.keyspace.data import Data
from pion_vllm_mlx.server.keyspace.recovery import Paths, Recovered, recover, snapshot_chunks
from pion_vllm_mlx.server.keyspace.relief import Relief
from pion_vllm_mlx.server.keyspace.sizes import entry_bytes
from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.server.store.files import not_rewritten, publish, refusals
from pion_vllm_mlx.server.store.records import Record
from pion_vllm_mlx.server.store.reserve import is_full
from pion_vllm_mlx.server.store.wal import Wal

#: how many keys past their deadline one tick deletes at most.
_REAPED = 10_000
#: a log so many times its limit is saved away without waiting for a quiet moment.
_PRESSING = 4
#: a save that makes room gives back so many bytes, and this part of what there is, at least.
_LEAST_GIVEN = 64 << 10
_PART_GIVEN = 8
#: how long after one that failed the next is tried.
_GIVE_AGAIN_SECONDS = 10.0
#: a full disk is relieved of no less.
_LEAST_RELIEF = 4 << 10
#: looking whether a full disk can be relieved takes this part of the time at most.
_PART_LOOKING = 20


class Watch:
    """What one connection watches; ``broken`` once any of it was changed."""

    def __init__(self) -> None:
        self.keys: dict[bytes, bool] = {}
        self.broken = False


class Keyspace:
    """See the module's docstring. Used on one event loop.

    Without a ``found`` nothing is kept on disk.
    """

    def __init__(self, config: StoreConfig | None = None, found: Recovered | None = None) -> None:
        self.config = config
        self.data = found.data if found else Data()
        self.wal = found.wal if found else None
        self.replayed = found.replayed if found else 0
        self.notes = found.notes if found else []
        self.last_write = time.monotonic()
        self.clock: Callable[[], int] = _unix_ms
        self._moment: int | None = None
        #: told every change just before it is made
        self.on_change: Callable[[Change], None] = lambda one: None
        #: told when files were replaced by what lives of them
        self.on_saved: Callable[[], None] = lambda: None
        self._watchers: dict[bytes, set[Watch]] = {}
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keyspace-log")
        self._paths = Paths(config.folder, config.worker) if config else None
        self._num_saves = 0
        self._giving = asyncio.Lock()
        self._give_again = 0.0
        self._saved_bytes = self._size_on_disk()
        self._saved_keys = len(self.data.entries)
        #: how many keys there were, and bytes of log, when their bytes were counted
        self._counted = (-1, 0)
        self._live_bytes = 0
        #: when it is next looked whether a full disk can be relieved
        self._count_again_at = 0.0
        if found and found.salvaged:  # also without logs: what was repaired is to stay so
            self._save_files()
        self._relief = (
            Relief(self._paths.reserve) if config and config.wal and self._paths else None
        )

    @classmethod
    def open(cls, config: StoreConfig) -> Keyspace:
        """Recover the keys of a folder. Blocks; raises DamagedData, NewerFormat, OSError."""
        paths = Paths(config.folder, config.worker)
        return cls(config, recover(paths, config.wal, config.salvage))

    @property
    def now(self) -> int:
        """Unix milliseconds; while a write is worked out, always the same."""
        return self.clock() if self._moment is None else self._moment

    @property
    def wal_bytes(self) -> int:
        return 0 if self.wal is None else self.wal.size

    async def commit(self, build: Callable[[], Sequence[Record]]) -> None:
        """Check and log one command's changes, then apply them.

        ``build`` may refuse by raising CommandError; then nothing happens.
        """
        await asyncio.shield(asyncio.create_task(self._commit(build)))
        await self.relieve()  # who deletes to make room has it with the answer

    async def _commit(self, build: Callable[[], Sequence[Record]]) -> None:
        async with self._lock:
            self._moment = self.clock()
            try:
                changes = self._with_expired(cast("Sequence[Change]", build()))
            finally:
                self._moment = None
            if not changes:
                return
            if size_of(changes) > MAX_BATCH_BYTES:
                raise CommandError("the command changes more than 1 GiB at once")
            await self._run(lambda: self._append(changes))
            for one in changes:
                self._break_watches(one)
                self.on_change(one)
                self.data.apply(one)
            self.last_write = time.monotonic()
            if self.config is not None and self.config.appendfsync == "always":
                try:
                    await self._run(self._flush)
                except OSError as error:
                    raise CommandError(f"stored, but not flushed: {error.strerror}") from error

    def _with_expired(self, changes: Sequence[Change]) -> list[Change]:
        """The changes behind the deletion of what they meet past its deadline."""
        keys = {key for one in changes for key in one.keys}
        entries = self.data.entries
        dead = [k for k in keys if k in entries and not entries[k].alive(self.now)]
        reaped = [change(Verb.DELETE, *sorted(dead))] if dead else []
        return [*reaped, *changes]

    def _append(self, changes: Sequence[Change]) -> None:
        """Log; on a full disk what only frees has the reserve. Blocks; raises CommandError."""
        if self.wal is None:
            return
        try:
            self._log(self.wal, changes)
        except CommandError as error:
            if not (is_full(error) and self._relief and self._relief.give_for(changes)):
                raise
            self._log(self.wal, changes)

    @staticmethod
    def _log(wal: Wal, changes: Sequence[Change]) -> None:
        for piece in pieces(changes):
            wal.append([piece])

    async def _run(self, work: Callable[[], None]) -> None:
        if self.wal is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- housekeeping ----------------------------------------------------------

    async def reap(self) -> None:
        """Delete keys past their deadline, so that they take no room."""
        now = self.clock()
        dead = self.data.expired(now, _REAPED)
        if dead:

            def build() -> list[Record]:
                entries = self.data.entries
                still = [k for k in dead if k in entries and not entries[k].alive(now)]
                return [change(Verb.DELETE, *still)] if still else []

            try:
                await self.commit(build)
            except CommandError:
                self.data.look_again(dead)
                raise

    def flush_soon(self) -> bool:
        """Whether something logged is not yet on stable storage."""
        return self.wal is not None and self.wal.dirty

    def save_soon(self, quiet_seconds: float) -> bool:
        """Whether the log is past its size, and no smaller than what a snapshot costs."""
        if self.wal is None or self.config is None:
            return False
        limit = max(self.config.wal_size, self._saved_bytes)
        quiet = time.monotonic() - self.last_write >= quiet_seconds
        return self.wal.size > (limit if quiet else _PRESSING * limit)

    def _flush(self) -> None:
        if self.wal is not None:
            self.wal.flush()

    async def flush(self) -> None:
        """Everything acknowledged so far to stable storage. Raises OSError."""
        await self._run(self._flush)

    async def save(self) -> None:
        """Write the snapshot, then empty the log. Blocks writes; raises CommandError."""

        async def locked() -> None:
            async with self._lock:
                await self._run(self._save_files)
            self.on_saved()

        try:
            await asyncio.shield(asyncio.create_task(locked()))
        except OSError as error:
            refusals.tell("SAVE", error)
            raise not_rewritten("SAVE", error) from error

    async def relieve(self) -> None:
        """Fill the reserves again; on a full disk save what lives, where that fits."""
        relief = self._relief
        if relief is None or relief.held:
            return

        async def locked() -> None:
            async with self._lock:
                serial = self._num_saves
                await self._run(lambda: self._relieve(relief))
            if serial != self._num_saves:
                self.on_saved()

        await asyncio.shield(asyncio.create_task(locked()))

    def _relieve(self, relief: Relief) -> None:
        """Blocks. No failure of the disk is an error here: it is full, and stays so."""
        relief.fill()
        begun = time.monotonic()
        if relief.held or (self.data.entries and begun < self._count_again_at):
            return
        live_bytes = self._count_live_bytes()
        self._count_again_at = begun + _PART_LOOKING * (time.monotonic() - begun)
        wasted_bytes = self.wal_bytes + self._saved_bytes - live_bytes
        with contextlib.suppress(OSError):
            if wasted_bytes >= _LEAST_RELIEF and relief.give_for_save(live_bytes):
                self._save_files()
        relief.fill()

    def _count_live_bytes(self) -> int:
        return sum(entry_bytes(key, entry.value) for key, entry in self.data.entries.items())

    async def give_back(self) -> None:
        """Save, if deleted and overwritten values are much of what is on disk."""
        async with self._giving:
            if time.monotonic() < self._give_again or not self.wasted_bytes():
                return
            try:
                await self.save()
            except CommandError:  # said in the log
                self._give_again = time.monotonic() + _GIVE_AGAIN_SECONDS

    def wasted_bytes(self) -> int:
        """About what a save gives back; 0 where that is not much of what there is.

        Looks at every key, but not every time.
        """
        if self.wal is None:
            return 0
        held = self.wal.size + self._saved_bytes
        worth = max(_LEAST_GIVEN, held // _PART_GIVEN)
        keys, nbytes = len(self.data.entries), self.wal.size
        # the very same keys cannot have left anything since they were saved
        if nbytes < worth and keys > self._saved_keys - self._saved_keys // _PART_GIVEN - 1:
            return 0
        counted_keys, counted_bytes = self._counted
        if abs(keys - counted_keys) > keys // _PART_GIVEN or abs(nbytes - counted_bytes) > worth:
            self._live_bytes = self._count_live_bytes()
            self._counted = (keys, nbytes)
        wasted = held - self._live_bytes
        return wasted if wasted >= worth else 0

    def _save_files(self) -> None:
        if self.wal is None or self._paths is None:
            return
        if not self.data.entries and not self.wal.size and not self._paths.snapshot.exists():
            return
        publish(self._paths.snapshot, snapshot_chunks(self.data, self.wal.next_lsn - 1))
        self.wal.truncate()
        self._num_saves += 1
        self._saved_bytes = self._size_on_disk()
        self._saved_keys, self._counted = len(self.data.entries), (-1, 0)

    def _size_on_disk(self) -> int:
        if self._paths is None or not self._paths.snapshot.exists():
            return 0
        return self._paths.snapshot.stat().st_size

    async def close(self) -> None:
        """Flush and let the thread end. Raises OSError."""
        async with self._lock:
            await self.flush()
        self._thread.shutdown()

    # -- watching --------------------------------------------------------------

    def watch(self, watch: Watch, keys: Iterable[bytes]) -> None:
        """From now on a change of one of the keys breaks the watch."""
        for key in keys:
            if key not in watch.keys:
                watch.keys[key] = self.data.find(key, self.now) is not None
                self._watchers.setdefault(key, set()).add(watch)

    def unwatch(self, watch: Watch) -> None:
        """Forget what was watched, and that it was changed."""
        for key in watch.keys:
            watchers = self._watchers[key]
            watchers.discard(watch)
            if not watchers:
                del self._watchers[key]
        watch.keys = {}
        watch.broken = False

    def is_broken(self, watch: Watch) -> bool:
        """Whether a watched key was changed, or has ended, since."""
        now = self.now
        return watch.broken or any(
            existed and self.data.find(key, now) is None for key, existed in watch.keys.items()
        )

    def _break_watches(self, one: Change) -> None:
        if not self._watchers:
            return
        names: Iterable[bytes] = one.keys
        if one.verb == Verb.FLUSH:
            names = [key for key in self._watchers if key in self.data.entries]
        for key in names:
            for watch in self._watchers.get(key, ()):
                watch.broken = True


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
