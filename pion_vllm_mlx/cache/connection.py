"""The client's connection: blocking calls, each within a deadline.

Whatever the other side does (absent, slow, silent in the middle of a reply, speaking
something else), a call ends by its deadline with ``StoreUnavailable`` or its subclass
``DeadlineExceeded``. After a failure the connection is closed, and the next call
opens a new one. Nothing is retried: a command whose reply got lost may have run.
Only the look-up of a host name is outside of the deadline.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache.channel import Address, Buffer, Channel, Sink, writable
from pion_vllm_mlx.errors import (
    CommandError,
    DeadlineExceeded,
    ProtocolError,
    StoreUnavailable,
    WorkerDown,
)
from pion_vllm_mlx.wire.resp import INLINE_BULK_BYTES, Part, Reply, allocate, request_buffers

__all__ = ["Address", "Buffer", "RespConnection"]


@dataclass
class _State:
    """What belongs to one process: a fork gets a state of its own."""

    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    channel: Channel | None = None

    def close(self) -> None:
        """Close the socket, if one is open."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()


class RespConnection:
    """A connection that opens when used, and may be shared by threads.

    ``deadline_seconds`` holds for a whole call, from waiting for another thread's
    call to the last byte of the reply, whatever its size; within it, a server that
    moves no byte for ``silence_seconds`` is given up; with ``on_silence``, which is then
    called, where that raises. Every call raises
    StoreUnavailable, DeadlineExceeded, or TypeError for an argument that cannot be
    sent; a wrong password raises the server's refusal.
    """

    def __init__(
        self,
        address: Address,
        *,
        deadline_seconds: float = 2.0,
        password: str | None = None,
        username: str | None = None,
        silence_seconds: float = math.inf,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.deadline_seconds = deadline_seconds
        self.silence_seconds = silence_seconds
        self._on_silence = on_silence
        self._login = [part for part in ("AUTH", username, password) if part is not None]
        self._state = _State()
        self._local = threading.local()
        _CONNECTIONS.add(self)

    def __enter__(self) -> RespConnection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; the next call opens a new one."""
        state = self._own_state()
        with state.lock:
            state.close()

    def reopen(self) -> None:
        """The next call opens a new socket; one that is under way keeps its own."""
        state = self._own_state()
        if state.lock.acquire(blocking=False):
            try:
                state.close()
            finally:
                state.lock.release()

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """All calls of this thread inside the block end within ``seconds`` together.

        Replaces ``deadline_seconds``, in either direction; an outer block's end stays.
        """
        outer: float | None = self._block_end()
        end = time.monotonic() + seconds
        self._local.ends_at = end if outer is None else min(outer, end)
        try:
            yield
        finally:
            self._local.ends_at = outer

    def command(self, *parts: Part, deadline_seconds: float | None = None) -> Reply:
        """The parsed reply of one command; bulk strings are ``bytes`` at any size.

        Raises the server's refusal as the class that ``errors`` has for its code.
        """
        return _unless_error(self.pipeline([parts], deadline_seconds=deadline_seconds)[0])

    def pipeline(
        self, commands: Sequence[Sequence[Part]], *, deadline_seconds: float | None = None
    ) -> list[Reply]:
        """The replies of several commands sent at once; refusals are returned."""
        replies = self._run(commands, self._ends_at(deadline_seconds))
        return [_plain(reply) for reply in replies]

    def call(self, *parts: Part, deadline_seconds: float | None = None) -> bytes:
        """The raw bytes of one reply, type byte and line ends included, errors too."""
        ends_at = self._ends_at(deadline_seconds)
        raw: list[bytes] = []
        self._run([parts], ends_at, raw=raw)
        return raw[0]

    def call_array(self, *parts: Part, deadline_seconds: float | None = None) -> list[bytes | None]:
        """The items of an array reply as bytes, nil as None; another reply as one item."""
        reply = self.command(*parts, deadline_seconds=deadline_seconds)
        return [_item_bytes(item) for item in _items(reply)]

    def fetch_into(
        self,
        parts: Sequence[Part],
        buffers: Sequence[Buffer] | None = None,
        *,
        deadline_seconds: float | None = None,
    ) -> list[NDArray[np.uint8] | None]:
        """Receive a bulk string, or an array of them, straight into ``buffers``.

        Item i goes into ``buffers[i]``, which must have its exact size in bytes and
        be C-contiguous; without ``buffers`` memory is allocated. Returns each item's
        bytes as uint8, shared with its buffer; None for nil. Raises the server's
        refusal; after any error the contents of the buffers are undefined.
        """
        sink = Sink(None if buffers is None else [writable(buffer) for buffer in buffers])
        replies = self._run([parts], self._ends_at(deadline_seconds), sink=sink)
        items = [self._item_array(item) for item in _items(_unless_error(replies[0]))]
        if not sink.fits(items):
            raise StoreUnavailable(f"{self.address}: answered other sizes than expected")
        return items

    # -- inside ---------------------------------------------------------------

    def _item_array(self, item: Reply) -> NDArray[np.uint8] | None:
        if item is None:
            return None
        if not isinstance(item, (bytes, memoryview)):
            raise StoreUnavailable(f"{self.address}: answered something else than rows")
        return np.frombuffer(item, np.uint8)

    def _block_end(self) -> float | None:
        return self._local.__dict__.get("ends_at")

    def _ends_at(self, deadline_seconds: float | None) -> float:
        """When a call that starts now has to be over."""
        block_end = self._block_end()
        if deadline_seconds is None:
            if block_end is not None:
                return block_end
            deadline_seconds = self.deadline_seconds
        end = time.monotonic() + deadline_seconds
        return end if block_end is None else min(end, block_end)

    def _own_state(self) -> _State:
        """This process's state: a forked child never uses its parent's socket or lock."""
        state = self._state
        if state.pid != os.getpid():
            state.close()
            state = self._state = _State()
        return state

    def _run(
        self,
        commands: Sequence[Sequence[Part]],
        ends_at: float,
        *,
        sink: Sink | None = None,
        raw: list[bytes] | None = None,
    ) -> list[Reply]:
        """Send the commands and return their replies; with ``raw``, their bytes go there."""
        out = deque(request_buffers(commands))
        state = self._own_state()
        if not state.lock.acquire(timeout=max(0.0, ends_at - time.monotonic())):
            raise DeadlineExceeded(f"{self.address}: another call took the whole time")
        finished = False
        try:
            channel = self._open(state, ends_at)
            parser = channel.parser
            if sink is not None:
                sink.parser = parser
                parser.receive_into(sink.open, 0)
            parser.keep_raw(raw is not None)
            replies = channel.exchange(out, len(commands), ends_at)
            if replies and isinstance(replies[0], WorkerDown):
                raise replies[0]
            if raw is not None:
                raw.append(parser.take_raw())
            parser.keep_raw(False)
            parser.receive_into(allocate, INLINE_BULK_BYTES)
            finished = not out
            return replies
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.address}: no connection in time") from error
        except (OSError, UnicodeError, ProtocolError, MemoryError, WorkerDown) as error:
            raise StoreUnavailable(f"{self.address}: {error}") from error
        finally:
            if not finished:
                state.close()
            state.lock.release()

    def _open(self, state: _State, ends_at: float) -> Channel:
        """The open channel, or a new one that has logged in."""
        if state.channel is not None and state.channel.is_stale():
            state.close()
        if state.channel is None:
            state.channel = Channel(
                self.address, ends_at, self.silence_seconds, self._on_silence
            )
            if len(self._login) > 1:
                out = deque(request_buffers([self._login]))
                _unless_error(state.channel.exchange(out, 1, ends_at)[0])
        return state.channel


_CONNECTIONS: weakref.WeakSet[RespConnection] = weakref.WeakSet()


def _after_fork() -> None:
    """An idle child must not hold connections: an embedded server counts them."""
    for connection in _CONNECTIONS:
        connection._own_state()


os.register_at_fork(after_in_child=_after_fork)


def info_fields(reply: Reply) -> dict[str, str]:
    """The fields of an INFO reply; none of anything else."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, separator, value in pairs if separator}


def _plain(reply: Reply) -> Reply:
    """The reply with ``bytes`` in place of long bulk strings' memory."""
    if isinstance(reply, memoryview):
        return reply.tobytes()
    if type(reply) is list:
        return [_plain(item) for item in _items(reply)]
    return reply


def _items(reply: Reply) -> list[Reply]:
    """The items of an array, or the reply as the only one."""
    return cast("list[Reply]", reply) if type(reply) is list else [reply]


def _unless_error(reply: Reply) -> Reply:
    if isinstance(reply, CommandError):
        raise reply
    return reply


def _item_bytes(item: Reply) -> bytes | None:
    if item is None or isinstance(item, bytes):
        return item
    if isinstance(item, memoryview):
        return item.tobytes()
    if isinstance(item, CommandError):
        raise item
    return str(item).encode()
