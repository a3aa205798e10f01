"""A short reply, sent by the thread that made it.

To wake the event loop so that it sends a few kilobytes takes longer than sending them. So the
thread sends, and the event loop hears of it while the client reads. It may do so while the
connection executes that one operation and nothing of earlier replies is unsent: then nobody else
writes, and what the socket does not take at once is left to the transport.
"""

from __future__ import annotations

import socket
import threading


class EarlyReply:
    """The right to send one reply of a connection; the event loop gives it, and takes it back."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._left: bytes | None = None
        # a descriptor that is closed while it is written to may be somebody else's by then
        self._lock = threading.Lock()

    def open(self, sock: socket.socket) -> None:
        """From now on a reply may be sent to a socket that does not block."""
        self._socket = sock

    def send(self, reply: bytes) -> None:
        """Send it where that is allowed, as much as goes at once. Any thread."""
        with self._lock:
            sock, self._socket = self._socket, None
            if sock is None:
                return
            try:
                self._left = reply[sock.send(reply) :]
            except OSError:
                return  # the transport tries again, and finds out why

    def close(self) -> bytes | None:
        """Nothing is sent from now on; what is left of a reply that was, None where none was."""
        with self._lock:
            left, self._left, self._socket = self._left, None, None
        return left
