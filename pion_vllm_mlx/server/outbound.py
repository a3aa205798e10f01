"""Replies too large to build: file ranges and rows converted on the way.

A ``Stream`` is sent by threads straight to the connection's socket: file ranges
with ``sendfile``, so that stored rows never enter this process. A thread never
waits long for a slow reader; it gives the work back to the event loop, which sends
what lies in memory anyway by itself, step by step.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.files import FileHandle, pread_exactly
from pion_vllm_mlx.server.store.index import Place, place_file

#: file ranges shorter than this are read and sent together with their neighbours.
GATHER_BYTES = 64 << 10
#: pieces that are held in memory, where a transport has to see every byte.
WINDOW_BYTES = 256 << 10
#: how long a thread waits for a reader before it gives the work back.
PATIENCE_MS = 20
#: bytes after which a thread lets others have a turn.
TURN_BYTES = 16 << 20
#: bytes in memory that the event loop sends itself before others have a turn.
STEP_BYTES = 4 << 20
MAX_REPLY_BYTES = 1 << 30
#: more follows at once.
_MORE = socket.MSG_MORE if sys.platform == "linux" else 0
#: pieces that one system call is given.
_MOST_VIEWS = 64


class FileRange(NamedTuple):
    """``length`` bytes of an open file."""

    file: FileHandle
    offset: int
    length: int


class Computed(NamedTuple):
    """``length`` bytes that are made window by window on the sending thread, or lie in files."""

    length: int
    windows: Callable[[], Iterator[memoryview | bytes | FileRange]]


Chunk: TypeAlias = bytes | FileRange | Computed
Window: TypeAlias = bytes | memoryview


@dataclass
class Stream:
    """A reply in pieces. ``payload_bytes`` counts what bulk strings carry.

    ``ready``: all of it lies in memory, nothing has to be read or computed.
    """

    chunks: list[Chunk] = field(default_factory=list)
    payload_bytes: int = 0
    ready: bool = False

    def bulk(self, parts: list[Chunk]) -> None:
        """Append one bulk string made of ``parts``."""
        length = sum(chunk_length(part) for part in parts)
        self.chunks.append(b"$%d\r\n" % length)
        self.chunks += parts
        self.chunks.append(b"\r\n")
        self.payload_bytes += length


def chunk_length(chunk: Chunk) -> int:
    """Bytes a chunk puts on the wire."""
    return len(chunk) if isinstance(chunk, bytes) else chunk.length


def in_memory(pieces: Sequence[memoryview | bytes]) -> Computed:
    """Pieces that lie in memory, sent from where they are; they must not change."""
    return Computed(sum(len(piece) for piece in pieces), lambda: iter(pieces))


def made_on_the_way(windows: Iterator[bytes]) -> Stream:
    """A reply whose pieces are made, from what lies in memory, as its reader takes them.

    It is no part of a bulk string: nobody asks for its length.
    """
    return Stream([Computed(0, lambda: windows)], ready=True)


def bulk_in_memory(pieces: Sequence[memoryview | bytes]) -> bytes | Stream:
    """One bulk string of pieces, bytes each: joined when short, else a stream.

    Raises CommandError where it is longer than a reply may be.
    """
    length = sum(len(piece) for piece in pieces)
    if length > MAX_REPLY_BYTES:
        raise CommandError(f"a reply of {length} bytes is too long")
    if length <= GATHER_BYTES:
        return b"".join(pieces)
    stream = Stream(ready=True)
    stream.bulk([in_memory(pieces)])
    stream.payload_bytes = 0
    return stream


def file_range(place: Place, offset: int, length: int) -> FileRange:
    """A range counted from a place's first byte."""
    return FileRange(place_file(place), place.offset + offset, length)


class ReaderGone(Exception):
    """The other side closed the connection while it was being sent to."""


