"""TCP between two processes of one machine.

Congestion control that paces what it sends by an estimate of the path (BBR, the default of some
Linux systems) holds back bytes that never leave the machine: with it, loopback carried half as
much here as without, and now and then all of it. Other systems have nothing to set.
"""

from __future__ import annotations

import contextlib
import socket
import sys

_LOOPBACK = ("127.", "::ffff:127.")
#: part of every Linux kernel, open to every user, and without pacing
_UNPACED = b"reno"


def is_loopback(address: str) -> bool:
    """Whether packets to a numeric address stay on this machine."""
    return address == "::1" or address.startswith(_LOOPBACK)


def unpaced(sock: socket.socket) -> None:
    """Send at once what the other side has room for. For TCP over loopback alone."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
