"""The private folder of a server that keeps nothing, and what killed ones have left of theirs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pion_vllm_mlx.server.store.files import DIRECTORY_MODE

_PREFIX = "pion-ephemeral-"
_YOUNG_SECONDS = 60.0
"""So long a folder may be there before its server has locked it."""


@contextmanager
def ephemeral_folder() -> Iterator[Path]:
    """A folder that goes with the block; those of servers that were killed go first."""
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        Path(name).chmod(DIRECTORY_MODE)
        yield Path(name)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if _abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: Path) -> bool:
    """Whether this user's folder ``path`` has no server. Raises OSError for what is no folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        young = time.time() - found.st_mtime < _YOUNG_SECONDS
        if young or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != DIRECTORY_MODE:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a server holds it while it runs
        return True
    finally:
        os.close(descriptor)
