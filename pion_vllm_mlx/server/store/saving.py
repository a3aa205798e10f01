"""SAVE: everything sealed, both snapshots written, the logs shortened.

*In steps* (KV.PREFIX.SAVE and the server's own saves) the write lock is held only for one batch
of seals, for the moment that the snapshots keep and for the last bytes of the log: stores go on
meanwhile, and what they log after that moment stays in the logs. Who stores nothing meanwhile
finds them empty. *At once* (KV.PREFIX.SAVE with a path) seals in steps, too, but holds the lock
while the copy and the snapshots are written. One save runs at a time: an older snapshot never
replaces a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store import framing, snapshot
from pion_vllm_mlx.server.store.files import not_rewritten, publish, refusals
from pion_vllm_mlx.server.store.freezing import PART, Freezing, not_collecting
from pion_vllm_mlx.server.store.index import Place
from pion_vllm_mlx.server.store.sealing import seal_bytes
from pion_vllm_mlx.server.store.state import SavedState, State
from pion_vllm_mlx.server.store.wal import Wal, WalTail

if TYPE_CHECKING:
    from pion_vllm_mlx.server.store.store import Store

#: how many groups a SAVE seals with one trip to the disk.
SEAL_BATCH = 64
#: short runs that one step of a save moves out of the log, at most by one run more.
STEP_BYTES = 8 << 20
#: without a quiet moment a log is saved at this many times its size, or at the size of its
#: snapshot, up to BUSY_LIMIT times its size: a snapshot is not written for a few records.
BUSY_FACTOR = 2
BUSY_LIMIT = 4


class _Log(NamedTuple):
    """One log with its snapshot, and where the log ended when the index was copied."""

    wal: Wal
    snapshot_path: Path
    covered_lsn: int
    size: int


class Saver:
    """Saves one store. Used on its event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        for segment in [] if store.config.wal else list(store.segments.segments.values()):
            segment.in_snapshot = frozenset(segment.groups())  # it was found for them
        self.one_at_a_time = asyncio.Lock()

    # -- when ------------------------------------------------------------------

    def due(self, quiet_seconds: float) -> bool:
        """Whether the logs are past their size: in a quiet moment, or far past it in any.

        So, too, when evicted prefixes still lie in logs and snapshots.
        """
        store = self._store
        if store.config.wal and store.space.owed > store.config.wal_size:
            return True
        if time.monotonic() - store.last_write >= quiet_seconds:
            return store.vstore_wal.size + store.ssm_wal.size > store.config.wal_size
        return any(self._pressing(wal, path) for wal, path in self._pairs())

    def behind(self) -> bool:
        """Whether a save makes room before anybody has to leave: long logs, much that is owed."""
        store = self._store
        logs = store.vstore_wal.size + store.ssm_wal.size
        return max(logs, store.space.owed) > BUSY_FACTOR * store.config.wal_size

    def nothing_to_save(self) -> bool:
        """No rows, no states, empty logs, no snapshot."""
        state, logs = self._store.state, self._pairs()
        nothing_logged = not any(wal.size for wal, _ in logs)
        there = state.sessions or state.states or self._store.paths.vstore.exists()
        return nothing_logged and not there

    def overdue(self) -> bool:
        """Whether a log is so long that who adds to it waits for a save."""
        limit = BUSY_LIMIT * self._store.config.wal_size
        return any(wal.size > limit for wal, _ in self._pairs())

    def _pressing(self, wal: Wal, snapshot_path: Path) -> bool:
        size = self._store.config.wal_size
        if wal.size <= BUSY_FACTOR * size:
            return False
        saved = snapshot_path.stat().st_size if snapshot_path.exists() else 0
        return wal.size > min(BUSY_LIMIT * size, saved)

    def _pairs(self) -> list[tuple[Wal, Path]]:
        store = self._store
        return [(store.vstore_wal, store.paths.vstore), (store.ssm_wal, store.paths.ssm)]

    def binds(self) -> bool:
        """Whether rows stay in the files in which they are.

        Without a log no record would say where they went, and a snapshot, there or being
        written, names the files that would go.
        """
        if self._store.config.wal:
            return False
        return self.one_at_a_time.locked() or self._store.paths.vstore.exists()

    def _named(self) -> dict[str, frozenset[bytes]]:
        """The segments that snapshots of this moment name, and for which groups.

        Without logs they stay until other snapshots are there. Under the write lock.
        """
        if self._store.config.wal:
            return {}
        used = [s for s in self._store.segments.segments.values() if s.uses]
        named = {segment.name: frozenset(segment.users()) for segment in used}
        for segment in used:
            segment.in_snapshot |= named[segment.name]
        return named

    def _let_go(self, named: Mapping[str, frozenset[bytes]]) -> None:
        """Both snapshots are there: what only earlier ones named may go. Under the write lock."""
        if self._store.config.wal:
            return
        for segment in self._store.segments.segments.values():
            segment.in_snapshot = named.get(segment.name, frozenset())
        emptied = self._store.space.emptied
        emptied.saved()
        emptied.discard(emptied.segments())

    # -- at once ---------------------------------------------------------------

    async def at_once(self, path: Path) -> None:
        """Save, and write a portable copy to ``path``; writes wait for it. Raises CommandError."""
        store = self._store
        async with self.one_at_a_time:
            try:
                await self._seal_in_steps()
                async with store.write_lock:
                    await self._write_copy(path)
            except OSError as error:
                refusals.tell("KV.PREFIX.SAVE", error)
                raise not_rewritten("KV.PREFIX.SAVE", error) from error

    async def _write_copy(self, path: Path) -> None:
        """Seal what came meanwhile, and write everything. Under the write lock; raises OSError."""
        store = self._store
        waiting = iter(sorted(self._groups()))
        while batch := list(islice(waiting, SEAL_BATCH)):
            await self._make_room(batch, sys.maxsize)
            await store.seal_locked(batch)
        owed, named = store.space.owed, self._named()
        saved = await store.run(lambda: self._write_snapshots(path))
        await self._read_in_snapshot(saved, store.state)
        await store.run(self._empty_logs)
        self._let_go(named)
        store.space.saved(owed)

    def _groups(self) -> set[bytes]:
        """Groups with something to seal."""
        store = self._store
        return {s.group for s in store.unsealed_segments()} | store.state.inline_groups()

    def write_files(self) -> None:
        """Write the snapshots, then empty the logs: a start does. Blocks; raises OSError."""
        self._store.state.move_inline_states(self._write_snapshots(None))
        self._empty_logs()

    def _write_snapshots(self, path: Path | None) -> list[SavedState]:
        """Write both snapshots, and a portable copy to ``path``; where the short states are now.

        The write lock is held. Blocks; raises OSError.
        """
        store = self._store
        store.segments.flush()
        vstore_lsn, ssm_lsn = store.vstore_wal.next_lsn - 1, store.ssm_wal.next_lsn - 1
        if path is not None:
            snapshot.write_portable(path, store.state, vstore_lsn)
        _publish_manifest(store.paths.vstore, store.state, vstore_lsn)
        return snapshot.publish_states(store.paths.ssm, store.state, ssm_lsn)

    def _empty_logs(self) -> None:
        """Short states are read in the snapshot by now: the old log's space is freed."""
        store = self._store
        store.vstore_wal.truncate()
        store.ssm_wal.truncate()

    # -- in steps --------------------------------------------------------------

    async def in_steps(self, whole: bool = False) -> None:
        """Save while stores go on; ``whole``: also a log that is short.

        Raises CommandError; then each log holds what its snapshot, old or new, does not.
        """
        async with self.one_at_a_time:
            try:
                await self._seal_in_steps()
                await self._write_in_steps(whole)
            except OSError as error:
                if not whole:
                    raise CommandError(f"saving failed: {error}") from error
                refusals.tell("KV.PREFIX.SAVE", error)
                raise not_rewritten("KV.PREFIX.SAVE", error) from error

    async def _seal_in_steps(self) -> None:
        """Seal what is there now, a part at a time; what comes meanwhile is the next save's.

        Each part is flushed before the next one: whoever flushes a log flushes first what it
        names, under the lock. Raises OSError.
        """
        store = self._store
        waiting = sorted(self._groups())
        # what is being written to now is sealed next time: nobody waits for a slow upload
        for segment in store.unsealed_segments():
            segment.closed = True
        while waiting:
            batch = waiting[:SEAL_BATCH]
            async with store.write_lock:
                await self._make_room(batch, STEP_BYTES)
                done = await store.seal_locked(batch, STEP_BYTES)
            # a group of which a part is left comes again
            waiting = waiting[done:]
            await store.run(store.segments.flush)

    async def _make_room(self, groups: Sequence[bytes], most_bytes: int) -> None:
        """Short runs that are sealed are on disk twice until the log is shortened.

        One log may be there beyond the budget meanwhile; where sealing adds more than that, as
        files for many short prefixes do, prefixes leave. Under the write lock.
        """
        store = self._store
        if not store.space.disk_budget:
            return
        nbytes = seal_bytes(store.state, store.segments, groups, most_bytes) + store.space.owed
        nbytes -= BUSY_LIMIT * store.config.wal_size
        if store.space.excess(nbytes) > 0:
            with contextlib.suppress(CommandError):  # then the folder is larger for a while
                await store.make_room_locked(nbytes)

    async def _write_in_steps(self, whole: bool) -> None:
        store = self._store
        async with store.write_lock:
            owed = store.space.owed
            logs = [
                _Log(wal, path, wal.next_lsn - 1, wal.size)
                for wal, path in self._pairs()
                if whole or owed or wal.size > store.config.wal_size // 4
            ]
            named = self._named()
            freezing = Freezing(store.state)
        with not_collecting():
            frozen = await freezing.copied()
            saved = await store.run(lambda: self._publish(frozen, logs))
        await self._read_in_snapshot(saved, frozen)
        await store.run(store.segments.flush)  # so that little of it is left for the lock
        try:
            tails = await store.run(
                lambda: [WalTail(log.wal, log.size) if log.wal.enabled else None for log in logs]
            )
            async with store.write_lock:
                await store.run(lambda: self._shorten(logs, tails))
                if whole:
                    self._let_go(named)
        except OSError:
            for log in logs:  # the other log's tail is of no use, either
                with contextlib.suppress(OSError):
                    log.wal.temporary.unlink(missing_ok=True)
            raise
        store.space.saved(owed)

    def _publish(self, frozen: State, logs: Iterable[_Log]) -> list[SavedState]:
        """Write the snapshots of the logs. Blocks; raises OSError."""
        store = self._store
        # what is sealed from now on is not on stable storage with this flush: its record is logged
        sealed = snapshot.sealed_names(list(store.segments.segments.values()))
        store.segments.flush()
        saved: list[SavedState] = []
        for log in logs:
            if log.wal is store.vstore_wal:
                _publish_manifest(log.snapshot_path, frozen, log.covered_lsn, sealed)
            else:
                saved = snapshot.publish_states(log.snapshot_path, frozen, log.covered_lsn)
        return saved

    async def _read_in_snapshot(self, saved: Iterable[SavedState], frozen: State) -> None:
        """Let short states be read where the snapshot of ``frozen`` holds them, some at a time."""
        state, waiting = self._store.state, iter(saved)
        while part := list(islice(waiting, PART)):
            state.move_inline_states(_unchanged(state, frozen, part))
            await asyncio.sleep(0)

    def _shorten(self, logs: Iterable[_Log], tails: Iterable[WalTail | None]) -> None:
        """Let each log begin behind what its snapshot covers. The write lock is held.

        Rows first: what the tail of a log names came after those that ``_publish`` flushed.
        """
        self._store.segments.flush()
        for log, tail in zip(logs, tails, strict=True):
            if tail is None:  # of a log that is not kept an earlier start's goes
                log.wal.truncate()
                continue
            log.wal.replace(tail, log.wal.next_lsn - 1 - log.covered_lsn)


def _publish_manifest(
    path: Path, state: State, covered_lsn: int, sealed: Collection[str] | None = None
) -> None:
    content = snapshot.vstore_records(state, sealed)
    publish(path, snapshot.chunks(framing.VSTORE_SNAPSHOT, covered_lsn, content))


def _unchanged(state: State, frozen: State, saved: Iterable[SavedState]) -> list[SavedState]:
    """The saved states that nobody has replaced or dropped since."""

    def place_of(one: State, entry: SavedState) -> Place | None:
        blob = one.states.get(entry.sid, {}).get(entry.layer)
        return None if blob is None else blob.place

    return [entry for entry in saved if place_of(state, entry) is place_of(frozen, entry)]
