"""The client's side of the binary lane: one request in flight, each within a deadline."""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable
from functools import partial

from pion_vllm_mlx.errors import (
    DeadlineExceeded,
    ProtocolError,
    ServerRefused,
    StoreUnavailable,
)
from pion_vllm_mlx.wire import frames
from pion_vllm_mlx.wire.frames import FrameParser, Status
from pion_vllm_mlx.wire.loopback import is_loopback, unpaced
from pion_vllm_mlx.wire.requests import MemoryBulk

LAYER_STORE, LAYER_FETCH, PING = 0x10, 0x11, 0xFF
#: the longest session id, and the highest layer: two bytes each.
_MOST = 0xFFFF


class FrameConnection:
    """Opens when used; after any failure the next call opens a new one. Not thread-safe."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        #: after how long without a byte ``on_silence`` is called, which raises to give up
        self.silence_seconds = math.inf
        self.on_silence: Callable[[], None] | None = None
        self._socket: socket.socket | None = None
        self._parser = FrameParser()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def layer_store(self, session: bytes, layer: int, blob: memoryview) -> None:
        """Raises ServerRefused, StoreUnavailable."""
        self.call(LAYER_STORE, _layer(session, layer), blob)

    def layer_fetch(self, session: bytes, layer: int) -> bytes | None:
        """A layer's bytes, None when it is not there. Raises as ``layer_store``."""
        return self.call(LAYER_FETCH, _layer(session, layer))

    def call(self, opcode: int, head: bytes = b"", blob: memoryview | None = None) -> bytes | None:
        """The body of an OK reply, None for a miss."""
        status, body = self.exchange(opcode, head, blob)
        if status == Status.ERROR:
            raise ServerRefused(body.decode("utf-8", "replace"))
        return body if status == Status.OK else None

    def exchange(
        self, opcode: int, head: bytes = b"", blob: memoryview | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the reply. Raises StoreUnavailable."""
        ends_at = time.monotonic() + self.timeout
        finished = False
        try:
            reply = self._exchange(opcode, head, blob or memoryview(b""), ends_at)
            finished = True
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.host}:{self.port}: no reply in time") from error
        except (OSError, ProtocolError) as error:
            raise StoreUnavailable(f"{self.host}:{self.port}: {error}") from error
        finally:
            if not finished:
                self.close()
        return reply

    def _exchange(
        self, opcode: int, head: bytes, blob: memoryview, ends_at: float
    ) -> tuple[int, bytes]:
        sock = self._open(ends_at)
        for part in (frames.header(opcode, len(head) + blob.nbytes) + head, blob.cast("B")):
            left = memoryview(part)
            while left.nbytes:
                left = left[self._moved(partial(sock.send, left), sock, ends_at) :]
        while (reply := self._parser.next_frame()) is None:
            window = self._parser.get_buffer()
            assert window is not None
            received = self._moved(partial(sock.recv_into, window), sock, ends_at)
            if received == 0:
                raise ConnectionError("closed the connection")
            self._parser.buffer_updated(received)
        body = reply.body
        if isinstance(body, bytes):
            return reply.code, body
        assert isinstance(body, MemoryBulk)
        return reply.code, body.view.tobytes()

    def _moved(self, step: Callable[[], int], sock: socket.socket, ends_at: float) -> int:
        """How many bytes ``step`` moved. Raises TimeoutError, and what ``on_silence`` raises."""
        while True:
            left = max(ends_at - time.monotonic(), 1e-3)
            sock.settimeout(min(left, self.silence_seconds))
            try:
                return step()
            except TimeoutError:
                if self.on_silence is None or left <= self.silence_seconds:
                    raise
            self.on_silence()

    def _open(self, ends_at: float) -> socket.socket:
        left = max(ends_at - time.monotonic(), 1e-3)
        if self._socket is None:
            self._parser = FrameParser()
            self._socket = socket.create_connection((self.host, self.port), timeout=left)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_loopback(self._socket.getpeername()[0]):
                unpaced(self._socket)
        self._socket.settimeout(left)
        return self._socket


def _layer(session: bytes, layer: int) -> bytes:
    """What names a layer in a frame. Raises ServerRefused for what no server could be asked."""
    if not 0 <= layer <= _MOST:
        raise ServerRefused(f"a layer is a number of 0 to {_MOST}, not {layer}")
    if len(session) > _MOST:
        raise ServerRefused(f"a session id has up to {_MOST} bytes, not {len(session)}")
    return struct.pack("<H", len(session)) + session + struct.pack("<H", layer)