class Sender:
    """Sends one stream over a non-blocking socket, in turns on a thread.

    What is short leaves together with what follows it in memory: a reader that is woken
    by a header alone would go back to sleep.
    """

    def __init__(self, sock: socket.socket, stream: Stream) -> None:
        self._sock = sock
        self._steps = _steps(stream.chunks)
        self.sent = 0
        self._views: list[memoryview] = []
        self._range: FileRange | None = None

    def step(self) -> bool:
        """Send what leaves at once of a stream in memory, not too much; whether that was all.

        Raises ReaderGone.
        """
        if not self._load():
            return True
        try:
            sent = self._sock.sendmsg(_until(self._views, STEP_BYTES))
        except BlockingIOError:
            return False
        except (ConnectionError, TimeoutError) as error:
            raise ReaderGone(str(error)) from error
        self._views = _behind(self._views, sent)
        self.sent += sent
        return not self._load()

    def turn(self) -> bool:
        """Send until done (True), or until the reader keeps us waiting or others should go on.

        Raises ReaderGone, or OSError when a file cannot be read.
        """
        left = TURN_BYTES
        while left > 0:
            if not self._load():
                return True
            try:
                sent = self._send()
                left -= sent
                self.sent += sent
            except BlockingIOError:
                if not _writable(self._sock):
                    return False
            except (ConnectionError, TimeoutError) as error:
                raise ReaderGone(str(error)) from error
        return False

    def _load(self) -> bool:
        """Have enough to send at once; False when nothing is left."""
        held = sum(len(view) for view in self._views)
        while self._range is None and held < GATHER_BYTES and len(self._views) < _MOST_VIEWS:
            step = next(self._steps, None)
            if step is None:
                break
            if isinstance(step, FileRange):
                self._range = step
            elif view := memoryview(step).cast("B"):
                self._views.append(view)
                held += len(view)
        return bool(self._views) or self._range is not None

    def _send(self) -> int:
        if self._views:
            sent = self._sock.sendmsg(self._views, (), self._flags)
            self._views = _behind(self._views, sent)
            return sent
        assert self._range is not None
        file, offset, length = self._range
        sent = self._sendfile(file.fd, offset, length)
        rest = FileRange(file, offset + sent, length - sent)
        self._range = rest if rest.length else None
        return sent

    @property
    def _flags(self) -> int:
        """What is short waits for the file range behind it: a header alone wakes a reader."""
        return _MORE if self._range is not None else 0

    def _sendfile(self, fd: int, offset: int, length: int) -> int:
        if sys.platform == "darwin" and self._sock.family == socket.AF_UNIX:
            return self._copy(fd, offset, length)
        try:
            sent = os.sendfile(self._sock.fileno(), fd, offset, length)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                return self._copy(fd, offset, length)
            raise
        if sent == 0:
            raise OSError("a stored file is shorter than its index says")
        return sent

    def _copy(self, fd: int, offset: int, length: int) -> int:
        return self._sock.send(pread_exactly(fd, min(length, 1 << 20), offset))


def windows(stream: Stream) -> Iterator[Window]:
    """The bytes of a stream, in pieces that are short enough to be held. Reads the disk."""
    for step in _steps(stream.chunks):
        if isinstance(step, FileRange):
            file, offset, length = step
            for at in range(0, length, WINDOW_BYTES):
                yield pread_exactly(file.fd, min(WINDOW_BYTES, length - at), offset + at)
            continue
        view = memoryview(step).cast("B")
        for at in range(0, len(view), WINDOW_BYTES):
            yield view[at : at + WINDOW_BYTES]


def _until(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The views' first bytes, so many at most."""
    first = []
    for view in views:
        first.append(view[:nbytes])
        nbytes -= len(first[-1])
    return first


def _behind(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the views behind their first bytes."""
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return []


def _writable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(PATIENCE_MS))


def _steps(chunks: list[Chunk]) -> Iterator[memoryview | bytes | FileRange]:
    """The stream as sends: long file ranges as they are, everything short gathered."""
    gathered = bytearray()
    for chunk in chunks:
        if isinstance(chunk, Computed):
            if gathered:
                yield bytes(gathered)
                gathered.clear()
            yield from chunk.windows()
            continue
        if isinstance(chunk, FileRange) and chunk.length >= GATHER_BYTES:
            if gathered:
                yield bytes(gathered)
                gathered.clear()
            yield chunk
            continue
        if isinstance(chunk, FileRange):
            gathered += pread_exactly(chunk.file.fd, chunk.length, chunk.offset)
        else:
            gathered += chunk
        if len(gathered) >= 4 * GATHER_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)
