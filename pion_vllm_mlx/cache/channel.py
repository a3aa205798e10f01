"""One open socket: bytes out, replies in, all before a point in time.

Knows no command and no thread. :class:`~.connection.RespConnection` opens channels,
guards them, and closes them after any failure.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache.tls import TlsSocket, secured
from pion_vllm_mlx.config import ClientTls
from pion_vllm_mlx.errors import ConfigError, DeadlineExceeded, ProtocolError, StoreUnavailable
from pion_vllm_mlx.wire.loopback import is_loopback, unpaced
from pion_vllm_mlx.wire.resp import Reply, ReplyParser

_ALIGNMENT = 64
_UNIX_SEND_BUFFER_BYTES = 1 << 20
#: of a long reply so much has to be there before we are woken: to wait, and to be woken, for
#: every piece that comes takes longer than copying it.
_STEP_BYTES = 256 << 10

Buffer: TypeAlias = NDArray[Any] | memoryview | bytearray


@dataclass(frozen=True)
class Address:
    """Where a server listens: a Unix socket if ``path`` is given, else host and port.

    With ``tls`` nothing is sent to the port but what TLS protects.
    """

    host: str = "127.0.0.1"
    port: int = 1974
    path: str | None = None
    tls: ClientTls | None = None

    def __post_init__(self) -> None:
        if self.path is None and not (isinstance(self.port, int) and 0 < self.port < 65536):
            raise ConfigError(f"{self.port!r} is no port")

    def __str__(self) -> str:
        return self.path if self.path is not None else f"{self.host}:{self.port}"


class Channel:
    """One open socket and what its replies parse into; used under the state's lock.

    A side that neither takes nor sends a byte for ``silence_seconds`` counts as dead,
    however much time a long transfer has left.
    """

    def __init__(
        self,
        address: Address,
        ends_at: float,
        silence_seconds: float,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        """After ``silence_seconds`` ``on_silence`` is asked, which raises to give up."""
        self.address = address
        self._on_silence = on_silence
        self._silence_seconds = silence_seconds
        self.parser = ReplyParser()
        self.sock: socket.socket | TlsSocket
        self.sock, self._tls = self._open(ends_at)
        self._poll = select.poll()
        self._may_send = True
        self._heard = False
        self._step = 1

    def close(self) -> None:
        """Close this process's descriptor; a forked parent keeps its own."""
        self.sock.close()

    def is_stale(self) -> bool:
        """Whether the other side closed, or sent something that nobody asked for."""
        self._poll.register(self.sock, select.POLLIN)
        if not self._poll.poll(0):
            return False
        return self._tls is None or self._tls.spoke()

    def exchange(self, out: deque[memoryview], wanted: int, ends_at: float) -> list[Reply]:
        """Send all of ``out`` and return ``wanted`` replies.

        Reads while sending cannot go on, so that neither side waits for the other
        with full buffers. A reply to a command that is not fully sent, from a server
        that gives up on it, is returned too; ``out`` is not empty then.
        """
        parser = self.parser
        while len(parser.replies) < wanted:
            if time.monotonic() >= ends_at:
                raise DeadlineExceeded(f"{self.address}: no reply before the deadline")
            if out and self._may_send and self._send(out):
                continue
            try:
                n = self.sock.recv_into(parser.get_buffer())
            except BlockingIOError:
                sending = bool(out) and self._may_send
                self._ask_for(1 if sending else max(1, min(_STEP_BYTES, parser.missing)))
                self._wait(ends_at, sending=sending)
                continue
            if n == 0:
                raise StoreUnavailable(f"{self.address}: {self._end()}")
            self._heard = True
            parser.buffer_updated(n)
            parser.pushes.clear()
        self._ask_for(1)
        replies = [parser.replies.popleft() for _ in range(wanted)]
        if not parser.idle:
            raise StoreUnavailable(f"{self.address}: sent more than was asked for")
        return replies

    def _end(self) -> str:
        """What to say of a connection that the other side closed."""
        tls = self.address.tls
        known = tls is not None and tls.cert_file is not None
        if self._heard or known or self.address.path is not None:
            return "closed the connection"
        may_want = "a tls:// URL" if tls is None else "a certificate: PION_TLS_CERT_FILE"
        return f"closed the connection without a word (it may want {may_want})"

    def _send(self, out: deque[memoryview]) -> bool:
        """Send what the socket takes now of the first buffer; False if that is nothing.

        One buffer a call: rows that follow their header in the same call would lie at odd
        places of the kernel's memory, and be copied slower.
        """
        try:
            sent = self.sock.send(out[0])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            # What the server said before it closed may still be there to read.
            self._may_send = False
            return False
        if sent < len(out[0]):
            out[0] = out[0][sent:]
        else:
            out.popleft()
        return True

    def _wait(self, ends_at: float, *, sending: bool) -> None:
        events = select.POLLIN | (select.POLLOUT if sending else 0)
        self._poll.register(self.sock, events)
        left = ends_at - time.monotonic()
        patience = min(left, self._silence_seconds)
        if left > 0 and (self._poll.poll(max(1.0, patience * 1000)) or self._anything()):
            return
        if self._on_silence is None or time.monotonic() >= ends_at:
            raise DeadlineExceeded(f"{self.address}: no reply before the deadline")
        self._on_silence()

    def _ask_for(self, nbytes: int) -> None:
        """From now on count the socket as readable when so much has come, or its end."""
        if nbytes != self._step and isinstance(self.sock, socket.socket):
            self._step = nbytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _anything(self) -> bool:
        """Whether something has come, be it less than was asked for."""
        self._ask_for(1)
        return bool(self._poll.poll(0))

    def _open(self, ends_at: float) -> tuple[socket.socket | TlsSocket, TlsSocket | None]:
        """A socket that does not block, and itself again where it is one of TLS."""
        sock, tls = self._connect(ends_at), self.address.tls
        if tls is None or self.address.path is not None:
            return sock, None
        done = False
        try:
            sock.settimeout(max(ends_at - time.monotonic(), 1e-3))
            wrapped = secured(sock, self.address.host, tls)
            done = True
            return wrapped, wrapped
        finally:
            if not done:
                sock.close()

    def _connect(self, ends_at: float) -> socket.socket:
        if self.address.path is not None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BUFFER_BYTES)
            return _connected(sock, self.address.path, ends_at)
        failure: OSError | None = None
        host, port = self.address.host, self.address.port
        for family, kind, proto, _, where in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, proto)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_loopback(str(where[0])):
                unpaced(sock)
            try:
                return _connected(sock, where, ends_at)
            except OSError as error:
                failure = error
        raise failure or OSError(f"no address for {host}")


