"""Where the store is: a URL, and the connection it leads to.

============================  ==================================================
``tcp://host:port``           a server anywhere
``unix:///path``              a server on this host
``embedded:///path``          the server that owns this data folder; started if none does
``embedded:``                 the same for the user's own data folder
============================  ==================================================
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from pion_vllm_mlx.cache.connection import Address, RespConnection, info_fields
from pion_vllm_mlx.cache.embedded import EmbeddedServer, attach
from pion_vllm_mlx.errors import (
    AuthenticationRequired,
    CommandError,
    ConfigError,
    GreetingRefused,
    PionError,
    StoreUnavailable,
    WrongPassword,
)

_LOOPBACK = ("localhost", "::1")


@dataclass(frozen=True)
class Place:
    """What a URL says: an address, or the folder of an embedded server."""

    address: Address | None = None
    embedded: bool = False
    folder: str | None = None


def parse_url(url: str) -> Place:
    """The place that ``url`` names; raises ConfigError, a ValueError, for another URL."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("no password belongs in a URL: use password= or PION_REQUIREPASS")
    if parts.query or parts.fragment:
        raise ConfigError(f"{url!r}: nothing may follow the place; write ? and # as %3F and %23")
    if "\0" in path:
        raise ConfigError(f"{url!r}: a path holds no NUL character")
    if parts.scheme == "embedded" and not parts.netloc:
        return Place(embedded=True, folder=path or None)
    if parts.scheme == "unix" and path and not parts.netloc:
        return Place(Address(path=path))
    if parts.scheme == "tcp" and parts.hostname and parts.path in ("", "/"):
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r}: {error}") from None
        return Place(Address(host=parts.hostname, port=1974 if port is None else port))
    raise ConfigError(
        f"{url!r} is no store: use tcp://host:port, unix:///path, embedded:///path or embedded:"
    )


def is_local(address: Address) -> bool:
    """Whether an address leads to this host."""
    return address.path is not None or address.host in _LOOPBACK or address.host.startswith("127.")


def what_helps(error: PionError) -> str:
    """What the user can do about a store that is not to be had; empty where nobody can tell."""
    if isinstance(error, AuthenticationRequired | WrongPassword | GreetingRefused):
        return "give the server's password as password= or in PION_REQUIREPASS"
    if isinstance(error, CommandError) and error.sentence.startswith("unknown command"):
        return "what answers there is no pion-server"
    cause = error.__cause__
    # A socket that is not there has no file name in its error; a data folder that is not has.
    missing = isinstance(cause, FileNotFoundError) and cause.filename is None
    if missing or isinstance(cause, ConnectionRefusedError):
        return 'start "pion-server --kvcache", or use url="embedded:", which needs none'
    return ""


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
        left = self._until - time.monotonic()
        if left > 0:
            raise StoreUnavailable(f"{self._reason} (tried again in {left:.1f} s)")

    def failed(self, reason: str) -> None:
        """Begins a pause, twice as long as the one before."""
        self._pause = min(max(self.FIRST_SECONDS, 2 * self._pause), self.LONGEST_SECONDS)
        self._until, self._reason = time.monotonic() + self._pause, reason

    def succeeded(self) -> None:
        self._until = self._pause = 0.0


class Endpoint:
    """Leads to the connection; starts an embedded server, and finds the Unix socket.

    ``connection`` is what commands go through. A loopback TCP address is left for the
    Unix socket of the very same server, which is two to three times as fast.
    """

    def __init__(self, place: Place, password: str | None, deadline_seconds: float) -> None:
        self._place = place
        self._password = password
        self._deadline = deadline_seconds
        self._embedded: EmbeddedServer | None = None
        self._connection: RespConnection | None = None
        self._asked_for_socket = False
        if place.address is not None:
            self._connection = self._connect(place.address)

    @property
    def local(self) -> bool:
        """Whether files of the server may be read here."""
        return self._place.embedded or (
            self._place.address is not None and is_local(self._place.address)
        )

    def connection(self) -> RespConnection:
        """The connection. Raises StoreUnavailable where an embedded server does not start."""
        if self._connection is None:
            self._embedded = attach(
                self._place.folder, patience=self._deadline, password=self._password
            )
            self._connection = self._connect(self._embedded.address)
        return self._connection

    def renew(self) -> None:
        """After a failure: joins or starts the embedded server again, if it has gone."""
        if self._embedded is None or self._embedded.alive():
            return
        if self._connection is not None:
            self._connection.close()
        self._connection = self._connect(self._embedded.ensure())

    def prefer_unix_socket(self) -> None:
        """Moves from loopback TCP to the server's Unix socket, once, if it offers one."""
        address = self._place.address
        if self._asked_for_socket or address is None or address.path or not is_local(address):
            return
        self._asked_for_socket = True
        connection = self.connection()
        try:
            known = _server_info(connection)
        except CommandError:
            return  # it refuses INFO: the command itself will say why
        path = known.get("unix_socket", "")
        if not path or not _is_own_socket(path):
            return
        other = self._connect(Address(path=path))
        try:
            # The same process must answer: a forwarded port leads to another host.
            same = _server_info(other).get("process_id") == known.get("process_id")
        except PionError:
            same = False
        if same:
            connection.close()
            self._connection = other
        else:
            other.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._embedded is not None:
            self._embedded.close()

    def _connect(self, address: Address) -> RespConnection:
        return RespConnection(
            address,
            deadline_seconds=self._deadline,
            password=self._password,
            silence_seconds=self._deadline,
        )


def _server_info(connection: RespConnection) -> dict[str, str]:
    return info_fields(connection.command("INFO", "server"))


def _is_own_socket(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()
