"""Where the bytes of long arguments go while they arrive.

An argument of at most one window stays in memory until its command has used it.
A longer one is consumed window by window on a thread: one window fills while the
one before it is written. Windows come from one pool with a budget over all
connections; when it is spent, reading pauses.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.files import pread_into, pwrite_all
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES
from pion_vllm_mlx.server.store.space import disk_error
from pion_vllm_mlx.server.upload_room import UploadRoom
from pion_vllm_mlx.server.waiting_line import WaitingLine
from pion_vllm_mlx.wire.resp import BulkTarget, DiscardBulk

#: bytes of windows that all connections together may hold.
IN_FLIGHT_BYTES = 64 << 20
#: bytes that a thread receives before others have a turn.
TURN_BYTES = 16 << 20
#: from here on memory is used again: fresh memory costs as much as what is received into it.
KEPT_WINDOW_BYTES = 128 << 10


class WindowPool:
    """Hands out windows up to a budget, and tells those who wait when there is room."""

    def __init__(self, budget: int = IN_FLIGHT_BYTES) -> None:
        self.budget = budget
        self.held = 0
        self._free: list[mmap.mmap] = []
        self.line = WaitingLine(lambda: self.held < self.budget)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits."""
        return len(self.line) > 0

    def take(self, length: int, when_room: Callable[[], None]) -> memoryview | None:
        """A window of ``length`` bytes, at most one window long; None when there is no room.

        ``when_room`` is then called once, from the event loop, when there may be.
        """
        if self.held + length > self.budget:
            self.line.join(when_room)
            return None
        self.held += length
        if length >= KEPT_WINDOW_BYTES:
            buffer = self._free.pop() if self._free else _aligned_memory(WINDOW_BYTES)
            return memoryview(buffer)[:length]
        return memoryview(bytearray(length))

    def shorten(self, window: memoryview, length: int) -> memoryview:
        """The first ``length`` bytes of a window, in its place; the rest is no longer held."""
        self.held -= len(window) - length
        return window[:length]

    def give_back(self, window: memoryview) -> None:
        """Return a window; nothing may use it any more."""
        self.held -= len(window)
        buffer = window.obj
        if isinstance(buffer, mmap.mmap) and len(self._free) < self.budget // WINDOW_BYTES:
            self._free.append(buffer)
        self.line.wake()


def _aligned_memory(length: int) -> mmap.mmap:
    """Fresh memory that starts at a page: copies out of a socket are slow to odd places."""
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class MemoryInbound:
    """An argument of at most one window, in memory."""

    def __init__(self, length: int, pool: WindowPool, when_room: Callable[[], None]) -> None:
        self.length = length
        self._pool = pool
        self._when_room = when_room
        self._window: memoryview | None = None
        self._filled = 0

    @property
    def view(self) -> memoryview:
        """All bytes; valid until ``release``."""
        assert self._window is not None
        return self._window

    def buffer(self) -> memoryview | None:
        if self._window is None:
            self._window = self._pool.take(self.length, self._when_room)
        return None if self._window is None else self._window[self._filled :]

    def advance(self, n: int) -> None:
        self._filled += n

    def release(self) -> None:
        if self._window is None:
            # its connection is gone, nobody waits any more
            self._pool.line.leave(self._when_room)
        else:
            self._pool.give_back(self._window)
            self._window = None


