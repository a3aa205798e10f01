"""Ending a connection whose client may still be sending.

Closing a socket with unread input resets the connection, and a reset may overtake replies
that are still on their way. So the server says that it is done, reads and forgets what still
comes, and closes when the client has closed, or has had time and room enough to notice.
"""

from __future__ import annotations

import asyncio

LINGER_SECONDS = 1.0
LINGER_BYTES = 16 << 20
#: what is received in here is never looked at, so that all connections may share it.
_SCRATCH = memoryview(bytearray(64 << 10))


class Farewell:
    """The end of one connection, from its last reply on. Reading must go on."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._left = LINGER_BYTES
        if transport.is_closing():
            return  # the output limit may have ended it with the last reply
        if transport.can_write_eof():
            transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.close)
        else:
            transport.close()

    def buffer(self) -> memoryview:
        """Where what still comes is received."""
        return _SCRATCH

    def received(self, nbytes: int) -> None:
        """Take note of ``nbytes`` that nobody needs."""
        self._left -= nbytes
        if self._left < 0:
            self._transport.close()
