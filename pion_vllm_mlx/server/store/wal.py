"""The write-ahead log of one worker's store: append, truncate, flush.

One record reaches the file with one ``write`` before its command is answered,
so a killed process loses nothing it acknowledged. A failed append is cut off
again: the file never holds half a record in its middle. So is one that was written
while another log refused its part of the same command.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store import framing
from pion_vllm_mlx.server.store.files import (
    TEMPORARY,
    FileHandle,
    flush,
    flush_directory,
    pread_exactly,
    pwrite_all,
    refusals,
)
from pion_vllm_mlx.server.store.records import Record

#: how much of a log is copied at once.
_COPY_BYTES = 1 << 20


class Inline(NamedTuple):
    """Bytes inside a log or snapshot file."""

    file: FileHandle
    offset: int


class Logged(NamedTuple):
    """A record with its sequence number and the place of its inline bytes."""

    lsn: int
    record: Record
    place: Inline | None


class Written(NamedTuple):
    """Records behind the end of a log: in its file, but not of it yet."""

    logged: list[Logged]
    nbytes: int


class Wal:
    """An append-only log.

    The store's write lock is held around all but ``flush`` and ``copy``.
    """

    def __init__(self, path: Path, magic: bytes, next_lsn: int, enabled: bool) -> None:
        self.path = path
        self.magic = magic
        self.next_lsn = next_lsn
        self.enabled = enabled
        self.appended = 0
        self.dirty = False
        self._flushing = threading.Lock()
        #: why the file's end may hold records that were not acknowledged
        self.broken = ""
        self._file = self._open() if enabled else None
        self.size = self._file.size() if self._file else 0

    @property
    def temporary(self) -> Path:
        """Where a file is made that is to take the log's place."""
        return self.path.with_name(self.path.name + TEMPORARY)

    def _open(self) -> FileHandle:
        fresh = not self.path.exists()
        file = FileHandle(self.path, os.O_RDWR | os.O_CREAT)
        if fresh:
            flush_directory(self.path.parent)
        return file

    def append(self, records: Sequence[Record]) -> list[Logged]:
        """Write the records in one piece and say where they went. May block on the disk.

        Raises CommandError when the disk refuses; nothing is logged then.
        """
        return append_together([(self, records)])

    def write(self, records: Sequence[Record]) -> Written:
        """Write the records behind the log's end: it has them with ``accept``, not before.

        May block; raises CommandError when the disk refuses, and nothing is there then. What an
        earlier refusal has left at the end goes first.
        """
        if self._file is None:
            entries = [Logged(self.next_lsn + i, record, None) for i, record in enumerate(records)]
            return Written(entries, 0)
        if self.broken:
            self.cut()
        if self.broken:
            raise CommandError(f"the log is not writable: {self.broken}")
        if not records:
            return Written([], 0)
        data = bytearray(b"" if self.size else framing.header(self.magic))
        logged = []
        for index, record in enumerate(records):
            payload = record.payload()
            inline = record.inline
            lsn = self.next_lsn + index
            data += framing.frame(lsn, record.op, payload)
            place = Inline(self._file, self.size + len(data) - len(inline))
            logged.append(Logged(lsn, record, place))
        try:
            pwrite_all(self._file.fd, data, self.size)
        except OSError as error:
            self.cut()
            refusals.tell(self.path.name, error)
            raise CommandError(f"the log could not be written: {error.strerror}") from error
        return Written(logged, len(data))

    def accept(self, written: Written) -> list[Logged]:
        """What was written belongs to the log from now on."""
        self.next_lsn += len(written.logged)
        if written.nbytes:
            self.size += written.nbytes
            self.appended += len(written.logged)
            self.dirty = True
        return written.logged

    def cut(self) -> None:
        """Cut off what is behind the log's end: an append failed, here or in another log."""
        if self._file is None:
            return
        try:
            os.ftruncate(self._file.fd, self.size)
            self.broken = ""
        except OSError as error:
            self.broken = str(error)
        # the disk may have it by now
        self.dirty = True

    def flush(self) -> None:
        """Bring what was appended to stable storage; raises OSError, and is then still due.

        Waits for another thread that flushes: what it has begun with is not due any more.
        """
        with self._flushing:
            file = self._file
            if file is None or not self.dirty:
                return
            self.dirty = False
            try:
                flush(file.fd)
            except OSError:
                self.dirty = True
                raise

    def truncate(self) -> None:
        """Forget every record: an empty file takes this one's place. Raises OSError.

        Readers of inline bytes keep the old file. Sequence numbers go on counting. A log
        that is not kept (``enabled`` false) still forgets one that an earlier start left.
        """
        if self._file is None and not self.path.exists():
            self.appended = 0
            return
        self.replace(WalTail(self, self.size), 0)

    def replace(self, tail: WalTail, records: int) -> None:
        """Forget every record but the last ``records``, which ``tail`` holds. Raises OSError."""
        try:
            tail.catch_up()
            os.replace(tail.file.path, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                tail.file.path.unlink()
            raise
        tail.file.path = self.path
        self._file = tail.file if self.enabled else None
        self.size, self.appended = tail.size, records
        self.dirty = False
        self.broken = ""
        flush_directory(self.path.parent)

    def copy(self, begin: int, target: FileHandle, offset: int) -> int:
        """Copy what was appended from ``begin`` on to another file; how many bytes. Blocks."""
        if self._file is None:
            return 0
        end = self.size
        for at in range(begin, end, _COPY_BYTES):
            data = pread_exactly(self._file.fd, min(_COPY_BYTES, end - at), at)
            pwrite_all(target.fd, data, offset + at - begin)
        return end - begin


def append_together(batches: Sequence[tuple[Wal, Sequence[Record]]]) -> list[Logged]:
    """Write each log's records, in this order, and say where they went: all of them or none.

    A log whose end could not be cut is cut before, also one that gets none. May block; raises
    CommandError when the disk refuses.
    """
    written: list[tuple[Wal, Written]] = []
    try:
        for wal, records in batches:
            written.append((wal, wal.write(records)))
    except CommandError:
        for wal, one in written:
            if one.nbytes:
                wal.cut()
        raise
    return [entry for wal, one in written for entry in wal.accept(one)]


class WalTail:
    """The end of a log in a file that is to take the log's place.

    What is appended meanwhile is fetched by ``catch_up``, also from another thread.
    """

    def __init__(self, wal: Wal, begin: int) -> None:
        """Copy the log from ``begin`` on, to stable storage. Blocks; raises OSError."""
        self._wal = wal
        self._next = begin
        self.size = 0
        # opened before the rename: what is appended from then on must not go to a lost file
        self.file = FileHandle(wal.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.catch_up()

    def catch_up(self) -> None:
        """Copy what is missing. Blocks; raises OSError."""
        begin = max(self._next, framing.HEADER_BYTES)
        if self._wal.size <= begin:
            return
        head = b"" if self.size else framing.header(self._wal.magic)
        pwrite_all(self.file.fd, head, self.size)
        copied = self._wal.copy(begin, self.file, self.size + len(head))
        self.size += len(head) + copied
        self._next = begin + copied
        flush(self.file.fd)
