"""At the doors of a worker that is down: whoever comes is told so at once, and waits for nobody."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pion_vllm_mlx.errors import WorkerDown
from pion_vllm_mlx.wire.encode import error

#: so many that were told may not have left yet, and none for longer.
_MOST_LEAVING = 16
_LEAVING_SECONDS = 5.0
#: nobody is accepted for so long where that takes more descriptors than there are.
_REST_SECONDS = 1.0
_SENT_BYTES = 64 << 10


@dataclass
class StandIn:
    """Answers for one worker. ``resp`` and ``mute``: its listening sockets, by what is spoken.

    Who was told is let go of after it has sent something: a socket that closes before makes
    the sending fail, and then nobody reads; who sends nothing is, after a while. The binary lane
    has no answer without a question: there the connection ends.
    """

    worker: int
    resp: Sequence[socket.socket]
    mute: Sequence[socket.socket] = ()
    #: who was told, in that order, and when it is let go of
    leaving: dict[socket.socket, float] = field(default_factory=dict)
    rests_until: float = -math.inf

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """What to watch for reading."""
        doors = () if self.rests_until > -math.inf else (*self.resp, *self.mute)
        return (*doors, *self.leaving)

    @property
    def due(self) -> float:
        """When ``tidy`` has something to do, as time.monotonic counts; infinity: never."""
        resting = [self.rests_until] if self.rests_until > -math.inf else []
        return min([*resting, *self.leaving.values()], default=math.inf)

    def tidy(self, now: float) -> None:
        """Let go of who was told long ago; accept again after a rest."""
        for sock in [sock for sock, until in self.leaving.items() if until <= now]:
            del self.leaving[sock]
            sock.close()
        if self.rests_until <= now:
            self.rests_until = -math.inf

    def attend(self, sock: socket.socket) -> None:
        """One of the sockets can be read. Ends as soon as nothing more is to be had."""
        if self.leaving.pop(sock, None) is not None:
            with contextlib.suppress(OSError), sock:  # who came has gone
                sock.recv(_SENT_BYTES)
            return
        if sock not in (*self.resp, *self.mute):
            return  # it could be read, but others came and it was let go of
        sock.setblocking(False)
        try:
            while True:
                self._receive(sock.accept()[0], mute=sock in self.mute)
        except (BlockingIOError, ConnectionError):
            pass  # nobody is left, or who came has gone
        except OSError:
            # no descriptor is free: the door stays readable, and looking again at once is in vain
            self.rests_until = time.monotonic() + _REST_SECONDS

    def _receive(self, connection: socket.socket, *, mute: bool) -> None:
        if mute:
            connection.close()
            return
        connection.setblocking(False)
        self.leaving[connection] = time.monotonic() + _LEAVING_SECONDS
        if len(self.leaving) > _MOST_LEAVING:
            self._let_go_of_first()
        with contextlib.suppress(OSError):
            connection.send(self._sentence())
            connection.shutdown(socket.SHUT_WR)

    def _sentence(self) -> bytes:
        why = "it cannot be started, the server's log says why"
        return error(WorkerDown.code, f"worker {self.worker} is down: {why}")

    def close(self) -> None:
        """Let go of all that were told."""
        while self.leaving:
            self._let_go_of_first()

    def _let_go_of_first(self) -> None:
        first = next(iter(self.leaving))
        del self.leaving[first]
        first.close()
