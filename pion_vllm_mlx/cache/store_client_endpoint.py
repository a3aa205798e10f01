"""Where the store is: the connections that a place leads to, and pauses after failures."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pion_vllm_mlx.cache.connection import Address, RespConnection, info_fields
from pion_vllm_mlx.cache.embedded import EmbeddedServer, attach
from pion_vllm_mlx.cache.store_advice import nobody_listens, what_helps
from pion_vllm_mlx.cache.store_url import Place, parse_url
from pion_vllm_mlx.config import ADMIN_NAME, AFFINITY_OFFSET
from pion_vllm_mlx.errors import (
    AuthenticationRequired,
    CommandError,
    ConfigError,
    PermissionRefused,
    PionError,
    StoreUnavailable,
    WrongPassword,
)

__all__ = [
    "BackOff",
    "Door",
    "Endpoint",
    "Place",
    "is_local",
    "nobody_listens",
    "parse_url",
    "what_helps",
]

_LOOPBACK = ("localhost", "::1")
_LOCKED_OUT = (AuthenticationRequired, WrongPassword, PermissionRefused)

T = TypeVar("T")


def is_local(address: Address) -> bool:
    """Whether an address leads to this host."""
    return address.path is not None or address.host in _LOOPBACK or address.host.startswith("127.")


#: longest wait for a server on this host that is not needed yet.
GREETING_SECONDS = 0.25


class BackOff:
    """After a failure the store is left alone for a while: a dead one costs once, not always."""

    FIRST_SECONDS = 1.0
    LONGEST_SECONDS = 30.0

    def __init__(self) -> None:
        self._until = 0.0
        self._pause = 0.0
        self._reason = ""

    def check(self) -> None:
        """Raises StoreUnavailable while the pause lasts."""
        left = self.left()
        if left > 0:
            raise StoreUnavailable(f"{self._reason} (tried again in {left:.1f} s)")

    def left(self) -> float:
        """Seconds until the store may be tried again; none left: zero or less."""
        return self._until - time.monotonic()

    def failed(self, reason: str) -> None:
        """Begins a pause, twice as long as the one before."""
        self._pause = min(max(self.FIRST_SECONDS, 2 * self._pause), self.LONGEST_SECONDS)
        self._until, self._reason = time.monotonic() + self._pause, reason

    def succeeded(self) -> None:
        self._until = self._pause = 0.0

    def ended(self) -> None:
        """The pause is over; should the next try fail, the next one is twice as long."""
        self._until = 0.0


class Door:
    """A way into the server, and the pause that a failure begins."""

    def __init__(self, connection: Callable[[], RespConnection]) -> None:
        self._connection = connection
        self._back_off = BackOff()

    def paused(self) -> bool:
        """Whether a failure was so short ago that nothing is tried."""
        return self._back_off.left() > 0

    def through(self, call: Callable[[RespConnection], T]) -> T:
        """What ``call`` returns, which asks the server; its failure begins a pause, a refusal not.

        Raises StoreUnavailable, at once while the pause lasts, and what ``call`` raises.
        """
        result = self._tried(call)
        self._back_off.succeeded()
        return result

    def open(self) -> None:
        """Finds the way in. That proves nothing: the next pause is longer than the last one.

        Raises StoreUnavailable, at once while a pause lasts.
        """
        self._tried(lambda connection: None)

    def answered(self) -> None:
        """The server is alive, as somebody more patient found: it is asked again at once.

        It may be too slow for those who come here: only what comes through proves otherwise.
        """
        self._back_off.ended()

    def _tried(self, call: Callable[[RespConnection], T]) -> T:
        self._back_off.check()
        try:
            return call(self._connection())
        except _LOCKED_OUT as error:
            self._back_off.failed(str(error))
            raise StoreUnavailable(f"{error.code} {error}") from error
        except OSError as error:
            self._back_off.failed(str(error))
            raise StoreUnavailable(str(error)) from error
        except StoreUnavailable as error:
            self._back_off.failed(str(error))
            raise


@dataclass
class _Known:
    """What the server said about itself: ``socket`` is that of all workers, empty for none.

    ``own_port`` is the one of the worker that answered, which is number ``worker``.
    """

    workers: int = 1
    tcp_port: int = 0
    own_port: int = 0
    worker: int = 0
    socket: str = ""


class Endpoint:
    """Leads to the connections; starts an embedded server, and finds the Unix socket.

    ``door`` is the one of all workers, ``door_of`` that of one of several. A loopback TCP
    address is left for the Unix socket of the very same server, which is two to three times
    as fast.
    """

    def __init__(
        self,
        place: Place,
        password: str | None,
        deadline_seconds: float,
        *,
        username: str | None = None,
    ) -> None:
        """``username`` goes before the one that ``place`` names. Raises ConfigError."""
        self._place = place
        self._username = place.username if username is None else username
        if self._username is not None and not password:
            raise ConfigError(
                f"the user {self._username} needs a password: password= or PION_REQUIREPASS"
            )
        self._password = password
        self._deadline = deadline_seconds
        self._embedded: EmbeddedServer | None = None
        self._connection: RespConnection | None = None
        self._known: _Known | None = _Known() if place.embedded else None
        self._ways: dict[tuple[int, Address], tuple[Door, RespConnection]] = {}
        self.door = Door(self._ready)
        if place.address is not None:
            self._connection = self.connect(place.address)

    @property
    def tenant(self) -> bool:
        """Whether it logs in as one of several users, who is refused what concerns them all."""
        return self._username not in (None, ADMIN_NAME)

    @property
    def local(self) -> bool:
        """Whether files of the server may be read here; a tenant is told of none."""
        if self.tenant:
            return False
        return self._on_this_host()

    def _on_this_host(self) -> bool:
        address = self._place.address
        return self._place.embedded or (address is not None and is_local(address))

    def connection(self) -> RespConnection:
        """The connection. Raises StoreUnavailable where an embedded server does not start."""
        if self._connection is None:
            self._embedded = attach(
                self._place.folder, patience=self._deadline, password=self._password
            )
            self._connection = self.connect(self._embedded.address)
        return self._connection

    def greet(self) -> None:
        """Connects to a server on this host before it is needed.

        One that does not answer at once is not waited for: the first use asks again.
        """
        if self._place.address is None or not self._on_this_host():
            return
        connection = self.connection()
        try:
            with connection.deadline(GREETING_SECONDS):
                self._known = self._learn(connection)
        except (PionError, OSError):
            connection.close()

    def address(self) -> Address | None:
        """Where the server should be; None for an embedded one that is not attached to."""
        return self._connection.address if self._connection is not None else None

    def workers(self) -> int:
        """How many workers the server has; asks it the first time. Raises StoreUnavailable."""
        if self._known is None:
            self.door.open()
        known = self._known  # another thread may forget it
        return known.workers if known is not None else 1

    def door_of(self, worker: int) -> Door:
        """The door of one worker of several. Raises StoreUnavailable where none can be found."""
        address = self._address_of(worker)
        way = self._ways.get((worker, address))
        if way is None:
            connection = self.connect(address)
            # another thread may be here too: the first one's door is everybody's
            made = Door(lambda: connection), connection
            way = self._ways.setdefault((worker, address), made)
            if way is not made:
                connection.close()
            self._close_former(worker, address)
        return way[0]

    def connect(
        self,
        address: Address,
        *,
        silence_seconds: float | None = None,
        on_silence: Callable[[], None] | None = None,
    ) -> RespConnection:
        """A connection of its own to an address of this server.

        A server that is silent for ``silence_seconds``, else for the deadline, is given up;
        with ``on_silence``, which is then called, where that raises.
        """
        return RespConnection(
            address,
            deadline_seconds=self._deadline,
            password=self._password,
            username=self._username,
            silence_seconds=self._deadline if silence_seconds is None else silence_seconds,
            on_silence=on_silence,
        )

    def ask_again(self) -> None:
        """What the server said about itself may be over."""
        self._known = None if self._place.address is not None else self._known

    def forget(self) -> None:
        """The same after a failure: begins anew, at the address that was given.

        The worker that failed may hold the connection to the address of all; a new one is
        taken by a worker that is well.
        """
        if self._place.address is None:
            return
        self._known = None
        if self._connection is None:
            return
        if self._connection.address != self._place.address:
            self._connection.close()
            self._connection = self.connect(self._place.address)
        else:
            self._connection.reopen()

    def close(self) -> None:
        for connection in (self._connection, *(way[1] for way in list(self._ways.values()))):
            if connection is not None:
                connection.close()
        if self._embedded is not None:
            self._embedded.close()

    # -- inside ---------------------------------------------------------------

    def _close_former(self, worker: int, address: Address) -> None:
        """A worker that moved leaves no connection open to where it was."""
        for way in [way for way in list(self._ways) if way[0] == worker and way[1] != address]:
            former = self._ways.pop(way, None)
            if former is not None:
                former[1].close()

    def _ready(self) -> RespConnection:
        """The connection of all workers, as good as it gets."""
        if self._embedded is not None and not self._embedded.alive():
            if self._connection is not None:
                self._connection.close()
            self._connection = self.connect(self._embedded.ensure())
        if self._known is None:
            self._known = self._learn(self.connection())
        return self.connection()

    def _learn(self, connection: RespConnection) -> _Known:
        """What the server says about itself; moves to its Unix socket if it offers one."""
        try:
            fields = _server_info(connection)
        except CommandError:
            return _Known()  # it refuses INFO: the command itself will say why
        socket = fields.get("unix_socket", "")
        known = _Known(
            workers=_number(fields, "workers", 1),
            tcp_port=_number(fields, "tcp_port", 0),
            own_port=_number(fields, "affinity_port", 0),
            worker=_number(fields, "worker_id", 0),
        )
        if connection.address.path is not None:
            known.socket = connection.address.path
        elif socket and is_local(connection.address) and self._move_to(socket, fields):
            known.socket = socket
        return known

    def _move_to(self, path: str, known: dict[str, str]) -> bool:
        """Whether the Unix socket leads to the same server; if so it is used from now on."""
        if not _is_own_socket(path):
            return False
        other = self.connect(Address(path=path))
        try:
            # The same process must answer: a forwarded port leads to another host.
            same = _server_info(other).get("process_id") == known.get("process_id")
        except PionError:
            same = False
        if not same:
            other.close()
            return False
        self.connection().close()
        self._connection = other
        return True

    def _address_of(self, worker: int) -> Address:
        """A worker's own Unix socket beside that of all, else its own port.

        Raises StoreUnavailable where its port can be any one.
        """
        known, shared = self._known or _Known(), self._place.address or Address()
        path = f"{known.socket}.{worker}"
        if known.socket and _is_own_socket(path):
            return Address(path=path)
        if shared.tls is not None and shared.path is None:
            raise StoreUnavailable("a worker's own port has no TLS: use one worker, or its socket")
        if known.own_port != known.tcp_port + AFFINITY_OFFSET + known.worker:
            raise StoreUnavailable(f"the port of worker {worker} cannot be known: -p 0")
        port = shared.port
        if shared.path is not None or port == known.own_port:
            port = known.tcp_port
        return Address(shared.host, port + AFFINITY_OFFSET + worker)


def _server_info(connection: RespConnection) -> dict[str, str]:
    return info_fields(connection.command("INFO", "server"))


def _number(fields: dict[str, str], name: str, otherwise: int) -> int:
    """A field of INFO as a number; servers of others have other fields."""
    text = fields.get(name, "")
    return int(text) if text.isdigit() and len(text) < 10 else otherwise


def _is_own_socket(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()
