"""When a connection's queries are left to the thread that attends, and what comes back of it.

A client earns it by asking for attention alone, several times in a row and without long breaks,
while nobody else asks the engine for anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from pion_vllm_mlx.server.attention import frames
from pion_vllm_mlx.server.binary_commands import short
from pion_vllm_mlx.server.direct import DirectWriter
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.visit import REST_SECONDS, Visit
from pion_vllm_mlx.wire.frames import BodyReader, Frame, FrameParser, Status

QUERY = 0x24
#: queries in a row after which a connection may visit.
TRUST = 4
#: an empty part of a visit's buffer would keep all of it for as long as the connection rests.
_NOTHING = memoryview(b"")


class Visiting:
    """The visits of one connection; belongs to the event loop.

    ``back`` is told that one is over, with what is unsent of a reply, and whether the next may
    begin at once; what was received is then had by ``next_frame``.
    """

    def __init__(
        self,
        context: Context,
        direct: DirectWriter,
        back: Callable[[bytes, bool], None],
    ) -> None:
        self._context = context
        self._engine = context.server.attention.engine
        self._direct = direct
        self._told = back
        self._visit: Visit | None = None
        #: the future of a visit that is under way
        self.active: asyncio.Future[None] | None = None
        self._received = _NOTHING
        #: queries in a row; whatever else is asked begins anew
        self.streak = 0
        self._begun = -1
        self._asked = 0.0

    @property
    def holds(self) -> bool:
        """Whether the transport must not read: a visit is on, or what it received is not taken."""
        return self.active is not None or bool(self._received)

    def asks(self) -> None:
        """A query is about to be executed."""
        now, alone = time.monotonic(), self._engine.begun == self._begun
        goes_on = alone and now - self._asked < REST_SECONDS
        self.streak = self.streak + 1 if goes_on else 0
        self._asked, self._begun = now, self._engine.begun + 1

    def may_begin(self) -> bool:
        """Whether a visit is due. Everything that was asked is answered."""
        server = self._context.server
        alone = self._engine.begun == self._begun
        return alone and self.streak >= TRUST and not server.stopping.is_set()

    def begin(self) -> None:
        """Begin a visit; the transport reads nothing until it is over. Raises OSError."""
        visit = Visit(self._direct.own_socket(), QUERY, self._answer)
        self._visit = visit
        self.active = self._engine.host(visit, self._context.connected)
        self.active.add_done_callback(partial(self._over, visit))

    def end(self) -> None:
        """Have it end soon."""
        if self._visit is not None:
            self._visit.over = True
            self._engine.ring()

    def next_frame(self, parser: FrameParser) -> Frame | None:
        """The next whole frame, of what visits left first."""
        while (frame := parser.next_frame()) is None and self._received:
            taken = parser.take(self._received)
            if not taken:
                return None
            self._received = self._received[taken:] or _NOTHING
        return frame

    def _answer(self, body: memoryview) -> bytes | None:
        """The reply to a query; None for what the event loop has to do. On the thread."""
        try:
            pieces = frames.query_fused_now(self._context, BodyReader(body))
        except Exception:  # noqa: BLE001 - outermost loop: the event loop meets it again, and tells
            return None
        return None if pieces is None else short((Status.OK, pieces)) or None

    def _over(self, visit: Visit, done: asyncio.Future[None]) -> None:
        self._visit, self.active = None, None
        server = self._context.server
        server.commands_total += visit.answered
        server.attention.slots.catch_up()
        if visit.answered:
            self._context.client.active = time.monotonic()
        failed = done.cancelled() or done.exception() is not None
        self._received = visit.received or _NOTHING
        self.streak, self._begun = 0, -1
        goes_on = visit.goes_on and not failed and not server.stopping.is_set()
        self._told(visit.unsent, goes_on)
