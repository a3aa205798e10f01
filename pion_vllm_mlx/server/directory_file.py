"""Where the directory of workers lies: in memory where the system has files there.

It is written on every claim and drop, and nobody needs it past the server: on a full disk
workers start, find each other's prefixes and drop their own all the same. A system without such
files (macOS) has it in the data folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from pion_vllm_mlx.config import DIRECTORY_NAME


class DirectoryFile:
    """A new, empty one. ``path`` opens it in every process that inherits ``descriptors``."""

    def __init__(self, folder: Path) -> None:
        """What an earlier server has left in ``folder`` goes."""
        self._on_disk = folder / DIRECTORY_NAME
        self._on_disk.unlink(missing_ok=True)
        self.path = self._on_disk
        self.descriptors: tuple[int, ...] = ()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._in_memory(os.memfd_create(DIRECTORY_NAME))

    def _in_memory(self, descriptor: int) -> None:
        # opened by name it is each worker's own, with a lock of its own; not so if inherited
        path = Path(f"/proc/self/fd/{descriptor}")
        if path.exists():
            self.path, self.descriptors = path, (descriptor,)
        else:
            os.close(descriptor)

    def close(self) -> None:
        """The server ends. May be called more than once."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
        self._on_disk.unlink(missing_ok=True)
