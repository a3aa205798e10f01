"""Connections: commands in order, replies out, one at a time.

What is received and waits is ``intake``'s. A connection executes its commands strictly in
order. What needs no waiting is answered at once, short replies to a pipeline together; while
a command waits, received commands queue up to a limit and then reading pauses. The transport's
write buffer has no slack: while anything is unsent nothing more is executed, so a reader that
stops costs one reply, or a few short ones.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable
from typing import cast

from pion_vllm_mlx.server import dispatch
from pion_vllm_mlx.server.command import Reply
from pion_vllm_mlx.server.direct import DirectWriter, StreamWriter, TransportWriter
from pion_vllm_mlx.server.farewell import Farewell
from pion_vllm_mlx.server.intake import Intake
from pion_vllm_mlx.server.outbound import Stream
from pion_vllm_mlx.server.outcome import encoded, failed
from pion_vllm_mlx.server.patience import Patience
from pion_vllm_mlx.server.receiving import BulkReceiver
from pion_vllm_mlx.server.session import Client, Context, Server
from pion_vllm_mlx.wire import resp
from pion_vllm_mlx.wire.loopback import is_loopback, unpaced
from pion_vllm_mlx.wire.resp import Arg

log = logging.getLogger(__name__)

#: replies are written together up to here.
GATHERED_REPLY_BYTES = 16 << 10


class Connection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.intake = Intake(bool(server.config.password), lambda: self._busy)
        self.transport: asyncio.Transport | None = None
        self.client: Client | None = None
        self._replies: list[bytes] = []
        self._reply_bytes = 0
        self._context: Context | None = None
        self._busy = False
        self._reading = True
        self._drained = asyncio.Event()
        self._drained.set()
        self._closed = False
        self._farewell: Farewell | None = None
        self._direct: StreamWriter | None = None
        self._receiver: BulkReceiver | None = None
        self._offered = 0
        self._patience: Patience | None = None
        self._task: asyncio.Task[None] | None = None
        self._handshaking = False

    def begin_handshake(self) -> None:
        """From now on until TLS is agreed on this takes the place of a client."""
        self._handshaking = True
        self.server.handshakes += 1

    def end_handshake(self) -> None:
        """It is a client now, or gone; may be called more than once."""
        if self._handshaking:
            self._handshaking = False
            self.server.handshakes -= 1

    # -- asyncio's side --------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.end_handshake()
        server = self.server
        if transport.get_extra_info("sslcontext") is None:
            self.transport.set_write_buffer_limits(high=0)
            direct = self._direct = DirectWriter(self.transport, server.store.run)
            if isinstance(transport.get_extra_info("peername"), tuple):
                # what a Unix socket holds is too little for a thread that also writes
                self._receiver = BulkReceiver(self.intake.parser, direct.own_socket, self._came)
        else:
            # with 0 it would say that an empty buffer is full
            self.transport.set_write_buffer_limits(high=1)
            self._direct = TransportWriter(self.transport, server.store.run, self._drained)
        server.connections_total += 1
        peer = transport.get_extra_info("peername")
        is_tcp = isinstance(peer, tuple)
        address = f"{peer[0]}:{peer[1]}" if is_tcp else "unix"
        local = not is_tcp or is_loopback(str(peer[0]))
        if is_tcp:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if local:
                unpaced(sock)
        self.client = Client(server.client_ids.next(), address, local)
        self._context = Context(server, self.client, self._when_room)
        self._patience = Patience(server.config, self.client)
        self.intake.begin(self._context)
        if server.is_full:
            self.transport.write(b"-ERR max number of clients reached\r\n")
            self.transport.close()
            return
        server.clients[self.client.client_id] = self.client
        server.connections[self.client.client_id] = self

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._drained.set()
        if self.client is not None:
            self.server.clients.pop(self.client.client_id, None)
            self.server.connections.pop(self.client.client_id, None)
        if self._receiver is not None:
            self._receiver.stop()
        if self._direct is not None:
            self._direct.closed = True
            self._release_socket()
        self.intake.release()
        if self.client is not None:
            self.server.keyspace.unwatch(self.client.watch)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._farewell is not None:
            return self._farewell.buffer()
        window = self.intake.parser.get_buffer()
        assert window is not None
        self._offered = len(window)
        return window

    def buffer_updated(self, nbytes: int) -> None:
        if self._farewell is not None:
            self._farewell.received(nbytes)
            return
        self.intake.received(nbytes)
        if not self._busy:
            self._pump()
        if self._receiver is not None and not self._ending:
            self._receiver.begin(nbytes, self._offered)
        self._pause_or_resume()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()
        if not self._busy:
            self._pump()
        self._pause_or_resume()

    # -- reading ---------------------------------------------------------------

    def _when_room(self) -> None:
        """A target has room again: take in what waits in the parse buffer, go on reading."""
        if self._ending:
            return
        self.intake.parse()
        if not self._busy:
            self._pump()
        self._pause_or_resume()

    def _came(self, nbytes: int) -> None:
        """So much of a long argument came by a thread; the transport goes on."""
        if self._closed:
            self._release_socket()
        if self._ending:
            return
        self.intake.came(nbytes)
        if not self._busy:
            self._pump()
        self._pause_or_resume()

    @property
    def _receiving(self) -> bool:
        return self._receiver is not None and self._receiver.running

    def _release_socket(self) -> None:
        """The connection is lost: close the socket beside the transport's, once unused."""
        if self._direct is not None and not self._busy and not self._receiving:
            self._direct.release()

    def _pause_or_resume(self) -> None:
        if self._ending:
            return
        assert self.transport is not None
        wanted = not self._receiving and self.intake.wants_more
        if wanted and not self._reading:
            self.intake.went_on()
            self._reading = True
            self.transport.resume_reading()
        elif not wanted and self._reading:
            self._reading = False
            self.transport.pause_reading()

    def _give_up(self, reason: str) -> None:
        assert self.transport is not None
        self.transport.write(resp.error("ERR", reason))
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        """The last reply is written."""
        assert self.transport is not None
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()
        self._farewell = Farewell(self.transport)

    # -- executing -------------------------------------------------------------

    def _pump(self) -> None:
        """Execute queued commands until one has to wait, or the reader has to catch up."""
        assert self.transport is not None
        self._execute_queued()
        intake = self.intake
        while intake.later and not self._ending and not self._busy and not intake.commands:
            intake.parse_deferred()
            self._execute_queued()
        answered = not self._busy and not intake.commands
        if intake.parser.error is not None and answered and not self._ending:
            self._give_up(str(intake.parser.error))

    def _execute_queued(self) -> None:
        assert self._context is not None
        while self.intake.commands and not self._ending and self._drained.is_set():
            args = dispatch.opened(self.intake.commands.popleft())
            if not args:
                continue
            result = self._start(args)
            if dispatch.is_pending(result):
                self._wait_for(cast("Awaitable[Reply]", result), args)
                return
            reply = encoded(self._context, cast("Reply", result))
            if isinstance(reply, Stream):
                self._wait_for(_itself(reply), args)
                return
            dispatch.release(args)
            self._answer(reply)
        self._flush()

    def _wait_for(self, result: Awaitable[Reply], args: list[Arg]) -> None:
        """Nothing more is executed until the reply is there, and on its way."""
        self._flush()
        self._busy = True
        work = self._finish(result, args)
        self._task = asyncio.get_running_loop().create_task(work)

    def _start(self, args: list[Arg]) -> Reply | Awaitable[Reply]:
        assert self._context is not None
        self.server.commands_total += 1
        try:
            return dispatch.execute(self._context, args)
        except Exception as error:  # noqa: BLE001 - a bug must not end the server
            return failed(args, error)

    async def _finish(self, pending: Awaitable[Reply], args: list[Arg]) -> None:
        """Wait for a command, send its reply, go on with the queue."""
        assert self._context is not None
        try:
            try:
                reply: Reply = await pending
            except Exception as error:  # noqa: BLE001 - outermost loop of a command
                reply = failed(args, error)
            dispatch.release(args)
            data = encoded(self._context, reply)
            if isinstance(data, Stream):
                await self._send_stream(data)
            elif not self._closed:
                self._answer(data)
        finally:
            self._busy, self._task = False, None
        if not self._closed:
            self._pump()
            self._pause_or_resume()
        else:
            self._release_socket()

    def _answer(self, data: bytes) -> None:
        """Take a reply, to be written with those that follow it."""
        assert self.transport is not None and self.client is not None
        self._replies.append(data)
        self._reply_bytes += len(data)
        if self._reply_bytes > GATHERED_REPLY_BYTES or self.client.close_after_reply:
            self._flush()
        if self.client.close_after_reply:
            self._say_goodbye()

    def _flush(self) -> None:
        """Write the replies that wait for company."""
        if not self._replies:
            return
        assert self.transport is not None and self.client is not None
        self.transport.write(b"".join(self._replies))
        self._replies.clear()
        self._reply_bytes = 0
        limit = self.server.config.output_limit
        if limit and self.transport.get_write_buffer_size() > limit:
            log.warning("%s reads too slowly for its replies: closed", self.client.address)
            self.transport.abort()

    async def _send_stream(self, stream: Stream) -> None:
        """Send file ranges from a thread once everything before them has left."""
        await self._drained.wait()
        if self._closed or self._direct is None:
            return
        self.server.ledger.bytes_served += stream.payload_bytes
        await self._direct.send(stream)

    # -- housekeeping ----------------------------------------------------------

    def stalled(self, now: float) -> bool:
        """Whether half a command, an unread reply or silence has lasted for too long."""
        if self.transport is None or self._direct is None or self._patience is None:
            return False
        if self._patience.unread(now, self.transport, self._direct):
            return True
        intake = self.intake
        waits = self._busy or not self._reading
        if self._patience.idle(now, intake.progress, waits):
            return True
        late = intake.is_amid and not self._busy and self._reading
        in_the_way = late and intake.holds and self.server.crowded
        if self._patience.in_the_way(intake.progress, in_the_way):
            return True
        return late and now - intake.progress > self.server.config.stall_seconds

    @property
    def _ending(self) -> bool:
        """Whether nothing more is to be executed: closed, or the last reply is written."""
        if self._closed or self._farewell is not None or self.transport is None:
            return True
        return self.transport.is_closing()

    @property
    def running(self) -> asyncio.Task[None] | None:
        """The command that is being waited for."""
        return self._task

    def close(self) -> None:
        if self.transport is not None:
            self._flush()
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


async def _itself(reply: Stream) -> Reply:
    return reply
