"""A connection that asks for nothing but attention is read by the thread that attends.

To wake the event loop for a query, so that it wakes that thread, takes longer than a short query
leaves room for. So a connection that has sent queries only, one after the other, while nobody else
asked for attention, is a visitor of the thread for a while: it receives, computes and sends. All
else stays where it was. Whatever is no whole query that can be answered at once, and whatever
others want of the thread, ends the visit: what was received goes back to the event loop, which
reads on, refuses, waits and closes as ever. A visit has an end by itself, too, so that counters
and the order of slots are never far behind.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from os import sched_yield
from typing import Any

from pion_vllm_mlx.wire.frames import HEADER_BYTES, MAGIC, header_of

#: a visit's length, and how long the next query may take before it is over.
TURN_SECONDS, REST_SECONDS = 0.25, 0.1
#: the longest query that is read here: longer ones take their time anyway.
MOST_BYTES = (1 << 20) + 4096
_FIRST_BYTES = 32 << 10
#: how long to look at the socket before going to sleep, for a client whose last query was quick;
#: measured on Linux alone, elsewhere the system wakes us.
_LOOK_SECONDS, _QUICK_SECONDS = 60e-6 if sys.platform == "linux" else 0.0, 200e-6


class Bell:
    """Wakes a thread that waits for a socket. ``ring`` may be called from any thread."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        for end in (self._near, self._far):
            end.setblocking(False)

    def fileno(self) -> int:
        """What can be read once it has rung."""
        return self._near.fileno()

    def ring(self) -> None:
        try:
            self._far.send(b"!")
        except OSError:
            return  # it rings already, or nobody listens any more

    def quiet(self) -> None:
        """Forget that it rang."""
        try:
            while self._near.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._near.close()
        self._far.close()


class Visit:
    """One stay of a connection at the thread; work of the engine, see there.

    ``answer`` makes the reply to a body of ``opcode``, None for what is not answered here; its
    argument is good until it returns. ``sock`` does not block, and is open until the visit is over.
    """

    group = None
    rows = 0

    def __init__(
        self, sock: socket.socket, opcode: int, answer: Callable[[memoryview], bytes | None]
    ) -> None:
        self._sock = sock
        self._opcode = opcode
        self._answer = answer
        self._view = memoryview(bytearray(_FIRST_BYTES))
        self._filled = 0
        self._quick = False
        #: says that somebody else wants the thread, and what wakes it then; of the engine
        self.called_away: Callable[[], bool] = lambda: True
        self.bell: Bell | None = None
        #: the owner of the connection wants it back
        self.over = False
        self.answered = 0
        #: whether it may go on: its time was up, and nothing else
        self.goes_on = False
        #: the rest of a reply that the socket did not take
        self.unsent = b""

    @property
    def received(self) -> memoryview:
        """What was received and not answered."""
        return self._view[: self._filled]

    def alone(self) -> None:
        """Answer queries until something else is to be done. On the thread."""
        assert self.bell is not None
        self.bell.quiet()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self.bell.fileno(), select.POLLIN)
        ends_at = time.monotonic() + TURN_SECONDS
        while not self.over and not self.called_away():
            if time.monotonic() > ends_at:
                self.goes_on = not self._filled
                return
            if not self._receive(poll):
                return
            wanted = self._wanted()
            if wanted < 0 or self._filled > wanted:
                return
            if self._filled == wanted and not self._reply(wanted):
                return

    def together(self, others: Sequence[Any]) -> list[None]:
        raise AssertionError("visits have no group")

    def _wanted(self) -> int:
        """Bytes of the request whose beginning is there, -1 for one that is not for here."""
        if self._filled < HEADER_BYTES:
            return HEADER_BYTES
        magic, code, length = header_of(self._view)
        if magic != MAGIC or code != self._opcode or length > MOST_BYTES:
            return -1
        wanted = HEADER_BYTES + length
        if wanted > len(self._view):
            larger = memoryview(bytearray(wanted))
            larger[: self._filled] = self.received
            self._view = larger
        return wanted

    def _reply(self, end: int) -> bool:
        """Answer a whole request; whether all of that has left."""
        reply = self._answer(self._view[HEADER_BYTES:end])
        if reply is None:
            return False
        self.answered += 1
        self._filled = 0
        try:
            sent = self._sock.send(reply)
        except OSError:
            sent = 0  # the transport tries again, and finds out why
        self.unsent = reply[sent:]
        return not self.unsent

    def _receive(self, poll: select.poll) -> bool:
        """Receive something; False where nothing came, nobody is there, or the bell rang."""
        began = time.monotonic()
        window = self._view[self._filled :]
        looks_until = began + (_LOOK_SECONDS if self._quick or self._filled else 0)
        count = -1
        while count < 0:
            count = self._come(window)
            if count < 0 and time.monotonic() > looks_until:
                break
            if count < 0:
                sched_yield()
        if count < 0:
            poll.poll(REST_SECONDS * 1000)
            count = self._come(window)
        if not self._filled:
            self._quick = time.monotonic() - began < _QUICK_SECONDS
        if count <= 0:
            return False
        self._filled += count
        return True

    def _come(self, window: memoryview) -> int:
        """Bytes received, -1 where none are there yet; 0 at the end, or for a failure."""
        try:
            return self._sock.recv_into(window)
        except BlockingIOError:
            return -1
        except OSError:
            return 0
