"""Long replies, sent straight to a connection's socket: by threads, or by the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.outbound import ReaderGone, Sender, Stream, Window, windows

log = logging.getLogger(__name__)


class StreamWriter(Protocol):
    """Sends streams, one at a time; ``sent`` grows while bytes leave.

    Whoever owns the transport sets ``closed`` when the connection is lost.
    """

    closed: bool
    sending: bool

    @property
    def sent(self) -> int: ...

    async def send(self, stream: Stream) -> None:
        """Send all of it; when that fails the connection is aborted."""

    def release(self) -> None:
        """Give back what it holds; nothing is being sent any more."""


class DirectWriter:
    """Writes streams beside a transport whose own buffer is empty.

    ``run`` runs a call on a thread. Whoever owns the transport sets ``closed`` when the
    connection is lost.
    """

    def __init__(
        self, transport: asyncio.Transport, run: Callable[[Callable[[], bool]], Awaitable[bool]]
    ) -> None:
        self.closed = self.sending = False
        self._transport = transport
        self._run = run
        self._socket: socket.socket | None = None
        self._sender: Sender | None = None

    @property
    def sent(self) -> int:
        """Bytes of the stream that have left."""
        return 0 if self._sender is None else self._sender.sent

    async def send(self, stream: Stream) -> None:
        """Send all of it; when that fails the connection is aborted."""
        try:
            sock = self.own_socket()
        except OSError as error:
            log.error("a reply cannot be sent: %s", error)
            self._transport.abort()
            return
        sender = self._sender = Sender(sock, stream)
        complete, self.sending = False, True
        try:
            # what lies in memory needs no thread: no step of it waits, or takes long
            while not (complete := sender.step() if stream.ready else await self._run(sender.turn)):
                if not await self._writable(sock):
                    return
        except ReaderGone:
            pass
        except (OSError, CommandError) as error:
            log.error("reading what a reply is made of failed: %s", error)
        finally:
            self.sending, self._sender = False, None
            if not complete:
                # half a reply is out: only closing tells the reader that the rest is missing
                self._transport.abort()

    def own_socket(self) -> socket.socket:
        """The connection's socket, under a descriptor that is open until ``release``.

        Raises OSError.
        """
        if self._socket is None:
            descriptor = self._transport.get_extra_info("socket").fileno()
            self._socket = socket.socket(fileno=os.dup(descriptor))
            self._socket.setblocking(False)
        return self._socket

    async def _writable(self, sock: socket.socket) -> bool:
        """Wait for the reader; False when the connection is gone."""
        loop = asyncio.get_running_loop()
        while not self.closed:
            ready: asyncio.Future[bool] = loop.create_future()
            loop.add_writer(sock, _settle, ready, True)
            timer = loop.call_later(1.0, _settle, ready, False)
            try:
                if await ready:
                    break
            finally:
                timer.cancel()
                loop.remove_writer(sock)
        return not self.closed

    def release(self) -> None:
        """Close the socket; nothing is being sent any more."""
        if self._socket is not None:
            self._socket.close()


def _settle(ready: asyncio.Future[bool], result: bool) -> None:
    if not ready.done():
        ready.set_result(result)


class TransportWriter:
    """Writes streams through a transport that has to see every byte, as that of TLS has.

    ``run`` makes a window on a thread; ``drained`` is set while the transport's buffer is
    empty, and when the connection is lost.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        run: Callable[[Callable[[], Window | None]], Awaitable[Window | None]],
        drained: asyncio.Event,
    ) -> None:
        self.closed = self.sending = False
        self.sent = 0
        self._transport = transport
        self._run = run
        self._drained = drained

    async def send(self, stream: Stream) -> None:
        """Send all of it; when that fails the connection is aborted."""
        waiting = windows(stream)
        complete, self.sending = False, True
        try:
            while (window := await self._run(lambda: next(waiting, None))) is not None:
                await self._drained.wait()
                if self.closed:
                    return
                self._transport.write(window)
                self.sent += len(window)
            complete = True
        except (OSError, CommandError) as error:
            log.error("reading what a reply is made of failed: %s", error)
        finally:
            self.sending = False
            if not complete:
                self._transport.abort()

    def release(self) -> None:
        """Nothing is held."""
