"""Owning a data folder: one process at a time, private, and known to its clients."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pion_vllm_mlx.config import LOCK_NAME, STATUS_NAME
from pion_vllm_mlx.errors import DataFolderBusy
from pion_vllm_mlx.server.store.files import DIRECTORY_MODE, FILE_MODE, TEMPORARY

#: how long the workers of a launcher that was killed may take to notice.
ORPHAN_SECONDS = 5.0
_NEVER_INDEX = ".metadata_never_index"


class DataFolder:
    """Holds the folder's lock from construction to ``close``.

    ``dedicated`` says that the folder holds nothing but a store, so that it may be kept
    out of searches and backups; one that is created here is. Raises DataFolderBusy,
    naming the owner, or OSError.
    """

    def __init__(self, path: Path, *, dedicated: bool = False) -> None:
        self.path = path
        if not path.exists():
            path.mkdir(mode=DIRECTORY_MODE, parents=True)
            dedicated = True
        if dedicated and not (path / _NEVER_INDEX).exists():
            _exclude_from_backups(path)
        self._lock = self._open_lock()
        deadline = time.monotonic() + ORPHAN_SECONDS
        while not self._try_lock():
            if not self._owner_died() or time.monotonic() > deadline:
                os.close(self._lock)
                raise DataFolderBusy(f"{path} is in use by a server ({self._owner()})")
            time.sleep(0.02)

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return os.open(self.path / LOCK_NAME, flags, FILE_MODE)

    def _try_lock(self) -> bool:
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK_NAME)):
                    return True
            # it was opened before the folder was cleared: another process may hold the new one
            os.close(self._lock)
            self._lock = self._open_lock()

    def _owner_died(self) -> bool:
        """Whether only the workers of a launcher that is no more hold the folder."""
        try:
            os.kill(int(json.loads((self.path / STATUS_NAME).read_text())["pid"]), 0)
        except ProcessLookupError:
            return True
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return False

    def copy_of_lock(self) -> int:
        """A descriptor for child processes: the folder is taken until the last of them ends."""
        return os.dup(self._lock)

    def _owner(self) -> str:
        try:
            status = json.loads((self.path / STATUS_NAME).read_text())
            return f"process {int(status['pid'])}, port {int(status['port'])}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def publish_status(self, **fields: Any) -> None:
        """Tell clients who serves this folder and where, in one atomic step."""
        temporary = self.path / (STATUS_NAME + TEMPORARY)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        with os.fdopen(descriptor, "w") as out:
            json.dump({"pid": os.getpid(), "started": time.time(), **fields}, out)
        os.replace(temporary, self.path / STATUS_NAME)

    def close(self) -> None:
        """Withdraw the status and let the next owner in."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / STATUS_NAME).unlink()
        os.close(self._lock)


def _exclude_from_backups(path: Path) -> None:
    """Keep a folder of conversations out of Spotlight and Time Machine."""
    (path / _NEVER_INDEX).touch(mode=FILE_MODE)
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                ["tmutil", "addexclusion", str(path)], check=False, capture_output=True, timeout=10
            )
