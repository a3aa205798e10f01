"""Segments: the files that hold rows and long states, once.

A segment belongs to one segment group. While it is open, rows are written at
its end, behind a header whose space was reserved. Sealing fills the header, cuts
the tail and publishes the file: from then on it is a safetensors file that never
changes, only disappears. Dead bytes are named U8 tensors, since safetensors
allows no gaps.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from crc32c import crc32c

from pion_vllm_mlx.server.store.disk_use import DiskUse
from pion_vllm_mlx.server.store.files import (
    DIRECTORY_MODE,
    FileHandle,
    OpenFiles,
    flush,
    flush_directory,
    pread_exactly,
    pwrite_all,
    pwritev_all,
    refusals,
    unlink_file,
)
from pion_vllm_mlx.server.store.segment_header import (
    LENGTH_BYTES,
    TENSOR_HEADER_BYTES,
    Tensor,
    build_header,
)

SUFFIX = ".safetensors"
HEADER_RESERVE = 64 << 10
SMALL_HEADER_RESERVE = 8 << 10
#: runs start at multiples of this: copies from the page cache to a socket or an
#: array run at up to twice the speed where both sides are aligned alike.
ALIGNMENT = 64
MAX_SEGMENT_BYTES = 8 << 30


@dataclass
class Segment:
    """One segment file and what the server knows of it.

    ``tail`` is where the next bytes go; ``writers`` counts regions handed out whose
    writing has not ended; ``uses`` counts runs and states that live here, ``guests`` those
    of each other group (equal rows are stored once); ``named``: a record says what lives
    here; ``flushed``: that may be on stable storage; ``abandoned`` holds begin and end of
    regions that nothing came of.
    """

    name: str
    group: bytes
    path: Path
    files: OpenFiles
    data_start: int
    tail: int
    sealed: bool = False
    closed: bool = False
    size: int = 0
    header_bytes: int = 0
    header_crc: int = 0
    header_verified: bool = True
    writers: int = 0
    uses: int = 0
    guests: dict[bytes, int] = field(default_factory=dict)
    tensors: int = 0
    dirty: bool = False
    flushed: bool = False
    named: bool = False
    abandoned: set[tuple[int, int]] = field(default_factory=set)
    _disk_bytes: int = 0
    _unlinked: FileHandle | None = None

    @property
    def file(self) -> FileHandle:
        """The file, open. Whoever uses its descriptor holds the handle meanwhile."""
        handle = self._unlinked or self.files.get(self.path)
        if self._unlinked not in (None, handle):
            # opened while it went: kept open by nobody but who asked
            self.files.forget(self.path)
        # a thread that asks for a file while it is unlinked finds none: its handle was kept first
        return handle if handle.fd >= 0 else self._unlinked or handle

    def groups(self) -> tuple[bytes, ...]:
        """Its own group, and the others of which something lives here."""
        return (self.group, *self.guests)

    def users(self) -> list[bytes]:
        """The groups of which something lives here."""
        own = self.uses > sum(self.guests.values())
        return [self.group, *self.guests] if own else list(self.guests)

    def settle(self, group: bytes) -> None:
        """A run or state of a group lives here."""
        self.uses += 1
        self.named = True
        if group != self.group:
            self.guests[group] = self.guests.get(group, 0) + 1

    def leave(self, group: bytes) -> None:
        """One that settled lives here no more."""
        self.uses -= 1
        if group in self.guests:
            self.guests[group] -= 1
            if not self.guests[group]:
                del self.guests[group]

    @property
    def durable(self) -> bool:
        """Whether something that lives or lived here may be on stable storage."""
        return self.flushed and self.named

    def unlink(self) -> None:
        """Remove the file; who still holds a run of it can read it to its end. Raises OSError."""
        with contextlib.suppress(OSError):
            self._unlinked = self.file
            self._unlinked.retired = self.files.retired
        try:
            unlink_file(self.path)
        except OSError:
            self._unlinked = None  # it is where it was
            raise
        # only now: who asks in between would open it again, and keep its blocks
        self.files.forget(self.path)

    def disk_bytes(self) -> int:
        """Bytes the file occupies; holes do not count."""
        if self._disk_bytes:
            return self._disk_bytes
        try:
            occupied = self.path.stat().st_blocks * 512
        except FileNotFoundError:
            return 0
        if self.sealed:  # it changes no more
            self._disk_bytes = occupied
        return occupied

    def append(self, nbytes: int, tensors: int) -> int:
        """Give out the next ``nbytes``, for a run of ``tensors`` parts; their aligned offset."""
        offset = -(-self.tail // ALIGNMENT) * ALIGNMENT
        self.tail = offset + nbytes
        self.tensors += tensors
        return offset

    def take_back(self, begin: int, end: int) -> None:
        """Nothing came of these bytes: what lies at the end of the file is cut off.

        Called on the event loop while the region still counts as a writer: nobody seals.
        """
        self.abandoned.add((begin, end))
        tail = self.tail
        while ends := [a for a in self.abandoned if a[1] == self.tail]:
            self.abandoned -= set(ends)
            self.tail = min(begin for begin, _ in ends)
        file = self.file
        if self.tail < tail and file.size() > self.tail:
            os.ftruncate(file.fd, self.tail)

    def has_room(self, nbytes: int, tensors: int) -> bool:
        """Whether a run of ``nbytes`` in ``tensors`` parts still fits."""
        header = (self.tensors + tensors + 1) * TENSOR_HEADER_BYTES
        return (
            not self.closed
            and self.tail + nbytes <= MAX_SEGMENT_BYTES
            and header <= self.data_start - LENGTH_BYTES
        )


@dataclass
class Region:
    """Bytes of an open segment that one writer fills: ``length`` of them at ``offset``."""

    segment: Segment
    offset: int
    length: int
    released: bool = False

    def write(self, data: memoryview | bytes, at: int) -> None:
        """Write ``data`` at ``at`` bytes into the region. May block on the disk."""
        self.write_pieces([data], at)

    def write_pieces(self, pieces: list[memoryview | bytes], at: int) -> None:
        """Write ``pieces``, one behind the other, at ``at`` bytes into the region."""
        file = self.segment.file
        pwritev_all(file.fd, pieces, self.offset + at)
        self.segment.dirty = True

    def release(self) -> None:
        """The writer has ended, well or not."""
        if not self.released:
            self.released = True
            self.segment.writers -= 1


@dataclass
class SegmentFolder:
    """The folder of one worker's segments, the open one of every group, and the files in use."""

    path: Path
    segments: dict[str, Segment] = field(default_factory=dict)
    files: OpenFiles = field(default_factory=OpenFiles)
    open_of: dict[bytes, Segment] = field(default_factory=dict)
    undeleted: list[Segment] = field(default_factory=list)
    #: how many of these were the last that should have gone, one after the other
    kept_in_a_row: int = 0
    _of_group: dict[bytes, dict[str, Segment]] = field(default_factory=dict)
    _disk_use: DiskUse = field(default_factory=DiskUse)
    _flushing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        if not self.path.exists():
            self.path.mkdir(mode=DIRECTORY_MODE)
            flush_directory(self.path.parent)
        self.path.chmod(DIRECTORY_MODE)

    def _join(self, segment: Segment, group: bytes) -> None:
        self._leave(segment)
        segment.group = group
        self._of_group.setdefault(group, {})[segment.name] = segment

    def _enter(self, segment: Segment, group: bytes) -> None:
        self.segments[segment.name] = segment
        self._disk_use.add(segment)
        self._join(segment, group)

    def disk_bytes(self) -> int:
        """Bytes that the files occupy; holes do not count."""
        return self._disk_use.total() + self.undeleted_bytes()

    def undeleted_bytes(self) -> int:
        """Those of files in which nothing lives, and that the disk does not let go of."""
        return sum(segment.disk_bytes() for segment in self.undeleted)

    def _leave(self, segment: Segment) -> None:
        mates = self._of_group.get(segment.group, {})
        mates.pop(segment.name, None)
        if not mates:
            self._of_group.pop(segment.group, None)

    def unsealed(self, group: bytes) -> list[Segment]:
        """The segments of one group that are not sealed, oldest first."""
        return [s for s in self._of_group.get(group, {}).values() if not s.sealed]

    def of_group(self, group: bytes) -> list[Segment]:
        """The segments of one group."""
        return list(self._of_group.get(group, {}).values())

    def create(self, group: bytes, data_start: int) -> Segment:
        """A new open segment of ``group``. Raises OSError."""
        segment = self.create_closed(group, data_start)
        segment.closed = False
        self.open_of[group] = segment
        return segment

    def create_closed(self, group: bytes, data_start: int) -> Segment:
        """A new segment of ``group`` that no store is given room in. Raises OSError."""
        name = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        file = FileHandle(self.path / (name + SUFFIX), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self.files.add(file)
        segment = Segment(name, group, file.path, self.files, data_start, data_start)
        self._enter(segment, group)
        segment.closed = True
        return segment

    def reserve(self, group: bytes, nbytes: int, tensors: int) -> Region:
        """Room for ``nbytes`` in the group's open segment, or in a new one. Raises OSError."""
        segment = self.open_of.get(group)
        if segment is None or not segment.has_room(nbytes, tensors):
            if segment is not None:
                segment.closed = True
            small = nbytes < (256 << 10)
            segment = self.create(group, SMALL_HEADER_RESERVE if small else HEADER_RESERVE)
        region = Region(segment, segment.append(nbytes, tensors), nbytes)
        segment.writers += 1
        return region

    def adopt(self, name: str, group: bytes) -> Segment:
        """The segment a replayed record names: known, or one that lies on disk.

        The file may be gone: the log may drop its rows further on, and if it does not,
        their session is damaged.
        """
        segment = self.segments.get(name)
        if segment is None:
            path = self.path / (name + SUFFIX)
            segment = Segment(name, group, path, self.files, HEADER_RESERVE, 0, closed=True)
            segment.flushed = True
            self._enter(segment, group)
        if group and not segment.group:
            self._join(segment, group)
        return segment

    def seal(self, segment: Segment, tensors: list[Tensor]) -> None:
        """Fill the header and cut the tail; the caller logs it. May block; raises OSError."""
        end = max((t.offset + t.length for t in tensors), default=segment.data_start)
        header = build_header(tensors, segment.data_start, end)
        file = segment.file
        pwrite_all(file.fd, header, 0)
        os.ftruncate(file.fd, end)
        segment.dirty = True
        segment.header_bytes = len(header)
        segment.header_crc = crc32c(header)
        segment.size = end

    def verify_header(self, segment: Segment) -> bool:
        """Whether a sealed file still has its size and header. Reads the disk."""
        if not segment.header_verified:
            file = segment.file
            try:
                header = pread_exactly(file.fd, segment.header_bytes, 0)
                size = file.size()
            except OSError:
                return False
            good = crc32c(header) == segment.header_crc and size == segment.size
            segment.header_verified = good
        return segment.header_verified

    def unlink(self, segment: Segment) -> None:
        """Remove a file that holds nothing live; whoever has it open can go on reading.

        One that the disk does not let go of counts as before, until ``delete_again`` has it.
        """
        self.forget(segment)
        if not self._delete(segment):
            self.kept_in_a_row += 1

    def _delete(self, segment: Segment) -> bool:
        try:
            segment.unlink()
        except OSError as error:
            refusals.tell("a file that is not needed any more", error)
            self.undeleted.append(segment)
            return False
        self.kept_in_a_row = 0
        return True

    def delete_again(self) -> None:
        """Try again to delete what could not be."""
        waiting, self.undeleted = self.undeleted, []
        for segment in waiting:
            self._delete(segment)

    def forget(self, segment: Segment) -> None:
        """Nothing lives in a segment; its file stays where it is."""
        self.segments.pop(segment.name, None)
        self._disk_use.remove(segment)
        self._leave(segment)
        if self.open_of.get(segment.group) is segment:
            del self.open_of[segment.group]
        segment.closed = True

    def orphans(self) -> list[Path]:
        """Files that no record names."""
        known = {name + SUFFIX for name in self.segments}
        return [p for p in self.path.iterdir() if p.name not in known]

    def remove_orphans(self) -> int:
        """Delete files that no record names; how many are gone."""
        files = [path for path in self.orphans() if not path.is_dir()]
        return sum(self._delete(Segment("", b"", path, self.files, 0, 0)) for path in files)

    def flush(self, segments: Iterable[Segment] | None = None) -> None:
        """Bring segments to stable storage, by default all that are due. May block.

        Waits for another thread that flushes: what it has begun with is not due any more.
        Raises OSError; what was not flushed is then still due.
        """
        with self._flushing:
            flushed = False
            for segment in self.dirty() if segments is None else segments:
                segment.dirty, segment.flushed = False, True
                try:
                    file = segment.file
                    if file.fd >= 0:
                        flush(file.fd)
                except OSError:
                    segment.dirty = True
                    raise
                flushed = True
            if flushed:
                flush_directory(self.path)

    def dirty(self) -> list[Segment]:
        """Segments to flush; one in which nothing lives goes, and need not be."""
        # a copy of the table: other threads flush while the event loop adds segments
        found = [segment for segment in list(self.segments.values()) if segment.dirty]
        return [segment for segment in found if segment.uses or segment.writers]
