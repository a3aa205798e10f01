"""Owning a data folder: one process at a time, private, and known to its clients.

Both ``pion.lock`` and the folder itself are locked: who deletes the one still finds the other
taken, and earlier versions know only the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pion_vllm_mlx.config import LOCK_NAME, STATUS_NAME
from pion_vllm_mlx.errors import ConfigError, DataFolderBusy
from pion_vllm_mlx.server.store.files import (
    DIRECTORY_MODE,
    FILE_MODE,
    TEMPORARY,
    FileHandle,
    pwrite_all,
)

log = logging.getLogger(__name__)

#: how long the workers of a launcher that was killed may take to notice.
ORPHAN_SECONDS = 5.0
_NEVER_INDEX = ".metadata_never_index"


class DataFolder:
    """Holds the folder's lock from construction to ``close``.

    ``dedicated`` says that the folder holds nothing but a store, so that it may be kept
    out of searches and backups; one that is created here is. Raises DataFolderBusy,
    naming the owner, ConfigError for what is no folder, or OSError.
    """

    def __init__(self, path: Path, *, dedicated: bool = False) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise ConfigError(f"the data folder {path} is not a folder")
        if not path.exists():
            path.mkdir(mode=DIRECTORY_MODE, parents=True)
            dedicated = True
        if dedicated and not (path / _NEVER_INDEX).exists():
            _exclude_from_backups(path)
        self._lock = self._open_lock()
        self._whole = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + ORPHAN_SECONDS
        while not self._try_lock():
            if not self._owner_died() or time.monotonic() > deadline:
                os.close(self._whole)
                os.close(self._lock)
                raise DataFolderBusy(f"{path} is in use by a server ({self._owner()})")
            time.sleep(0.02)

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(self.path / LOCK_NAME, flags, FILE_MODE)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._whole, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # network file systems lock only what is open for writing
            log.info("%s itself cannot be locked: %s", self.path, error)
        return self._try_lock_file()

    def _try_lock_file(self) -> bool:
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
            os.kill(int(self._status()["pid"]), 0)
        except ProcessLookupError:
            return True
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return False

    def copies_of_locks(self) -> tuple[int, int]:
        """Descriptors for child processes: the folder is taken until the last of them ends."""
        return os.dup(self._whole), os.dup(self._lock)

    def _status(self) -> Any:
        """What the owner published. Raises OSError, ValueError."""
        return json.loads(bytes(FileHandle(self.path / STATUS_NAME, os.O_RDONLY).mapped()))

    def _owner(self) -> str:
        try:
            status = self._status()
            return f"process {int(status['pid'])}, port {int(status['port'])}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def publish_status(self, **fields: Any) -> None:
        """Tell clients who serves this folder and where, in one atomic step.

        Where the disk refuses, a warning: those who were told the port are served.
        """
        path = self.path / STATUS_NAME
        text = json.dumps({"pid": os.getpid(), "started": time.time(), **fields})
        try:
            try:
                _replace(path, text.encode())
            except OSError:
                path.unlink(missing_ok=True)  # the last owner's: its room may be enough
                _replace(path, text.encode())
        except OSError as error:
            reason = error.strerror or str(error)
            log.warning("%s could not be written: %s; who looks there finds nobody", path, reason)

    def close(self) -> None:
        """Withdraw the status and let the next owner in."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / STATUS_NAME).unlink()
        os.close(self._whole)
        os.close(self._lock)


def _replace(path: Path, text: bytes) -> None:
    """Put a file in place of another at once. Raises OSError; then no half of it is left."""
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.unlink(missing_ok=True)
    try:
        file = FileHandle(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        pwrite_all(file.fd, text, 0)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _exclude_from_backups(path: Path) -> None:
    """Keep a folder of conversations out of Spotlight and Time Machine."""
    (path / _NEVER_INDEX).touch(mode=FILE_MODE)
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                ["tmutil", "addexclusion", str(path)], check=False, capture_output=True, timeout=10
            )
