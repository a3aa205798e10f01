"""File descriptors that close themselves, and flushing to stable storage."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import resource
import shutil
import stat
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from pion_vllm_mlx.errors import CommandError

log = logging.getLogger(__name__)

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
#: what the name of a file ends with until it is complete.
TEMPORARY = ".tmp"
_WRITE_BYTES = 1 << 20
_MANY_FILES = 1 << 18
#: how many segments are kept open
_OPEN_FILES = 512
#: how often the log repeats that the disk refuses.
_TELL_SECONDS = 30.0
_NOT_REGULAR = "not a regular file"


class Retired:
    """Files that are unlinked, for a thread to close: that frees their blocks, which takes time."""

    def __init__(self) -> None:
        # its put may be called by any destructor
        self._fds: SimpleQueue[int] = SimpleQueue()

    def __bool__(self) -> bool:
        return not self._fds.empty()

    def put(self, fd: int) -> None:
        self._fds.put(fd)

    def close(self) -> None:
        """Close all that nobody uses any more. Blocks."""
        with contextlib.suppress(Empty):
            while True:
                os.close(self._fds.get_nowait())

    def __del__(self) -> None:
        self.close()


class NotRegular(OSError):
    """In the place of a file of ours is a link, a pipe, a folder or something else."""


class FileHandle:
    """An open file that closes when its last user lets go of it.

    Readers hold the handle, not the path: a file that is unlinked or replaced
    while they read stays readable to them. ``retired``: who closes it instead.
    Links are not followed, since what they name is not ours to write to or to cut, and
    pipes are not waited for: both raise NotRegular.
    """

    __slots__ = ("fd", "path", "retired")

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = -1
        self.path = path
        self.retired: Retired | None = None
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self.fd = os.open(path, flags, FILE_MODE)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise NotRegular(error.errno, _NOT_REGULAR, str(path)) from error
            raise
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            raise NotRegular(errno.EINVAL, _NOT_REGULAR, str(path))

    @classmethod
    def missing(cls, path: Path) -> FileHandle:
        """A handle for a file that is not there: every read of it fails."""
        handle = cls.__new__(cls)
        handle.fd = -1
        handle.path = path
        handle.retired = None
        return handle

    def __del__(self) -> None:
        if self.fd < 0:
            return
        if self.retired is None:
            os.close(self.fd)
        else:
            self.retired.put(self.fd)

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def mapped(self) -> memoryview:
        """The whole content, read only, without a copy in this process's own memory."""
        if self.size() == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ))


class OpenFiles:
    """The files that were used last, open; the others are opened again when they are needed.

    A reader that holds a handle keeps it open, whatever is forgotten here. Thread-safe.
    """

    def __init__(self, limit: int = _OPEN_FILES) -> None:
        self._limit = limit
        self._handles: OrderedDict[Path, FileHandle] = OrderedDict()
        self._lock = threading.Lock()
        self.retired = Retired()

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: FileHandle) -> FileHandle:
        """Keep a handle for later; perhaps forget another one."""
        with self._lock:
            self._handles[handle.path] = handle
            forgotten = [] if len(self._handles) <= self._limit else [self._handles.popitem(False)]
        del forgotten
        return handle

    def get(self, path: Path) -> FileHandle:
        """The file, open to read and write; a missing one as such, and a link. Raises OSError."""
        with self._lock:
            handle = self._handles.get(path)
            if handle is not None:
                self._handles.move_to_end(path)
                return handle
        try:
            return self.add(FileHandle(path, os.O_RDWR))
        except (FileNotFoundError, NotRegular):
            return FileHandle.missing(path)

    def forget(self, path: Path) -> None:
        """The file is about to go."""
        with self._lock:
            handle = self._handles.pop(path, None)
        del handle


class Refusals:
    """What the disk refuses, in the log: each kind of it at most once in a while.

    Clients are told each time; who runs the server reads only the log.
    """

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def tell(self, what: str, error: OSError) -> None:
        """Say it, unless it was said a moment ago. Any thread."""
        now = time.monotonic()
        if now >= self._next.get(what, 0.0):
            self._next[what] = now + _TELL_SECONDS
            log.error("the disk refuses, %s: %s", what, error.strerror or error)


refusals = Refusals()


def not_rewritten(what: str, error: Exception) -> CommandError:
    """What a client is told when files could not be written anew, and the former ones stand."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    advice = "; what was stored stays as it was: make room on the disk, then try again"
    return CommandError(f"{what} failed: {reason}{advice if full else ''}")


def pwrite_all(fd: int, data: memoryview | bytes | bytearray, offset: int) -> None:
    """Write every byte of ``data`` at ``offset``; raises OSError when it cannot."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def pwritev_all(fd: int, pieces: Sequence[memoryview | bytes], offset: int) -> None:
    """Write every byte of the pieces, one behind the other; raises OSError when it cannot."""
    written = os.pwritev(fd, pieces, offset)
    for piece in pieces:
        if written < len(piece):
            pwrite_all(fd, memoryview(piece)[max(0, written) :], offset + max(0, written))
        offset += len(piece)
        written -= len(piece)


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


def raise_file_limit() -> None:
    """Allow as many open files as the system lets us: segments and connections are some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    # macOS refuses more than kern.maxfilesperproc, whatever the hard limit says
    for limit in (wanted, 61_440, 24_576, 10_240):
        if soft < limit <= wanted:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return


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


def is_foreign(path: Path) -> bool:
    """Whether something is there that is not a regular file: a link, a pipe, a folder."""
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def unlink_file(path: Path) -> bool:
    """Remove a file or link; whether it is gone. A folder in its place is not ours, and stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # macOS says EPERM of a folder
        if not path.is_dir():
            raise
        return False
    return True


def aside_name(path: Path) -> Path:
    """A name that is free for what is set aside of ``path``."""
    name = f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(aside for one in names if not os.path.lexists(aside := path.with_name(one)))


def set_aside(path: Path, keep: bool) -> Path:
    """Move a damaged file, or a copy where ``keep``, out of the way; where it is now."""
    aside = aside_name(path)
    if keep:
        shutil.copyfile(path, aside)
        aside.chmod(FILE_MODE)
    else:
        os.replace(path, aside)
    return aside


def set_aside_until_replaced(path: Path) -> Path:
    """Give a damaged file that is only ever replaced a second name; the other one.

    It stays where it is until what is kept of it takes its place: who is killed in between
    finds it again.
    """
    aside = aside_name(path)
    try:
        os.link(path, aside)
    except OSError:  # of file systems without links
        return set_aside(path, keep=True)
    return aside


def _gathered(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | bytearray]:
    """The same bytes in fewer pieces."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        if len(buffer) >= _WRITE_BYTES:
            yield buffer
            buffer = bytearray()
    yield buffer


def publish(
    path: Path, chunks: Iterable[bytes | memoryview], temporary: Path | None = None
) -> FileHandle:
    """Replace ``path`` by a new durable file: temporary file, flush, rename, flush.

    Returns the new file, open. Raises OSError; unless only the last flush failed,
    what was at ``path`` stands, and no temporary file is left.
    """
    temporary = temporary or path.with_name(path.name + TEMPORARY)
    published = False
    try:
        handle = FileHandle(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        offset = 0
        for chunk in _gathered(chunks):
            pwrite_all(handle.fd, chunk, offset)
            offset += len(chunk)
        flush(handle.fd)
        os.replace(temporary, path)
        published = True
    finally:
        if not published:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    handle.path = path
    flush_directory(path.parent)
    return handle
