"""Where the directory of workers lies: in memory where the system has files there.

It is written on every claim and drop, and nobody needs it past the server: on a full disk
workers start, find each other's prefixes and drop their own all the same. A system without such
files (macOS) has it in the data folder. Either way it has no name that anybody could delete:
a worker that is started again gets the launcher's descriptor, and so the same file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from pion_vllm_mlx.config import DIRECTORY_NAME
from pion_vllm_mlx.server.store.files import FILE_MODE


class DirectoryFile:
    """A new, empty one, for every process that inherits ``descriptor``. Raises OSError."""

    def __init__(self, folder: Path, in_memory: bool = True) -> None:
        """What an earlier server has left in ``folder`` goes."""
        (folder / DIRECTORY_NAME).unlink(missing_ok=True)
        self.descriptor = _in_memory() if in_memory else -1
        if self.descriptor < 0:
            self.descriptor = _without_name(folder / DIRECTORY_NAME)

    def close(self) -> None:
        """The server ends. May be called more than once."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _in_memory() -> int:
    """A descriptor; negative where the system has no such files."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return os.memfd_create(DIRECTORY_NAME)
    return -1


def _without_name(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    path.unlink()
    return descriptor
