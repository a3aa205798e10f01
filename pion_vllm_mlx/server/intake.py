"""What a connection has received and not executed yet: its parser, and what a sender may hold.

Knows no transport and executes nothing: a connection brings bytes, takes commands, and asks
whether to read on. An argument too long to wait in the parse buffer finds its place when it
begins, or, where the commands before it may change the answer, once those are executed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pion_vllm_mlx.errors import CommandError, ProtocolError
from pion_vllm_mlx.server import dispatch
from pion_vllm_mlx.server.inbound import DeferredBulk, RefusedBulk
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.requests import UNAUTHENTICATED
from pion_vllm_mlx.wire.resp import Arg, BulkTarget, Limits, RequestParser

#: commands a connection may have received and not yet executed.
MAX_QUEUED = 256
#: bytes that the short arguments of one command may have together.
MAX_SHORT_BYTES = 16 << 20
#: a long argument that brings less than this in the stall time stands still.
STEP_BYTES = 64 << 10
LIMITS = Limits()


class Intake:
    """See the module's docstring.

    ``guarded``: a password is asked for. ``is_busy``: whether a command is being waited for.
    ``progress``: when something came last, or reading went on, in the event loop's time.
    """

    def __init__(self, guarded: bool, is_busy: Callable[[], bool]) -> None:
        self.parser = RequestParser(LIMITS, self._open_bulk)
        #: complete commands in their order
        self.commands = self.parser.commands
        self._now = asyncio.get_running_loop().time
        self.progress = self._now()
        self._guarded = guarded
        self._is_busy = is_busy
        self._context: Context | None = None
        self._step = 0
        self._counted = 0
        self._short_bytes = 0
        self._deferred = False

    def begin(self, context: Context) -> None:
        """The client is there; nothing is received before."""
        self._context = context
        self.went_on()

    def went_on(self) -> None:
        """The silence so far was ours, or is over."""
        self.progress = self._now()

    # -- taking in -------------------------------------------------------------

    def received(self, nbytes: int) -> None:
        """So much is in the parser's buffer."""
        self._step += nbytes
        if self._step >= STEP_BYTES or not self.parser.in_bulk:
            self._step = 0
            self.progress = self._now()
        self.parse(nbytes)
        if self.parser.error is None and self._holds_too_much():
            # said once what came before is answered
            self.parser.error = ProtocolError("Protocol error: arguments are too long")

    def came(self, nbytes: int) -> None:
        """So much of a long argument came by a thread."""
        self.went_on()
        self.parser.bulk_received(nbytes)

    def parse(self, nbytes: int = 0) -> None:
        """Take in what was received, under the limits of who is known to have sent it."""
        if self._guarded:
            self.parser.limits = UNAUTHENTICATED if self._unknown else LIMITS
        self.parser.buffer_updated(nbytes)

    def parse_deferred(self) -> None:
        """A deferred argument finds its place now, and its bytes may be here already."""
        self._deferred = False
        self.parse()

    @property
    def later(self) -> bool:
        """Whether received bytes wait for the commands before them."""
        return self._deferred or self.parser.waits

    @property
    def wants_more(self) -> bool:
        """Whether there is room for what comes next. Not while a thread receives."""
        return (
            len(self.commands) < (1 if self._unknown else MAX_QUEUED)
            and self.parser.error is None
            and self.parser.get_buffer() is not None
        )

    @property
    def is_amid(self) -> bool:
        """Whether a command is received in part."""
        return self.parser.mid_command or self.parser.in_bulk

    @property
    def holds(self) -> bool:
        """Whether the command being received has a long argument."""
        return self.parser.in_bulk or any(
            not isinstance(arg, bytes) for arg in self.parser.args_so_far
        )

    def release(self) -> None:
        """The connection is lost: give back what arguments hold."""
        for args in self.commands:
            dispatch.release(args)
        self.commands.clear()
        dispatch.release(self.parser.abandon())

    # -- limits and places -----------------------------------------------------

    @property
    def _unknown(self) -> bool:
        """Whether a password is asked for and was not given."""
        context = self._context
        return self._guarded and context is not None and not context.client.authenticated

    def _open_bulk(self, args: list[Arg], length: int) -> BulkTarget:
        """A place for a long argument; it waits where earlier commands may change the answer."""
        assert self._context is not None
        try:
            return dispatch.open_bulk(self._context, args, length)
        except CommandError as error:
            if self._commands_before:
                self._deferred = True
                return DeferredBulk(length, lambda: self._open_deferred(args, length))
            return RefusedBulk(length, error)

    def _open_deferred(self, args: list[Arg], length: int) -> BulkTarget | None:
        return None if self._commands_before else self._open_bulk(args, length)

    @property
    def _commands_before(self) -> bool:
        return self._is_busy() or bool(self.commands)

    def _holds_too_much(self) -> bool:
        """Whether the short arguments of a half received command fill the memory."""
        args = self.parser.args_so_far
        if len(args) < self._counted:
            self._counted = self._short_bytes = 0
        new = args[self._counted :]
        self._counted = len(args)
        self._short_bytes += sum(len(arg) for arg in new if isinstance(arg, bytes))
        return self._short_bytes > MAX_SHORT_BYTES
