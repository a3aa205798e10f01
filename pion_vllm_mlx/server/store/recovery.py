"""From the files of a data folder to a state.

Manifest first, then the WAL behind it. A torn end of a WAL is cut off; anything
else that does not verify is damage: refused by name, or, with ``salvage``, the
file is set aside. Of a log what stands before the damage is kept, of a manifest the
sessions and states of which all verifies. Nothing is deleted then: segments that nothing
names are set aside, too.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pion_vllm_mlx.errors import CommandError, DamagedData
from pion_vllm_mlx.server.store import eviction, framing, records, salvaging, snapshot
from pion_vllm_mlx.server.store.files import (
    TEMPORARY,
    FileHandle,
    is_foreign,
    set_aside,
    set_aside_until_replaced,
)
from pion_vllm_mlx.server.store.findings import Finding, Kept, Kind, cut_off
from pion_vllm_mlx.server.store.freezing import not_collecting
from pion_vllm_mlx.server.store.index import InSegment, Place
from pion_vllm_mlx.server.store.segment import SUFFIX
from pion_vllm_mlx.server.store.segments import SegmentFolder
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.server.store.wal import Inline, Logged, Wal, append_together

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Paths:
    """The files of one worker."""

    folder: Path
    worker: int = 0

    def _file(self, kind: str) -> Path:
        return self.folder / f"pion.{kind}.{self.worker}"

    @property
    def vstore(self) -> Path:
        return self._file("vstore")

    @property
    def vstore_wal(self) -> Path:
        return self._file("vstore.wal")

    @property
    def ssm(self) -> Path:
        return self._file("ssm")

    @property
    def ssm_wal(self) -> Path:
        return self._file("ssm.wal")

    @property
    def segments(self) -> Path:
        return self._file("segments")

    @property
    def reserve(self) -> Path:
        return self.folder / f"pion.reserve.{self.worker}{TEMPORARY}"

    def all_files(self) -> tuple[Path, ...]:
        """Every file that is replaced as a whole."""
        return self.vstore, self.vstore_wal, self.ssm, self.ssm_wal


@dataclass
class Recovered:
    """What recovery found: the state, both logs ready to append, and what it had to say."""

    state: State
    folder: SegmentFolder
    vstore_wal: Wal
    ssm_wal: Wal
    vstore_replayed: int = 0
    ssm_replayed: int = 0
    damaged: int = 0
    salvaged: bool = False
    notes: list[Finding] = field(default_factory=list)


@dataclass
class _Log:
    """One manifest and the WAL behind it."""

    snapshot_path: Path
    snapshot_magic: bytes
    wal_path: Path
    wal_magic: bytes


class Recovery:
    """One run over the files of a worker."""

    def __init__(self, paths: Paths, wal_enabled: bool, salvage: bool) -> None:
        self.paths = paths
        self.wal_enabled = wal_enabled
        self.salvage = salvage
        self.notes: list[Finding] = []
        self.folder = SegmentFolder(paths.segments)
        self.state = State(self.folder.adopt, fresh=False)
        self.aside: dict[Path, int] = {}
        self.salvaged = False
        #: segments of which it is not known whether they were sealed
        self.unclear: set[str] = set()

    def run(self) -> Recovered:
        """Read everything. Raises DamagedData (not with salvage), NewerFormat, OSError."""
        # a large index is built of objects that all stay: collecting while it grows finds nothing
        with not_collecting():
            return self._recovered()

    def _recovered(self) -> Recovered:
        for path in self.paths.all_files():
            if is_foreign(path):
                self.damage(path, DamagedData(f"{path.name} is not a regular file"))
        # before a log is made: without any file of records, who says that segments are not needed?
        named = any(path.exists() for path in self.paths.all_files())
        self._unpack()
        vstore = _Log(
            self.paths.vstore, framing.VSTORE_SNAPSHOT, self.paths.vstore_wal, framing.VSTORE_WAL
        )
        ssm = _Log(self.paths.ssm, framing.SSM_SNAPSHOT, self.paths.ssm_wal, framing.SSM_WAL)
        vstore_wal, vstore_count = self._replay(vstore)
        ssm_wal, ssm_count = self._replay(ssm)
        if self.salvaged:
            segments = self.folder.segments.values()
            self.unclear = salvaging.adopt_seals(self.state, segments)
        damaged = self._drop_unreadable({"ssm": ssm_wal, "vstore": vstore_wal})
        if self.salvaged or self.wal_enabled and not named:
            self._set_segments_aside()
        self._finish_segments((vstore_wal, ssm_wal))
        self.state.fresh = True
        for path, skipped in self.aside.items():
            if skipped:
                self.notes.append(Finding(Kind.SKIPPED, path.name, skipped))
        return Recovered(
            self.state,
            self.folder,
            vstore_wal,
            ssm_wal,
            vstore_count,
            ssm_count,
            damaged,
            self.salvaged,
            self.notes,
        )

    def _unpack(self) -> None:
        if self.paths.vstore.exists():
            with self._guard(self.paths.vstore):
                snapshot.unpack_portable(self.paths.vstore, self.paths.segments)

    @contextmanager
    def _guard(self, path: Path, kept: Kept = Kept.NOTHING) -> Iterator[None]:
        """Damage found in the block is a refusal or, with salvage, a file set aside."""
        try:
            yield
        except DamagedData as error:
            self.damage(path, error, kept)

    def _replay(self, files: _Log) -> tuple[Wal, int]:
        last, count = self._replay_wal(files, self._load(files))
        wal = Wal(files.wal_path, files.wal_magic, last + 1, self.wal_enabled)
        # who wrote it may have been killed before it was flushed
        wal.dirty = count > 0
        return wal, count

    def _load(self, files: _Log) -> int | None:
        """Apply a manifest, or what is kept of it; the LSN it covers, None without any."""
        path = files.snapshot_path
        try:
            found = snapshot.load(path, files.snapshot_magic)
        except DamagedData as error:
            if not self.salvage:
                raise
            found = salvaging.kept(path, files.snapshot_magic)
            self.damage(path, error, Kept.RECORDS if found else Kept.NOTHING)
        if found is None:
            return None
        covered, content = found
        with self._guard(path, Kept.RECORDS):
            for logged in content:
                self._apply(logged, path, Kept.RECORDS)
        return covered

    def _replay_wal(self, files: _Log, snapshot_lsn: int | None) -> tuple[int, int]:
        """Last LSN and how many records were applied; cuts a torn end off the file.

        Without a manifest a log that begins later is kept as far as it stands by itself: a
        session from its Create on, each state. Rows of sessions that it does not make are lost.
        Without a log of our own, one that an earlier start left still counts.
        """
        path, covered = files.wal_path, snapshot_lsn or 0
        if not path.exists():
            return covered, 0
        file = FileHandle(path, os.O_RDWR)
        found = _up_to_unknown(framing.scan(file.mapped(), files.wal_magic, path.name))
        frames = [frame for frame in found.frames if frame.lsn > covered]
        if frames and frames[0].lsn != covered + 1:
            missing = f"records {covered + 1} to {frames[0].lsn - 1} are missing"
            reason = f"{path.name} at {framing.HEADER_BYTES}: {missing}"
            stands = snapshot_lsn is None
            self.damage(path, DamagedData(reason), Kept.WHOLE if stands else Kept.NOTHING)
            frames = frames if stands else []
        elif found.damage is not None:
            reason = f"{path.name} at {found.damage.offset}: {found.damage.reason}"
            self.damage(path, DamagedData(reason), Kept.BEGINNING)
        self.notes += cut_off(path.name, found)
        if found.valid_bytes < file.size():
            os.ftruncate(file.fd, found.valid_bytes)
        for frame in frames:
            with self._guard(path, Kept.RECORDS):
                record, begin = records.parse(frame.op, frame.payload)
                place = Inline(file, frame.payload_offset + begin)
                self._apply(Logged(frame.lsn, record, place), path, Kept.RECORDS)
                self._not_flushed(record)
        last = found.frames[-1].lsn if found.frames else 0
        return max(covered, last), len(frames)

    def _apply(self, logged: Logged, path: Path, kept: Kept) -> None:
        try:
            self.state.apply(logged)
        except (DamagedData, CommandError) as error:
            reason = f"{path.name} record {logged.lsn}: {error}"
            self.damage(path, DamagedData(reason), kept)

    def _not_flushed(self, record: records.Record) -> None:
        """What a log says was written may not be on stable storage; what a snapshot says is."""
        if isinstance(record, (records.Rows, records.StoreState, records.Seal)):
            segment = self.folder.segments.get(record.segment)
            if segment is not None:
                segment.written()

    def damage(self, path: Path, error: DamagedData, kept: Kept = Kept.NOTHING) -> None:
        """Refuse, or with salvage set a copy (or what is no file of ours) aside and go on."""
        if not self.salvage:
            raise error
        self.salvaged = True
        if path in self.aside:
            self.aside[path] += 1
            return
        self.aside[path] = 0
        if is_foreign(path) or path == self.paths.vstore and snapshot.is_portable(path):
            aside = set_aside(path, keep=False)
        elif path in (self.paths.vstore, self.paths.ssm):
            aside = set_aside_until_replaced(path)
        else:
            aside = set_aside(path, keep=True)
        note = Finding(Kind.SET_ASIDE, path.name, 0, str(error), aside.name, kept)
        self.notes.append(note)
        log.warning("%s", note)

    def _unreadable(self) -> set[bytes]:
        """Sessions and states whose segment is gone or too short. Reads no rows."""
        sizes = {
            entry.name.removesuffix(SUFFIX): entry.stat().st_size
            for entry in os.scandir(self.folder.path)
            if entry.is_file()
        }

        def reaches(place: Place, length: int) -> bool:
            if not isinstance(place, InSegment):
                return True
            if place.segment.name in self.unclear:
                return False
            return place.offset + length <= sizes.get(place.segment.name, -1)

        found = set()
        for session in self.state.sessions.values():
            if not all(reaches(run.place, run.shape.reach_bytes) for run in session.runs()):
                found.add(session.sid)
        for sid, layers in self.state.states.items():
            if not all(reaches(blob.place, blob.length) for blob in layers.values()):
                found.add(sid)
        return found

    def _drop_unreadable(self, logs: dict[str, Wal]) -> int:
        """Drop what cannot be served, and log it: what is stored anew later must stand.

        How many sessions, and states without one, went.
        """
        dropped = 0
        now = int(time.time())
        for sid in sorted(self._unreadable()):
            reason = "damaged: rows or states are missing on disk"
            before = len(self.state.sessions)
            effects = eviction.drop_damaged(self.state, sid, reason, now)
            effects += eviction.drop_namespace(self.state, sid, reason, now)
            if not effects:
                continue
            # states first, as ever: without its completion record a prefix is no hit
            batches = [
                (wal, [e for e in dict.fromkeys(effects) if e.log == name])
                for name, wal in logs.items()
            ]
            for logged in append_together(batches):
                self.state.apply(logged)
            dropped += max(1, before - len(self.state.sessions))
            self.notes.append(Finding(Kind.MISSING, sid.decode("utf-8", "backslashreplace")))
        return dropped

    def _set_segments_aside(self) -> None:
        """Keep what nothing names: what was lost may have named it."""
        for segment in [s for s in self.folder.segments.values() if s.uses == 0]:
            self.folder.forget(segment)
        self.state.unused.clear()
        count, kept_as = salvaging.move_aside(self.paths.segments, self.folder.orphans())
        if count:
            self.notes.append(Finding(Kind.SEGMENTS_ASIDE, count=count, kept_as=kept_as))

    def _finish_segments(self, logs: Iterable[Wal]) -> None:
        """Delete what nothing lives in; first flush the records that say so."""
        unused = [s for s in self.folder.segments.values() if s.uses == 0]
        if unused:
            self.folder.flush()
            for wal in logs:
                wal.flush()
        for segment in unused:
            self.folder.unlink(segment)
        self.state.unused.clear()
        orphans = self.folder.remove_orphans()
        if orphans:
            self.notes.append(Finding(Kind.ORPHANS, count=orphans))
        if self.folder.undeleted:
            self.notes.append(Finding(Kind.UNDELETED, count=len(self.folder.undeleted)))
        for path in self.paths.all_files():
            with suppress(OSError):  # the next save writes over it
                path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)


def _up_to_unknown(found: framing.Scan) -> framing.Scan:
    """The scan up to the first record that this version does not know; that one is damage."""
    for index, frame in enumerate(found.frames):
        if not records.is_known(frame.op):
            at = frame.payload_offset - framing.FRAME_BYTES
            damage = framing.Damage(at, f"unknown operation {frame.op}")
            return framing.Scan(found.frames[:index], found.covered_lsn, at, 0, damage)
    return found
