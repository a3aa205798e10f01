"""The folder of segments: the files that hold rows and long states, once."""

from __future__ import annotations

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
)
from pion_vllm_mlx.server.store.records import Record, Rows
from pion_vllm_mlx.server.store.segment import SUFFIX, Region, Segment
from pion_vllm_mlx.server.store.segment_header import Tensor, build_header

#: room for a header; what it does not need of it stays a hole.
HEADER_RESERVE = 64 << 10
#: the same where little is stored: copies of the file have no holes. Both sides of 32 layers fit.
SMALL_HEADER_RESERVE = 20 << 10
#: a group whose first run is shorter begins with the small one.
_SMALL_RUN_BYTES = 256 << 10


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
    #: whether files came since the folder itself was flushed
    _unlisted: bool = True
    _of_group: dict[bytes, dict[str, Segment]] = field(default_factory=dict)
    _disk_use: DiskUse = field(default_factory=DiskUse)
    #: those to flush; filled by any thread
    _due: dict[str, Segment] = field(default_factory=dict)
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
        segment.due = self._due
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
        self._unlisted = True
        self.files.add(file)
        segment = Segment(name, group, file.path, self.files, data_start, data_start)
        self._enter(segment, group)
        segment.closed = True
        return segment

    def reserve(self, group: bytes, nbytes: int, tensors: int) -> Region:
        """Room for ``nbytes`` in the group's open segment, or in a new one. Raises OSError."""
        segment = self.open_of.get(group)
        # where nobody writes any more what is dead can go
        if segment is None or not segment.has_room(nbytes, tensors) or segment.mostly_died():
            # one that is full is followed by more
            small = nbytes < _SMALL_RUN_BYTES and (segment is None or segment.closed)
            if segment is not None:
                segment.closed = True
            segment = self.create(group, SMALL_HEADER_RESERVE if small else HEADER_RESERVE)
        region = Region(segment, segment.append(nbytes, tensors), nbytes)
        segment.writers += 1
        return region

    def write_rows(self, records: Iterable[Record]) -> None:
        """Write short runs that came with their records. May block; raises OSError.

        The region of each counts as one that is written to until its record is applied.
        """
        for record in records:
            if isinstance(record, Rows) and record.segment and record.blob:
                segment = self.segments[record.segment]
                file = segment.file
                pwritev_all(file.fd, [record.blob], record.offset)
                segment.written()

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
        """Fill the header and cut off what no record has named; the caller logs it.

        Dead rows stay: that they died may not be on stable storage, and who reads them reads
        on. May block; raises OSError.
        """
        ends = (tensor.offset + tensor.length for tensor in tensors)
        end = max(segment.data_start, segment.named_end, *ends)
        header = build_header(tensors, segment.data_start, end)
        file = segment.file
        pwrite_all(file.fd, header, 0)
        os.ftruncate(file.fd, end)
        segment.written()
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
        segment.due = None
        self._due.pop(segment.name, None)
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
                # first: what is written while it is flushed is due again
                self._due.pop(segment.name, None)
                segment.flushed = True
                try:
                    file = segment.file
                    if file.fd >= 0:
                        flush(file.fd)
                except OSError:
                    segment.written()
                    raise
                segment.resized()  # file systems round while they write
                flushed = True
            if flushed and self._unlisted:
                self._flush_folder()

    def _flush_folder(self) -> None:
        self._unlisted = False
        try:
            flush_directory(self.path)
        except OSError:
            self._unlisted = True
            raise

    def dirty(self) -> list[Segment]:
        """Segments to flush; one in which nothing lives, nor a snapshot names, need not be."""
        # a copy of the table: other threads write and flush meanwhile
        return [
            segment
            for segment in list(self._due.values())
            if segment.uses or segment.writers or segment.in_snapshot
        ]
