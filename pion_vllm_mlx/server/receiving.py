"""Long arguments that arrive faster than the event loop takes them: received by a thread.

Bytes that come at the speed of memory come in hundreds of pieces a second, and each would wake
the event loop. So while a connection is in the middle of a long argument, and its transport
finds more than it has room for, the transport rests and a thread receives straight from the
socket, consuming what it has received while that is still in the processor's cache. As soon as
nothing more is there, the transport goes on: a slow sender never holds a thread.

For TCP alone. What is sent while the thread writes has to fit into the socket's buffers; those of
a Unix socket are small on most systems, and there receiving and writing better go on side by side.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from pion_vllm_mlx.server.inbound import DeferredBulk, StreamInbound
from pion_vllm_mlx.wire.resp import RequestParser

#: less is left to the transport: handing over takes as long as receiving it.
LEAST_BYTES = 512 << 10
#: the transport receives so much at once where the sender is faster than it.
FLOWING_BYTES = 128 << 10
#: how long a thread waits for a sender that two busy processors have not let run.
PATIENCE_MS = 2
#: how long a thread receives before others have a turn, and the connection is seen to go on.
TURN_SECONDS = 0.25


class SocketSource:
    """Receives from a connection's own socket while its transport does not. Used by a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._until = 0.0
        #: set when the connection is lost
        self.stopped = False

    def begin(self) -> None:
        """A turn begins with the next ``fill``."""
        self._until = 0.0

    def fill(self, view: memoryview) -> int:
        """Bytes received: fewer than fit when no more come, for whatever reason.

        The transport asks again, and finds out why.
        """
        received = 0
        self._until = self._until or time.monotonic() + TURN_SECONDS
        while received < len(view) and not self.stopped and time.monotonic() < self._until:
            try:
                count = self._sock.recv_into(view[received:])
            except BlockingIOError:
                if not _readable(self._sock):
                    break
                continue
            except OSError:
                break
            if not count:
                break
            received += count
        return received


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(PATIENCE_MS))


class BulkReceiver:
    """Receives for one connection. ``came`` is told how many bytes, on the event loop.

    ``open_socket`` gives the socket, under a descriptor of its own, that stays open as long
    as this is ``running``.
    """

    def __init__(
        self,
        parser: RequestParser,
        open_socket: Callable[[], socket.socket],
        came: Callable[[int], None],
    ) -> None:
        self.running = False
        self._parser = parser
        self._open_socket = open_socket
        self._came = came
        self._source: SocketSource | None = None

    def begin(self, received: int, offered: int) -> None:
        """Take over where it pays, after the transport ``received`` so much of the ``offered``.

        Until it is no longer ``running`` the transport must not read, and nobody may ask the
        parser for a buffer.
        """
        if self.running or received < min(offered, FLOWING_BYTES):
            return
        target, left = self._parser.open_target
        if isinstance(target, DeferredBulk):
            target = target.target
        if left < LEAST_BYTES or not isinstance(target, StreamInbound):
            return
        if self._parser.get_buffer() is None:
            return  # no room; or there was none, and what came before waits in the parser
        try:
            source = self._source = self._source or SocketSource(self._open_socket())
        except OSError:
            return  # no descriptor is left: the transport goes on
        source.begin()
        self.running = target.receive(source.fill, self._done)

    def _done(self, received: int) -> None:
        self.running = False
        self._came(received)

    def stop(self) -> None:
        """The connection is lost."""
        if self._source is not None:
            self._source.stopped = True
