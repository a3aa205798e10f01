"""The connection that keeps an embedded server alive, and tells when it has gone.

An embedded server ends by itself when no connection has been open for a while.  A lifeline is
one connection that carries nothing after its greeting: as long as it is open the server stays,
and when it reads end-of-file the server is no more.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pion_vllm_mlx.cache.channel import Address, Channel
from pion_vllm_mlx.cache.connection import info_fields
from pion_vllm_mlx.cache.data_folder import ServerStatus
from pion_vllm_mlx.errors import (
    AuthenticationRequired,
    DeadlineExceeded,
    GreetingRefused,
    ProtocolError,
    StoreUnavailable,
)
from pion_vllm_mlx.wire.resp import request_buffers

LIBRARY_NAME = "pion-embedded"


@dataclass
class Lifeline:
    """An open, greeted connection to the server whose status named ``pid``."""

    channel: Channel
    pid: int

    @property
    def address(self) -> Address:
        """Where the server listens."""
        return self.channel.address

    def alive(self) -> bool:
        """Whether the server still holds the other end; does not talk to it."""
        try:
            return not self.channel.is_stale()
        except (OSError, ValueError):  # ValueError: closed on our side
            return False

    def close(self) -> None:
        """Let go of the server."""
        self.channel.close()


def greet(status: ServerStatus, password: str | None, seconds: float) -> Lifeline:
    """Connect to the server of ``status``: its Unix socket, else its port on this machine.

    ``seconds`` is for each of the two.  Raises ``StoreUnavailable`` when neither answers in
    time or the one that does is another server, ``DeadlineExceeded`` when one of them takes the
    connection and is silent, ``GreetingRefused`` when it is the right one and wants another
    password.
    """
    # Text, not the error: an error kept in a local keeps the frames, and so the callers' handles.
    reason = "the server's status names no address"
    kind: type[StoreUnavailable] = StoreUnavailable
    for address in _addresses(status):
        try:
            return _greet_at(address, status.pid, password, seconds)
        except GreetingRefused:
            raise
        except StoreUnavailable as error:
            reason = str(error)
            kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else kind
    raise kind(reason)


def _addresses(status: ServerStatus) -> Iterator[Address]:
    if status.unixsocket is not None:
        yield Address(path=str(status.unixsocket))
    if status.port:
        yield Address("127.0.0.1", status.port)


def _greet_at(address: Address, pid: int, password: str | None, seconds: float) -> Lifeline:
    ends_at = time.monotonic() + seconds
    try:
        channel = Channel(address, ends_at, seconds)
    except OSError as error:
        raise StoreUnavailable(f"nobody answers at {address}: {error}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(channel.close)
        commands: list[tuple[str, ...]] = [
            ("CLIENT", "SETINFO", "LIB-NAME", LIBRARY_NAME),
            ("INFO", "server"),
            ("PING",),
        ]
        if password is not None:
            commands.insert(0, ("AUTH", password))
        try:
            replies = channel.exchange(deque(request_buffers(commands)), len(commands), ends_at)
        except (OSError, ProtocolError) as error:
            raise StoreUnavailable(f"the server's greeting failed: {error}") from error
        info, pong = replies[-2:]
        if isinstance(pong, AuthenticationRequired):
            raise GreetingRefused(f"the server at {address} wants another password") from pong
        if pong != "PONG":
            raise StoreUnavailable(f"what listens at {address} is no server of this package")
        # A port or a process id left in a status file may have been given to somebody else.
        answering = info_fields(info).get("process_id")
        if answering != str(pid):
            raise StoreUnavailable(f"the server at {address} is process {answering}, not {pid}")
        undo.pop_all()
    return Lifeline(channel, pid)
