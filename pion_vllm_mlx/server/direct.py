"""Long replies, sent by threads straight to a connection's socket."""

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
        if self._socket is None:
            descriptor = self._transport.get_extra_info("socket").fileno()
            self._socket = socket.socket(fileno=os.dup(descriptor))
            self._socket.setblocking(False)
        sender = self._sender = Sender(self._socket, stream)
        complete, self.sending = False, True
        try:
            while not (complete := await self._run(sender.turn)):
                if not await self._writable(self._socket):
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

    async def _writable(self, sock: socket.socket) -> bool:
        """Wait for the reader; False when the connection is gone."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(sock, ready.set)
        try:
            while not ready.is_set() and not self.closed:
                try:
                    await asyncio.wait_for(ready.wait(), 1.0)
                except (asyncio.TimeoutError, TimeoutError):
                    continue
        finally:
            loop.remove_writer(sock)
        return not self.closed

    def release(self) -> None:
        """Close the socket; nothing is being sent any more."""
        if self._socket is not None:
            self._socket.close()


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
