"""File descriptors that close themselves, and flushing to stable storage."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


class FileHandle:
    """An open file that closes when its last user lets go of it.

    Readers hold the handle, not the path: a file that is unlinked or replaced
    while they read stays readable to them.
    """

    __slots__ = ("fd", "path")

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = -1
        self.path = path
        self.fd = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)

    @classmethod
    def missing(cls, path: Path) -> FileHandle:
        """A handle for a file that is not there: every read of it fails."""
        handle = cls.__new__(cls)
        handle.fd = -1
        handle.path = path
        return handle

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def size(self) -> int:
        return os.fstat(self.fd).st_size


def pwrite_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write every byte of ``data`` at ``offset``; raises OSError when it cannot."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def pread_into(fd: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` from ``offset``; raises OSError when the file is too short."""
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise OSError(f"file ends {len(view)} bytes before the data it should hold")
        view = view[count:]
        offset += count


def pread_exactly(fd: int, length: int, offset: int) -> bytes:
    """``length`` bytes from ``offset``; raises OSError when the file is too short."""
    data = bytearray(length)
    pread_into(fd, memoryview(data), offset)
    return bytes(data)


def flush(fd: int) -> None:
    """Bring a file to stable storage; on macOS past the drive's cache too."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def flush_directory(path: Path) -> None:
    """Make renames and unlinks inside ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(path: Path, chunks: list[bytes | memoryview]) -> None:
    """Replace ``path`` by a new durable file: temporary file, flush, rename, flush."""
    temporary = path.with_name(path.name + ".tmp")
    handle = FileHandle(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        offset = 0
        for chunk in chunks:
            pwrite_all(handle.fd, chunk, offset)
            offset += len(chunk)
        flush(handle.fd)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    flush_directory(path.parent)
