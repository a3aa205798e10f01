"""Whether a writer that holds a lock has died, as far as this machine can tell.

Each client that writes has a file of its own in its user's private folder, and an exclusive
``flock`` on it, which ends with its process however that ends. Its name is in the locks that it
takes: who finds such a file unlocked knows that nobody holds the lock. Who finds none knows
nothing: the writer may be on another machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
import weakref
from pathlib import Path

from pion_vllm_mlx.config import socket_dir
from pion_vllm_mlx.errors import ConfigError

_PREFIX = "writer-"
_NAME = re.compile(r"[0-9a-f]{16}")
#: files of clients that were killed are left for so long: nobody looks for older ones.
_STALE_SECONDS = 86_400.0


class Presence:
    """The file of one client, made when it is first asked for. A forked child makes its own."""

    def __init__(self) -> None:
        self._name = ""
        self._pid = 0

    def name(self) -> str:
        """The name under which others find out whether this client lives; "" where none can."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._name = ""
            with contextlib.suppress(OSError, ConfigError):
                self._name = self._begin(socket_dir())
        return self._name

    def _begin(self, folder: Path) -> str:
        _sweep(folder)
        name = secrets.token_hex(8)
        path = folder / (_PREFIX + name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, _end, descriptor, path, self._pid)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return name


def has_died(name: str) -> bool:
    """Whether the client of this name was one of this machine, and lives no more."""
    if not _NAME.fullmatch(name):
        return False
    with contextlib.suppress(OSError, ConfigError):
        return _unlocked(socket_dir() / (_PREFIX + name))
    return False


def _unlocked(path: Path) -> bool:
    """Whether nobody holds a file that is there. Raises OSError where there is none."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _sweep(folder: Path) -> None:
    """Removes the old files of clients that were killed."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STALE_SECONDS and _unlocked(path):
                path.unlink()


def _end(descriptor: int, path: Path, pid: int) -> None:
    """The client is no more; what a forked child has of it ends nothing but its copy."""
    if pid == os.getpid():
        path.unlink(missing_ok=True)
    os.close(descriptor)
