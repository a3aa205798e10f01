"""The binary lane's connections: frames in, operations in order, replies out.

One operation at a time, as on the RESP port: nothing more is executed while one waits
or a reply is unsent; short replies to a pipeline leave together. A long body is received
into its final place and a long reply is sent from where it lies; neither is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any, cast

from pion_vllm_mlx.errors import CommandError, ProtocolError
from pion_vllm_mlx.server import binary_commands
from pion_vllm_mlx.server.binary_commands import Answer, Pieces
from pion_vllm_mlx.server.direct import DirectWriter
from pion_vllm_mlx.server.early_reply import EarlyReply
from pion_vllm_mlx.server.farewell import Farewell
from pion_vllm_mlx.server.linger import Linger
from pion_vllm_mlx.server.long_arguments import LongInbound
from pion_vllm_mlx.server.outbound import Stream, in_memory
from pion_vllm_mlx.server.patience import Patience
from pion_vllm_mlx.server.session import Client, Context, Server
from pion_vllm_mlx.server.visiting import Visiting
from pion_vllm_mlx.wire.frames import BodyReader, Frame, FrameParser, Status, header
from pion_vllm_mlx.wire.loopback import is_loopback, unpaced
from pion_vllm_mlx.wire.resp import BulkTarget, DiscardBulk

log = logging.getLogger(__name__)

#: a long body that brings less than this in the stall time stands still.
_STEP_BYTES = 64 << 10
_OK = Status.OK
_NO_BODY = BodyReader(b"")
#: replies are written together up to here.
GATHERED_REPLY_BYTES = 16 << 10


class BinaryConnection(asyncio.BufferedProtocol):
    """One client of the lane."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.parser = FrameParser(self._open_body)
        self._progress = 0.0
        self._step = 0
        self._closed = False
        self._over = False  # closed, or about to be
        self._farewell: Farewell | None = None
        self._reading = True
        self._full = False  # something is unsent
        self._drained = asyncio.Event()
        self._drained.set()
        self._task: asyncio.Future[Any] | None = None

    # -- asyncio's side --------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._transport.set_write_buffer_limits(high=0)
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._linger = Linger(sock.fileno())
        server = self.server
        server.connections_total += 1
        # nobody, when the other side has left already
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        address, local = f"{host}:{port}", is_loopback(host)
        if local:
            unpaced(sock)
        self._client = Client(server.client_ids.next(), address, local)
        self._context = Context(server, self._client, self._go_on, answer_early=self._answer_early)
        self._early = EarlyReply()
        self._direct = DirectWriter(self._transport, server.store.run)
        self._visiting = Visiting(self._context, self._direct, self._back)
        self._patience = Patience(server.config, self._client)
        self._progress = self._loop.time()
        if server.is_full:
            self.abort()
            return
        server.clients[self._client.client_id] = self._client
        server.connections[self._client.client_id] = self

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = self._over = self._direct.closed = True
        self._drained.set()
        self._linger.close()
        self.server.clients.pop(self._client.client_id, None)
        self.server.connections.pop(self._client.client_id, None)
        _release(self.parser.abandon())
        self._visiting.end()
        self._release_socket()

    def _release_socket(self) -> None:
        """The connection is lost: close the socket beside the transport's, once unused."""
        if self._closed and self._task is None and not self._visiting.active:
            self._direct.release()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._farewell is not None:
            return self._farewell.buffer()
        window = self.parser.get_buffer()
        assert window is not None
        return window

    def buffer_updated(self, nbytes: int) -> None:
        if self._farewell is not None:
            self._farewell.received(nbytes)
            return
        asked = self.server.commands_total
        stays = self._linger.arrived(asked) and not self.server.pool.held
        parser = self.parser
        self._step += nbytes
        if self._step >= _STEP_BYTES or not parser.in_body:
            self._step = 0
            self._progress = self._loop.time()
        parser.buffer_updated(nbytes)
        if self._answer_all() and stays and not self._transport.is_closing():
            self._stay()
        self._linger.left(self.server.commands_total)

    def _stay(self) -> None:
        """Answer what comes at once, before the event loop looks at the others."""
        parser, linger = self.parser, self._linger
        window = parser.get_buffer()
        assert window is not None
        while nbytes := linger.receive(window):
            frame = parser.only_frame(nbytes)
            if frame is None:
                if not self._answer_all():
                    break
                continue
            reply = self._execute(frame)
            if not reply:
                break
            if rest := linger.send(reply):
                self._transport.write(rest)
                break
        self._progress = self._loop.time()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._full = True
        self._drained.clear()

    def resume_writing(self) -> None:
        self._full = False
        self._drained.set()
        self._go_on()

    # -- reading ---------------------------------------------------------------

    def _open_body(self, opcode: int, length: int) -> BulkTarget:
        """A place for a long body; what will be refused is read and forgotten."""
        try:
            operation = binary_commands.find(self._context, opcode)
        except CommandError:
            return DiscardBulk(length)
        if not operation.long:
            return DiscardBulk(length)
        return self.server.long_arguments.open(length, self._go_on)

    def _go_on(self) -> None:
        """Something that was waited for is there."""
        self._answer_all()

    def _answer_all(self) -> bool:
        """Execute what is there until something has to wait; then pause or resume reading.

        Whether everything that has come is answered, and the replies have left.
        """
        if self._over:
            return False
        replies = b""
        try:
            while self._task is None and not self._full:
                frame = self._visiting.next_frame(self.parser)
                if frame is None:
                    break
                if replies and binary_commands.answers_early(frame.code):
                    self._transport.write(replies)
                    replies = b""
                replies += self._execute(frame)
                if len(replies) > GATHERED_REPLY_BYTES:
                    self._transport.write(replies)
                    replies = b""
        except ProtocolError as error:
            log.debug("%s: %s", self._client.address, error)
            self._say_goodbye(replies)
            return False
        if replies:
            self._transport.write(replies)
        if self.parser.mid_frame or not self._reading:
            self._pause_or_resume()
            return False
        return self._task is None and not self._full

    def _say_goodbye(self, replies: bytes) -> None:
        """Nothing more is understood; ``replies`` answer what came before."""
        if replies:
            self._transport.write(replies)
        self._over = True
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        self._farewell = Farewell(self._transport)

    def _pause_or_resume(self) -> None:
        if self._over or self._transport.is_closing():
            return
        wanted = not self._visiting.holds and self.parser.get_buffer() is not None
        if wanted and not self._reading:
            # the silence so far was ours
            self._progress = self._loop.time()
            self._reading = True
            self._transport.resume_reading()
        elif not wanted and self._reading:
            self._reading = False
            self._transport.pause_reading()

    # -- executing -------------------------------------------------------------

    def _execute(self, frame: Frame) -> bytes:
        """Run one operation; its reply, empty where that comes from a task, as long ones do."""
        self.server.commands_total += 1
        code, body = frame
        try:
            operation = binary_commands.find(self._context, code)
            self._client.last_command = operation.name
            self._client.active = time.monotonic()
            reader = BodyReader(_bytes_of(body)) if body else _NO_BODY
            if operation.early:
                self._visiting.asks()
                self._let_answer_early()
            else:
                self._visiting.streak = 0
            outcome = operation.handler(self._context, reader)
        except CommandError as error:
            answer = binary_commands.refusal(error)
        except Exception:  # noqa: BLE001 - outermost loop: a bug must not end the server
            answer = _bug(frame)
        else:
            if isinstance(outcome, asyncio.Future):
                self._task = outcome
                outcome.add_done_callback(partial(self._arrived, frame))
                return b""
            if not isinstance(outcome, list):
                self._start(self._finish(outcome, frame))
                return b""
            answer = _OK, outcome
        if not isinstance(body, bytes):
            _release(body)
        reply = binary_commands.short(answer)
        if not reply:
            self._start(self._stream(answer))
        return reply

    def _start(self, work: Awaitable[None]) -> None:
        """Begin what is waited for; replies to what came before leave earlier than its own."""
        self._task = self._loop.create_task(self._to_its_end(work))

    def _let_answer_early(self) -> None:
        """Another thread may send the reply to what is executed now, if nothing is unsent."""
        self._early.close()  # one that was refused has not used its right
        if self._full:
            return
        with contextlib.suppress(OSError):  # no descriptor is left: the transport sends it
            self._early.open(self._direct.own_socket())

    def _answer_early(self, pieces: Pieces) -> None:
        """Send a short reply at once. On the thread that computed it."""
        if reply := binary_commands.short((_OK, pieces)):
            self._early.send(reply)

    async def _to_its_end(self, work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            self._task = None
            self._release_socket()
        self._go_on()

    def _arrived(self, frame: Frame, outcome: asyncio.Future[Pieces]) -> None:
        """An operation has ended that needed no task; its reply may have left already."""
        self._task = None
        unsent = self._early.close()
        self._release_socket()
        if unsent is None:
            self._start(self._finish(outcome, frame))
            return
        _release(frame.body)
        if unsent and not self._closed:
            self._transport.write(unsent)
        if self._answer_all() and self._visiting.may_begin():
            self._visit()

    def _visit(self) -> None:
        """Leave the socket to the thread that attends, until it has something else to do."""
        if self._reading:
            self._reading = False
            self._transport.pause_reading()
        try:
            self._visiting.begin()
        except OSError:  # no descriptor is left
            self._pause_or_resume()

    def _back(self, unsent: bytes, goes_on: bool) -> None:
        """A visit is over."""
        self._progress = self._loop.time()
        self._release_socket()
        if self._over or self._closed:
            return
        if unsent:
            self._transport.write(unsent)
        if goes_on and not self._transport.is_closing():
            self._visit()
            return
        self._go_on()
        self._pause_or_resume()

    async def _finish(self, pending: Awaitable[Pieces], frame: Frame) -> None:
        try:
            answer: Answer = _OK, await pending
        except CommandError as error:
            answer = binary_commands.refusal(error)
        except Exception:  # noqa: BLE001 - outermost loop of an operation
            answer = _bug(frame)
        _release(frame.body)
        if self._closed:
            return
        if reply := binary_commands.short(answer):
            self._transport.write(reply)
        else:
            await self._stream(answer)

    async def _stream(self, answer: Answer) -> None:
        """Send a long reply from where it lies, once everything before it has left."""
        await self._drained.wait()
        if self._closed:
            return
        status, pieces = answer
        body = in_memory(pieces)
        await self._direct.send(Stream([header(status, body.length), body], ready=True))

    # -- housekeeping ----------------------------------------------------------

    def stalled(self, now: float) -> bool:
        """Whether half a frame, an unread reply or silence has lasted for too long."""
        if self._patience.unread(now, self._transport, self._direct):
            return True
        waits = self._task is not None or not self._reading
        if self._patience.idle(now, self._progress, waits):
            return True
        waiting = self.parser.mid_frame and self._reading
        idle = self._task is None and self._drained.is_set()
        late = waiting and idle
        holds = late and self.parser.in_body
        if self._patience.in_the_way(self._progress, holds and self.server.crowded):
            return True
        return late and now - self._progress > self.server.config.stall_seconds

    @property
    def running(self) -> asyncio.Future[Any] | None:
        """What is being waited for: an operation, or a thread that reads and answers."""
        return self._task or self._visiting.active

    def close(self) -> None:
        self._over = True
        self._transport.close()

    def abort(self) -> None:
        self._over = True
        self._transport.abort()


def _bytes_of(body: bytes | BulkTarget) -> bytes | memoryview:
    """A body; empty where it was longer than its operation takes."""
    if isinstance(body, bytes):
        return body
    return body.view if isinstance(body, LongInbound) else b""


def _release(body: bytes | BulkTarget | None) -> None:
    if isinstance(body, LongInbound):
        body.release()


def _bug(frame: Frame) -> Answer:
    log.exception("internal error in opcode %#04x", frame.code)
    return Status.ERROR, [b"ERR internal error, see the server's log"]