def _connected(sock: socket.socket, where: Any, ends_at: float) -> socket.socket:
    """Connect a fresh socket and leave it non-blocking; closes it on failure."""
    connected = False
    try:
        sock.settimeout(max(ends_at - time.monotonic(), 1e-3))
        sock.connect(where)
        sock.setblocking(False)
        connected = True
        return sock
    finally:
        if not connected:
            sock.close()


class Sink:
    """Gives out the memory for the items of one reply."""

    def __init__(self, buffers: list[memoryview] | None) -> None:
        self.buffers = buffers
        self.parser: ReplyParser | None = None

    def open(self, length: int) -> memoryview:
        """The buffer of the item that is being read; raises ProtocolError if none fits."""
        if self.buffers is None:
            return aligned_bytes(length)
        index = self.parser.item_index if self.parser is not None else 0
        if index >= len(self.buffers):
            raise ProtocolError(f"answered more than {len(self.buffers)} items")
        if len(self.buffers[index]) != length:
            expected = len(self.buffers[index])
            raise ProtocolError(f"item {index} has {length} bytes instead of {expected}")
        return self.buffers[index]

    def fits(self, items: list[NDArray[np.uint8] | None]) -> bool:
        """Whether there is one item a buffer, nil or of its size."""
        if self.buffers is None:
            return True
        return len(items) == len(self.buffers) and all(
            item is None or item.nbytes == len(buffer)
            for item, buffer in zip(items, self.buffers, strict=True)
        )


def aligned_bytes(length: int) -> memoryview:
    """Fresh memory that starts at a multiple of 64.

    The kernel's copy out of a socket runs at about half its speed where source and
    destination differ modulo 16, and a server sends from aligned places of files.
    """
    memory = np.empty(length + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + length].data


def writable(buffer: Buffer) -> memoryview:
    """The buffer's bytes as one run; TypeError if nothing can be received there."""
    view = memoryview(buffer)  # type: ignore[arg-type]
    if view.readonly or not view.c_contiguous:
        raise TypeError("a buffer to receive into must be writable and C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(bytearray())
