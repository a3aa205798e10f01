"""At the doors of a worker that is down: whoever comes is told so at once, and waits for nobody."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pion_vllm_mlx.errors import WorkerDown
from pion_vllm_mlx.wire.encode import error

#: so many that were told may not have left yet.
_MOST_LEAVING = 64
_SENT_BYTES = 64 << 10


@dataclass
class StandIn:
    """Answers for one worker. ``resp`` and ``mute``: its listening sockets, by what is spoken.

    Who was told is let go of after it has sent something: a socket that closes before makes
    the sending fail, and then nobody reads. The binary lane has no answer without a question:
    there the connection ends.
    """

    worker: int
    resp: Sequence[socket.socket]
    mute: Sequence[socket.socket] = ()
    leaving: deque[socket.socket] = field(default_factory=deque)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """What to watch for reading."""
        return (*self.resp, *self.mute, *self.leaving)

    def attend(self, sock: socket.socket) -> None:
        """One of the sockets can be read. Ends as soon as nothing more is to be had."""
        with contextlib.suppress(OSError):  # nobody is left, or who came has gone
            if sock in self.leaving:
                self.leaving.remove(sock)
                with sock:
                    sock.recv(_SENT_BYTES)
                return
            sock.setblocking(False)
            while True:
                self._receive(sock.accept()[0], mute=sock in self.mute)

    def _receive(self, connection: socket.socket, *, mute: bool) -> None:
        if mute:
            connection.close()
            return
        connection.setblocking(False)
        self.leaving.append(connection)
        if len(self.leaving) > _MOST_LEAVING:
            self.leaving.popleft().close()
        with contextlib.suppress(OSError):
            connection.send(self._sentence())
            connection.shutdown(socket.SHUT_WR)

    def _sentence(self) -> bytes:
        why = "it cannot be started, the server's log says why"
        return error(WorkerDown.code, f"worker {self.worker} is down: {why}")

    def close(self) -> None:
        """Let go of all that were told."""
        while self.leaving:
            self.leaving.popleft().close()
