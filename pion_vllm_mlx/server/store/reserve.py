"""A little room on the disk that only records which free some may take.

Who drops a prefix or a key because the disk is full needs room for the record that says so. The
reserve is a file without a name: a process that ends in any way leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.files import FileHandle, pwrite_all

#: records of a few hundred drops; systems give out 4 or 16 KB at a time.
RESERVE_BYTES = 64 << 10


def is_full(error: CommandError) -> bool:
    """Whether a log refused a record because the disk has no room."""
    return getattr(error.__cause__, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    """The reserve of one log; ``path``: its name for the moment in which it has one.

    For one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileHandle | None = None
        self.held = False

    def fill(self) -> None:
        """Take the room, if it is there. Blocks."""
        if self.held:
            return
        try:
            disk = os.statvfs(self._path.parent)
            if disk.f_bavail * disk.f_frsize < RESERVE_BYTES:
                return
            if self._file is None:
                self._file = self._open()
            # zeros are no reserve where the file system compresses
            pwrite_all(self._file.fd, os.urandom(RESERVE_BYTES), 0)
            self.held = True
        except OSError:
            self._empty()

    def give(self) -> bool:
        """Give the room back to the disk; False when there is none. Blocks."""
        if not self.held:
            return False
        self.held = False
        return self._empty()

    def _open(self) -> FileHandle:
        file = FileHandle(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._path.unlink()
        return file

    def _empty(self) -> bool:
        if self._file is None:
            return False
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fd, 0)
            return True
        return False