class StreamInbound:
    """A long argument that ``consume`` takes window by window, in order, on a thread.

    ``unit`` bytes are never cut by a window's end. When ``consume`` fails, the rest is
    read and forgotten, and ``wait`` raises what it raised.
    """

    def __init__(
        self,
        length: int,
        unit: int,
        consume: Callable[[memoryview], None],
        executor: Executor,
        pool: WindowPool,
        when_room: Callable[[], None],
    ) -> None:
        self.length = length
        self._window_bytes = _even_windows(length, unit)
        self._consume = consume
        self._executor = executor
        self._pool = pool
        self._when_room = when_room
        self._window: memoryview | None = None
        self._filled = 0
        self._received = 0
        self._writing: memoryview | None = None
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._released = False
        self._error: BaseException | None = None
        self.abandon: Callable[[], None] = _nothing
        self.room: UploadRoom | None = None

    def buffer(self) -> memoryview | None:
        if self._window is None:
            size = min(self._window_bytes, self.length - self._received)
            if self.room is not None and not self.room.ready(size):
                return None
            self._window = self._pool.take(size, self._when_room)
            self._filled = 0
        if self._window is None or self._filled == len(self._window):
            return None
        return self._window[self._filled :]

    def advance(self, n: int) -> None:
        assert self._window is not None
        self._filled += n
        self._received += n
        if self._filled == len(self._window) and self._writing is None:
            self._start()

    def _start(self) -> None:
        """Hand the full window to a thread."""
        window, self._window = self._window, None
        assert window is not None
        self._writing = window
        job = self._loop.run_in_executor(self._executor, self._work, window)
        job.add_done_callback(self._finished)

    def _work(self, window: memoryview) -> None:
        if self._error is not None or (self.room is not None and self.room.error is not None):
            return
        try:
            self._consume(window)
        except OSError as error:
            self._error = disk_error(error)
        except CommandError as error:
            self._error = error

    def _finished(self, job: asyncio.Future[None]) -> None:
        assert self._writing is not None
        self._error = self._error or job.exception()
        self._pool.give_back(self._writing)
        self._writing = None
        if self._released:
            self._clean_up()
        elif self._window is not None and self._filled == len(self._window):
            self._start()
        elif self._received == self.length and self._window is None:
            self._done.set()
        self._when_room()

    def receive(self, fill: Callable[[memoryview], int], told: Callable[[int], None]) -> bool:
        """Let a thread receive the next bytes, and consume them; whether it does.

        ``fill`` fills a window, or says how much it got when no more come. ``told`` is called
        on the event loop with how many bytes came; until then nobody may ask for a buffer.
        That is before the last of all bytes are consumed, which ``wait`` waits for.
        """
        if self._writing is not None or self.buffer() is None:
            return False
        window, self._window = self._window, None
        assert window is not None
        begun = self._received
        turn = min(self.length - begun, TURN_BYTES)
        if self.room is not None and not self.room.roomy(turn):
            turn = 1  # no more than this window, for which there is room
        self._writing = window

        def tell() -> None:
            told(self._received - begun)

        job = self._loop.run_in_executor(self._executor, self._receive, fill, window, turn, tell)
        job.add_done_callback(partial(self._came, tell))
        return True

    def _receive(
        self,
        fill: Callable[[memoryview], int],
        window: memoryview,
        turn: int,
        tell: Callable[[], None],
    ) -> None:
        """Receive whole windows, until ``turn`` bytes have come. On a thread."""
        while turn > 0:
            end = min(len(window), self._filled + self.length - self._received)
            count = fill(window[self._filled : end])
            self._received += count
            self._filled += count
            if self._filled < end:
                return
            if self._received == self.length:
                # the next command is received while the end of this one is written
                self._loop.call_soon_threadsafe(tell)
                turn = 0
            turn -= count
            self._filled = 0
            self._work(window[:end])

    def _came(self, tell: Callable[[], None], job: asyncio.Future[None]) -> None:
        window, self._writing = self._writing, None
        assert window is not None
        self._error = self._error or job.exception()
        if self._released or not self._filled:
            self._pool.give_back(window)
        else:
            rest = self.length - self._received
            self._window = self._pool.shorten(window, min(len(window), self._filled + rest))
        if self._released:
            self._clean_up()
        elif self._received == self.length:
            self._done.set()
        if self._received < self.length:
            tell()

    async def wait(self) -> None:
        """Until every byte was consumed; raises CommandError when consuming failed."""
        await self._done.wait()
        if self._error is None and self.room is not None:
            self._error = self.room.error
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Forget a half received argument, or clean up after a used one."""
        self._released = True
        self._error = self._error or CommandError("the connection was closed")
        if self._writing is None:
            self._clean_up()

    def _clean_up(self) -> None:
        if self._window is not None:
            self._pool.give_back(self._window)
            self._window = None
        self.abandon()
        # no cycle through these may keep a file open
        self.abandon, self._consume, self._error = _nothing, _ignore, None


def _even_windows(length: int, unit: int) -> int:
    """Bytes of a window, a multiple of ``unit``: no short last one where that can be helped."""
    most = max(unit, WINDOW_BYTES - WINDOW_BYTES % unit)
    even = -(-length // -(-length // most))
    step = max(unit, mmap.PAGESIZE)
    step -= step % unit
    return min(most, -(-even // step) * step)


def _nothing() -> None:
    pass


def _ignore(window: memoryview) -> None:
    pass


class RefusedBulk(DiscardBulk):
    """A long argument that has no place: read and forgotten, its command is refused."""

    def __init__(self, length: int, reason: CommandError) -> None:
        super().__init__(length)
        self.reason = reason


class DeferredBulk:
    """A long argument behind commands that have not run yet.

    They may create the session it belongs to, or authenticate: reading waits for
    them. ``open_now`` gives the argument its place, or None while it has to wait.
    """

    def __init__(self, length: int, open_now: Callable[[], BulkTarget | None]) -> None:
        self.length = length
        self._open_now = open_now
        self.target: BulkTarget | None = None

    def buffer(self) -> memoryview | None:
        if self.target is None:
            self.target = self._open_now()
        return None if self.target is None else self.target.buffer()

    def advance(self, n: int) -> None:
        assert self.target is not None
        self.target.advance(n)


class Spool:
    """A nameless temporary file for a long argument that is not stored as it came."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, prefix="spool-")
        self.length = 0

    def write(self, window: memoryview) -> None:
        """Append; raises OSError."""
        pwrite_all(self._file.fileno(), window, self.length)
        self.length += len(window)

    def read(self, offset: int, length: int) -> memoryview:
        """Bytes from ``offset``; raises OSError."""
        data = memoryview(bytearray(length))
        pread_into(self._file.fileno(), data, offset)
        return data

    def close(self) -> None:
        self._file.close()
