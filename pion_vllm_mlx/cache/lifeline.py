"""The connection that keeps an embedded server alive, and tells when it has gone.

An embedded server ends by itself when no connection has been open for a while.  A lifeline is
one connection that carries nothing after its greeting: as long as it is open the server stays,
and when it reads end-of-file the server is no more.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pion_vllm_mlx.cache.connection import Address
from pion_vllm_mlx.cache.data_folder import ServerStatus
from pion_vllm_mlx.errors import (
    AuthenticationRequired,
    DeadlineExceeded,
    ProtocolError,
    StoreUnavailable,
)
from pion_vllm_mlx.wire.encode import array_header, bulk
from pion_vllm_mlx.wire.replies import ReplyParser

LIBRARY_NAME = "pion-embedded"


class GreetingRefused(StoreUnavailable):
    """The right server answers and does not let us in; knocking again will not help."""


@dataclass
class Lifeline:
    """An open, greeted connection to the server whose status named ``pid``."""

    connection: socket.socket
    address: Address
    pid: int

    def alive(self) -> bool:
        """Whether the server still holds the other end; does not talk to it."""
        poller = select.poll()
        try:
            poller.register(self.connection, select.POLLIN)
            if not poller.poll(0):
                return True
            return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except (OSError, ValueError):  # ValueError: closed on our side
            return False

    def close(self) -> None:
        """Let go of the server."""
        self.connection.close()


def greet(status: ServerStatus, password: str | None, seconds: float) -> Lifeline:
    """Connect to the server of ``status``: its Unix socket, else its port on this machine.

    ``seconds`` is for each of the two.  Raises ``StoreUnavailable`` when neither answers in
    time or the one that does is another server, ``GreetingRefused`` when it is the right one
    and wants another password.
    """
    # Text, not the error: an error kept in a local keeps the frames, and so the callers' handles.
    reason = "the server's status names no address"
    for address in _addresses(status):
        try:
            return _greet_at(address, status.pid, password, seconds)
        except GreetingRefused:
            raise
        except StoreUnavailable as error:
            reason = str(error)
    raise StoreUnavailable(reason)


def _addresses(status: ServerStatus) -> Iterator[Address]:
    if status.unixsocket is not None:
        yield Address(path=str(status.unixsocket))
    if status.port:
        yield Address("127.0.0.1", status.port)


def _greet_at(address: Address, pid: int, password: str | None, seconds: float) -> Lifeline:
    deadline = time.monotonic() + seconds
    connection = _connect(address, seconds)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        commands = [
            ("CLIENT", "SETINFO", "LIB-NAME", LIBRARY_NAME),
            ("INFO", "server"),
            ("PING",),
        ]
        if password is not None:
            commands.insert(0, ("AUTH", password))
        info, pong = _exchange(connection, commands, deadline)[-2:]
        if isinstance(pong, AuthenticationRequired):
            raise GreetingRefused(f"the server at {address} wants another password") from pong
        if pong != "PONG":
            raise StoreUnavailable(f"what listens at {address} is no server of this package")
        # A port or a process id left in a status file may have been given to somebody else.
        answering = _process_id(info)
        if answering != pid:
            raise StoreUnavailable(f"the server at {address} is process {answering}, not {pid}")
        undo.pop_all()
    return Lifeline(connection, address, pid)


def _connect(address: Address, seconds: float) -> socket.socket:
    family = socket.AF_INET if address.path is None else socket.AF_UNIX
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(seconds)
    target = (address.host, address.port) if address.path is None else address.path
    try:
        connection.connect(target)
    except OSError as error:
        connection.close()
        raise StoreUnavailable(f"nobody answers at {address}: {error}") from error
    return connection


def _exchange(
    connection: socket.socket, commands: list[tuple[str, ...]], deadline: float
) -> list[object]:
    """Send the commands at once and return their replies; errors are returned, not raised."""
    parser = ReplyParser()
    request = b"".join(
        array_header(len(words)) + b"".join(bulk(word.encode()) for word in words)
        for words in commands
    )
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.sendall(request)
        while len(parser.replies) < len(commands):
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            received = connection.recv(4096)
            if not received:
                raise StoreUnavailable("the server closed the connection")
            parser.feed(received)
    except TimeoutError as error:
        raise DeadlineExceeded("the server does not answer in time") from error
    except (OSError, ProtocolError) as error:
        raise StoreUnavailable(f"the server's greeting failed: {error}") from error
    return list(parser.replies)


def _process_id(info: object) -> int | None:
    """``process_id`` of an INFO reply; None where there is none."""
    if not isinstance(info, (bytes, bytearray, memoryview)):
        return None
    for line in bytes(info).splitlines():
        name, _, value = line.partition(b":")
        if name == b"process_id" and value.isdigit():
            return int(value)
    return None
