"""A data folder as its clients see it: who owns it, how large it is, clearing it.

The owning server holds an exclusive ``flock`` on the folder itself and on ``pion.lock`` for as long
as it lives and, once it is ready, writes ``pion.status``, a JSON object::

    pid         process id of the server
    port        its RESP port on 127.0.0.1
    unixsocket  path of its Unix socket, or null
    version     version of the package it runs
    started     seconds since 1970
    down        workers of several that cannot be started, where the server has several

A status file may be left behind by a server that was killed: it is a hint where to knock, and
the locks alone say whether the folder is owned. Either is enough: who deletes the file still finds
the folder taken, earlier versions know only the file, and some network file systems lock no folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pion_vllm_mlx.config import LOCK_NAME, STATUS_NAME
from pion_vllm_mlx.errors import DataFolderBusy

LOG_NAME = "pion.log"

# What the server writes; nothing else in the folder is ever touched.
_OURS = ("pion.*", "pion-*")


@dataclass(frozen=True)
class ServerStatus:
    """What the last server of a folder said about itself."""

    pid: int
    port: int
    unixsocket: Path | None
    version: str
    started: float
    down: tuple[int, ...] = ()


@dataclass(frozen=True)
class FolderSize:
    """Files of the store and the disk space they take, holes not counted."""

    files: int
    disk_bytes: int


def read_status(folder: Path) -> ServerStatus | None:
    """The status in ``folder``; None where there is none, or none that can be read."""
    try:
        text = (folder / STATUS_NAME).read_text(encoding="utf-8")
        fields = json.loads(text)
        unixsocket = fields.get("unixsocket")
        return ServerStatus(
            pid=int(fields["pid"]),
            port=int(fields["port"]),
            unixsocket=Path(unixsocket) if unixsocket else None,
            version=str(fields.get("version", "")),
            started=float(fields.get("started", 0.0)),
            down=tuple(int(worker) for worker in fields.get("down", ())),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Own ``folder`` while the block runs, so that no server starts in it.

    Raises ``DataFolderBusy`` naming the process that owns it.
    """
    whole = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # of file systems that lock only what is written to
            _lock(folder, whole)
        with _lock_file(folder):
            yield
    finally:
        os.close(whole)


@contextmanager
def _lock_file(folder: Path) -> Iterator[None]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        descriptor = os.open(folder / LOCK_NAME, flags, 0o600)
        try:
            _lock(folder, descriptor)
            # else it was opened before somebody cleared the folder
            if _is_lock(folder, descriptor):
                yield
                return
        finally:
            os.close(descriptor)


def _lock(folder: Path, descriptor: int) -> None:
    """Take the lock. Raises ``DataFolderBusy`` naming the process that has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        status = read_status(folder)
        owner = f"process {status.pid}, port {status.port}" if status else "another process"
        raise DataFolderBusy(
            f"{folder} is in use by a server ({owner}): end what uses it, then try again"
        ) from None


def _is_lock(folder: Path, descriptor: int) -> bool:
    """Whether the folder's lock is the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK_NAME))
    except FileNotFoundError:
        return False


def measure(folder: Path) -> FolderSize:
    """Count the store's files in ``folder`` and what they take on disk."""
    files = disk_bytes = 0
    for path in _all_files(folder):
        try:
            status = path.lstat()
        except FileNotFoundError:  # a running server removes files
            continue
        files += 1
        disk_bytes += status.st_blocks * 512
    return FolderSize(files, disk_bytes)


def clear(folder: Path) -> FolderSize:
    """Remove every stored prefix in ``folder``; returns what was there.

    Raises ``DataFolderBusy`` while a server owns the folder.
    """
    if not folder.is_dir() or not _top_level(folder):
        return FolderSize(0, 0)
    with exclusive(folder):
        before = measure(folder)
        # the lock last: until then no server starts here
        for path in sorted(_top_level(folder), key=lambda path: path.name == LOCK_NAME):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return before


def _top_level(folder: Path) -> list[Path]:
    """The store's files and folders that lie directly in ``folder``."""
    return sorted({path for pattern in _OURS for path in folder.glob(pattern)})


def _all_files(folder: Path) -> Iterator[Path]:
    for path in _top_level(folder):
        if path.is_dir() and not path.is_symlink():
            yield from (inner for inner in path.rglob("*") if not inner.is_dir())
        else:
            yield path
