"""From the files of a data folder to a state.

Manifest first, then the WAL behind it. A torn end of a WAL is cut off; anything
else that does not verify is damage: refused by name, or, with ``salvage``, the
file is set aside and what verifies before the damage is kept.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.server.store import framing, records, snapshot
from pion_vllm_mlx.server.store.files import FileHandle, pread_exactly
from pion_vllm_mlx.server.store.index import InSegment
from pion_vllm_mlx.server.store.segments import SegmentFolder
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.server.store.wal import Inline, Logged, Wal

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
    notes: list[str] = field(default_factory=list)


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
        self.notes: list[str] = []
        self.folder = SegmentFolder(paths.segments)
        self.state = State(self.folder.adopt, fresh=False)
        self.damaged: set[bytes] = set()
        self.salvaged = False

    def run(self) -> Recovered:
        """Read everything. Raises DamagedData (not with salvage), NewerFormat, OSError."""
        self._unpack()
        vstore = _Log(
            self.paths.vstore, framing.VSTORE_SNAPSHOT, self.paths.vstore_wal, framing.VSTORE_WAL
        )
        ssm = _Log(self.paths.ssm, framing.SSM_SNAPSHOT, self.paths.ssm_wal, framing.SSM_WAL)
        vstore_wal, vstore_count = self._replay(vstore)
        ssm_wal, ssm_count = self._replay(ssm)
        self._drop_unreadable()
        self._finish_segments()
        self.state.fresh = True
        return Recovered(
            self.state,
            self.folder,
            vstore_wal,
            ssm_wal,
            vstore_count,
            ssm_count,
            len(self.damaged),
            self.salvaged,
            self.notes,
        )

    def _unpack(self) -> None:
        if self.paths.vstore.exists():
            with self._guard(self.paths.vstore):
                snapshot.unpack_portable(self.paths.vstore, self.paths.segments)

    def _guard(self, path: Path) -> _Guard:
        return _Guard(self, path)

    def _replay(self, files: _Log) -> tuple[Wal, int]:
        covered, loaded = 0, None
        with self._guard(files.snapshot_path):
            loaded = snapshot.load(files.snapshot_path, files.snapshot_magic)
        if loaded is not None:
            covered, content = loaded
            for logged in content:
                self._apply(logged, files.snapshot_path)
        last, count = self._replay_wal(files, covered)
        wal = Wal(files.wal_path, files.wal_magic, last + 1, self.wal_enabled)
        return wal, count

    def _replay_wal(self, files: _Log, covered: int) -> tuple[int, int]:
        """Last LSN and how many records were applied; cuts a torn end off the file."""
        path = files.wal_path
        if not self.wal_enabled or not path.exists():
            return covered, 0
        file = FileHandle(path, os.O_RDWR)
        data = memoryview(pread_exactly(file.fd, file.size(), 0))
        found = framing.scan(data, files.wal_magic, path.name)
        if found.damage is not None:
            damage = DamagedData(f"{path.name} at {found.damage.offset}: {found.damage.reason}")
            self.damage(path, damage, keep=True)
        frames = [frame for frame in found.frames if frame.lsn > covered]
        if frames and frames[0].lsn != covered + 1:
            gap = f"{path.name}: records {covered + 1} to {frames[0].lsn - 1} are missing"
            self.damage(path, DamagedData(gap), keep=True)
            frames = []
        if found.torn_bytes:
            self.notes.append(f"{path.name}: torn end of {found.torn_bytes} bytes cut off")
        if found.valid_bytes < len(data):
            os.ftruncate(file.fd, found.valid_bytes)
        for frame in frames:
            record, begin = records.parse(frame.op, frame.payload)
            place = Inline(file, frame.payload_offset + begin)
            self._apply(Logged(frame.lsn, record, place), path)
        last = found.frames[-1].lsn if found.frames else 0
        return max(covered, last), len(frames)

    def _apply(self, logged: Logged, path: Path) -> None:
        try:
            self.state.apply(logged)
        except DamagedData as error:
            self.damage(path, DamagedData(f"{path.name} record {logged.lsn}: {error}"), keep=True)

    def damage(self, path: Path, error: DamagedData, keep: bool) -> None:
        """Refuse, or with salvage set a copy (or the file itself) aside and go on."""
        if not self.salvage:
            raise error
        self.salvaged = True
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        if path.exists() and not aside.exists():
            if keep:
                aside.write_bytes(path.read_bytes())
                aside.chmod(0o600)
            else:
                os.replace(path, aside)
        note = f"{error}; the file is kept as {aside.name}"
        self.notes.append(note)
        log.warning("%s", note)

    def _drop_unreadable(self) -> None:
        """Sessions and states whose segment is gone or too short cannot be served."""
        for session in list(self.state.sessions.values()):
            for run in session.runs():
                if isinstance(run.place, InSegment) and not _reaches(
                    run.place, run.shape.data_bytes
                ):
                    self.damaged.add(session.sid)
        for sid, layers in list(self.state.states.items()):
            for blob in layers.values():
                if isinstance(blob.place, InSegment) and not _reaches(blob.place, blob.length):
                    self.damaged.add(sid)
        for sid in self.damaged:
            self.notes.append(f"{sid.decode('latin-1')}: rows or states are missing on disk")
            self.state.apply(Logged(0, records.Drop((sid,), "damaged", int(time.time())), None))
            self.state.apply(Logged(0, records.DropStates((sid,)), None))

    def _finish_segments(self) -> None:
        for segment in list(self.folder.segments.values()):
            if segment.uses == 0:
                self.folder.unlink(segment)
        self.state.unused.clear()
        orphans = self.folder.remove_orphans()
        if orphans:
            self.notes.append(f"{orphans} segment files that nothing names were deleted")


def _reaches(place: InSegment, length: int) -> bool:
    fd = place.segment.file.fd
    return fd >= 0 and place.offset + length <= os.fstat(fd).st_size


class _Guard:
    """Turns damage of one file into a refusal or, with salvage, a file set aside."""

    def __init__(self, recovery: Recovery, path: Path) -> None:
        self.recovery = recovery
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, DamagedData):
            self.recovery.damage(self.path, error, keep=False)
            return True
        return False
