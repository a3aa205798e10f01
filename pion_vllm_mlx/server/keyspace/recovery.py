"""From the files of a folder to the keys, by the rules of the store's own recovery.

Snapshot first, then the log behind it. A torn end of the log is cut off; anything
else that does not verify is refused by name, or, with ``salvage``, the file is set
aside. Of a log what stands before the damage is kept, of a snapshot nothing, and then of a
log that goes on from it only the keys whose whole value it has (see ``standing``).
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.server.keyspace.changes import PIECE_BYTES, Assembler, Change, Piece, pieces
from pion_vllm_mlx.server.keyspace.data import Data
from pion_vllm_mlx.server.keyspace.standing import Standing
from pion_vllm_mlx.server.store import framing
from pion_vllm_mlx.server.store.files import (
    TEMPORARY,
    FileHandle,
    is_foreign,
    set_aside,
    set_aside_until_replaced,
)
from pion_vllm_mlx.server.store.findings import Finding, Kept, Kind, cut_off
from pion_vllm_mlx.server.store.wal import Wal

log = logging.getLogger(__name__)

WAL_MAGIC = b"PIONKW01"
SNAPSHOT_MAGIC = b"PIONKS01"
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class Paths:
    """The files of one worker's keyspace."""

    folder: Path
    worker: int = 0

    @property
    def snapshot(self) -> Path:
        return self.folder / f"pion.snapshot.{self.worker}"

    @property
    def wal(self) -> Path:
        return self.folder / f"pion.wal.{self.worker}"

    @property
    def reserve(self) -> Path:
        return self.folder / f"pion.reserve.keys.{self.worker}{TEMPORARY}"


@dataclass
class Recovered:
    """The keys, a log ready to append, and what there was to say."""

    data: Data
    wal: Wal
    replayed: int = 0
    salvaged: bool = False
    notes: list[Finding] = field(default_factory=list)


def snapshot_chunks(data: Data, covered_lsn: int) -> Iterator[bytes]:
    """The bytes of a snapshot: header, batches, END. ``data`` must not change meanwhile."""
    yield framing.header(SNAPSHOT_MAGIC, covered_lsn)
    lsn = 0
    for piece in _batches(data.snapshot()):
        lsn += 1
        yield framing.frame(lsn, piece.op, piece.payload())
    yield framing.frame(lsn + 1, framing.END, _COUNT.pack(lsn))


def _batches(changes: Iterator[Change]) -> Iterator[Piece]:
    batch: list[Change] = []
    size = 0
    for one in changes:
        batch.append(one)
        size += sum(map(len, one.parts))
        if size >= PIECE_BYTES // 4:
            yield from pieces(batch)
            batch, size = [], 0
    if batch:
        yield from pieces(batch)


def recover(paths: Paths, wal_enabled: bool, salvage: bool) -> Recovered:
    """Read everything. Raises DamagedData (not with salvage), NewerFormat, OSError."""
    return _Recovery(paths, salvage).run(wal_enabled)


class _Recovery:
    """One run over the two files."""

    def __init__(self, paths: Paths, salvage: bool) -> None:
        self.paths = paths
        self.salvage = salvage
        self.data = Data()
        self.notes: list[Finding] = []

    def run(self, wal_enabled: bool) -> Recovered:
        covered: int | None = None
        for path in (self.paths.snapshot, self.paths.wal):
            if is_foreign(path):
                self._damage(path, DamagedData(f"{path.name} is not a regular file"))
        try:
            covered = self._load_snapshot()
        except DamagedData as error:
            self._damage(self.paths.snapshot, error)
            self.data = Data()
        last, replayed = self._replay(covered)
        for path in (self.paths.snapshot, self.paths.wal):
            with suppress(OSError):  # the next save writes over it
                path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)
        salvaged = any(note.kind is Kind.SET_ASIDE for note in self.notes)
        wal = Wal(self.paths.wal, WAL_MAGIC, last + 1, wal_enabled)
        return Recovered(self.data, wal, replayed, salvaged, self.notes)

    def _load_snapshot(self) -> int | None:
        """The LSN that the snapshot covers; None without one. Raises DamagedData, NewerFormat."""
        path = self.paths.snapshot
        if not path.exists():
            return None
        file = FileHandle(path, os.O_RDONLY)
        found = framing.scan(file.mapped(), SNAPSHOT_MAGIC, path.name)
        if found.damage is not None:
            raise DamagedData(f"{path.name} at {found.damage.offset}: {found.damage.reason}")
        if not found.frames or found.frames[-1].op != framing.END:
            raise DamagedData(f"{path.name} at {found.valid_bytes}: the file is cut")
        end = found.frames[-1]
        if end.payload_offset + len(end.payload) != file.size():
            raise DamagedData(f"{path.name}: bytes behind the end")
        if _COUNT.unpack(end.payload)[0] != len(found.frames) - 1:
            raise DamagedData(f"{path.name}: the end counts other records")
        self._apply(found.frames[:-1], path)
        return found.covered_lsn

    def _replay(self, snapshot_lsn: int | None) -> tuple[int, int]:
        """Last LSN and how many records were applied; cuts a torn end off the log.

        Without a snapshot a log from the first change on says everything, a later one only
        what it has whole. A snapshot older than the log's beginning is kept as it is.
        """
        path, covered = self.paths.wal, snapshot_lsn or 0
        if not path.exists():
            return covered, 0
        file = FileHandle(path, os.O_RDWR)
        found = framing.scan(file.mapped(), WAL_MAGIC, path.name)
        frames = [frame for frame in found.frames if frame.lsn > covered]
        standing = None
        if frames and frames[0].lsn != covered + 1:
            reason = f"{path.name}: records {covered + 1} to {frames[0].lsn - 1} are missing"
            if snapshot_lsn is None:
                standing = Standing()
            self._damage(path, DamagedData(reason), Kept.WHOLE if standing else Kept.NOTHING)
            frames = frames if standing else []
        elif found.damage is not None:
            reason = f"{path.name} at {found.damage.offset}: {found.damage.reason}"
            self._damage(path, DamagedData(reason), Kept.BEGINNING)
        self.notes += cut_off(path.name, found)
        last = found.frames[-1].lsn if found.frames else 0
        try:
            self._apply(frames, path, standing)
        except DamagedData as error:
            self._damage(path, error, Kept.BEGINNING)
        if found.valid_bytes < file.size():
            os.ftruncate(file.fd, found.valid_bytes)
        return max(covered, last), len(frames)

    def _apply(
        self, frames: Sequence[framing.Frame], path: Path, standing: Standing | None = None
    ) -> None:
        batches = Assembler()
        for frame in frames:
            try:
                for one in batches.add(frame.op, frame.payload):
                    passed = standing.passed(one) if standing else one
                    if passed is not None:
                        self.data.apply(passed)
            except DamagedData as error:
                raise DamagedData(f"{path.name} record {frame.lsn}: {error}") from error

    def _damage(self, path: Path, error: DamagedData, kept: Kept = Kept.NOTHING) -> None:
        """Refuse, or with salvage set the file, or a copy of it, aside and go on."""
        if not self.salvage:
            raise error
        if is_foreign(path):
            aside = set_aside(path, keep=False)
        elif path == self.paths.snapshot:
            aside = set_aside_until_replaced(path)
        else:
            aside = set_aside(path, keep=True)
        note = Finding(Kind.SET_ASIDE, path.name, 0, str(error), aside.name, kept)
        self.notes.append(note)
        log.warning("%s", note)
