"""Staying at a socket for a moment after a reply: the next request may be on its way.

A client that waits for every reply sends its next request within microseconds. Going to
sleep in the selector and being woken again costs more than a short operation, most of all
where the other processor has gone to sleep too. So after a reply to such a client the event
loop's thread looks at the socket itself, and lets the client run in between where both share
a processor.

Nobody else may notice. It lingers only for a client that has kept sending at once, and only
where nobody else has asked for anything for a while: ``wait`` for one request, ``turn`` in
all before the event loop looks at every other connection. Having waited in vain costs the
client its place until it was quick again for a while, so a connection that rests takes no
time.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from os import sched_yield

#: quick requests in a row after which it pays to linger, and after having waited in vain.
TRUST, TRUST_AGAIN = 4, 12
#: measured on Linux alone; elsewhere the selector wakes us.
_LINGERS = sys.platform == "linux"


@dataclass(frozen=True)
class Moments:
    """How long, in seconds.

    ``wait``: the next request may take; a processor that slept needs tens of microseconds.
    ``turn``: others may have to wait. ``quick``: the time from a reply to the next request
    of a client for whom it pays. ``alone``: nobody else asked for anything.
    """

    wait: float = 60e-6
    turn: float = 250e-6
    quick: float = 150e-6
    alone: float = 0.2


class Linger:
    """Looks at one connection's socket, which a transport reads otherwise."""

    def __init__(self, descriptor: int, moments: Moments = Moments()) -> None:
        self._descriptor = descriptor
        self._moments = moments
        self._socket: socket.socket | None = None
        self._asked = 0
        self._left = 0.0
        self._alone_from = 0.0
        self._turn_ends = 0.0
        self._trust = -TRUST_AGAIN

    def arrived(self, asked: int) -> bool:
        """Note that the selector brought something; whether to linger once it is answered.

        ``asked`` is how many commands everybody has sent to the server so far.
        """
        now = time.monotonic()
        if asked != self._asked:
            self._alone_from = now + self._moments.alone
            self._trust = -TRUST_AGAIN
        elif now < self._alone_from:
            self._trust = -TRUST_AGAIN
        elif now - self._left < self._moments.quick:
            self._trust += 1
        else:
            self._trust = min(self._trust, -TRUST)
        self._turn_ends = now + self._moments.turn
        return self._trust >= 0 and _LINGERS

    def left(self, asked: int) -> None:
        """Note that the selector is asked again, and what everybody has asked until now."""
        self._asked = asked
        self._left = time.monotonic()

    def receive(self, window: memoryview) -> int:
        """Bytes of the next request, 0 when none came in time: then the selector says why."""
        now = time.monotonic()
        if now > self._turn_ends:
            if now > self._turn_ends + self._moments.wait:
                # others want the processor too, and took it when we let the client run
                self._trust = -TRUST_AGAIN
            return 0
        try:
            sock = self._socket or self._open()
            sched_yield()
            return sock.recv_into(window)
        except BlockingIOError:
            return self._wait(window, now + self._moments.wait)
        except OSError:
            return 0

    def _wait(self, window: memoryview, ends_at: float) -> int:
        assert self._socket is not None
        while time.monotonic() < ends_at:
            sched_yield()
            try:
                return self._socket.recv_into(window)
            except BlockingIOError:
                continue
            except OSError:
                return 0
        self._trust = -TRUST_AGAIN
        return 0

    def send(self, data: bytes) -> bytes:
        """Send what leaves at once; the rest, or what fails, is left to the transport."""
        assert self._socket is not None
        try:
            return data[self._socket.send(data) :]
        except OSError:
            return data

    def _open(self) -> socket.socket:
        """The transport's socket once more: what it hands out cannot be read. Raises OSError."""
        self._socket = socket.socket(fileno=os.dup(self._descriptor))
        self._socket.setblocking(False)
        return self._socket

    def close(self) -> None:
        """Give the descriptor back; the connection is lost."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
