"""A plain client for those who know the commands: one call, one reply, errors raised.

The adapters of other projects (stores, remote backends, attention clients) stand on
this class; below it is the one connection class of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.errors import CommandError, ConfigError, ServerRefused, StoreUnavailable
from pion_vllm_mlx.wire.resp import Part, Reply

Answer: TypeAlias = Any

#: what one pipeline sends before it reads the replies.
PIPELINE_BYTES = 64 << 20


class RespClient:
    """One server. Thread-safe as its connection is; a context manager."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1974,
        timeout: float = 60.0,
        password: str | None = None,
        username: str | None = None,
    ) -> None:
        """``timeout`` seconds hold for each call from its start to its reply's last byte.

        ``username`` is a tenant's; it needs its ``password``. Raises ConfigError.
        """
        if username is not None and not password:
            raise ConfigError(f"the user {username} needs a password")
        self.host = host
        self.port = port
        self.timeout = timeout
        self._login = password, username
        self._connection = RespConnection(
            Address(host, port), deadline_seconds=timeout, password=password, username=username
        )

    def __enter__(self) -> RespClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def at(self, host: str, port: int, timeout: float) -> RespClient:
        """A client of another address, of the same user."""
        return RespClient(host, port, timeout, *self._login)

    def close(self) -> None:
        """Close the socket; the next command opens a new one."""
        self._connection.close()

    def cmd(self, *parts: Part) -> Answer:
        """One command's reply: strings, simple ones too, as ``bytes``, nil as None.

        Raises ServerRefused with the server's text, StoreUnavailable.
        """
        try:
            return _plain(self._connection.command(*parts))
        except CommandError as error:
            raise _refused(error) from error

    def pipeline(self, commands: Sequence[Sequence[Part]]) -> list[Answer]:
        """The replies of several commands, sent together in as few steps as memory allows.

        Raises ServerRefused for the first that is refused, after all were sent.
        """
        replies: list[Reply] = []
        batch: list[Sequence[Part]] = []
        size = 0
        for command in commands:
            batch.append(command)
            size += sum(_length(part) for part in command)
            if size >= PIPELINE_BYTES:
                replies += self._connection.pipeline(batch)
                batch, size = [], 0
        if batch:
            replies += self._connection.pipeline(batch)
        for reply in replies:
            if isinstance(reply, CommandError):
                raise _refused(reply)
        return [_plain(reply) for reply in replies]

    def ping(self) -> bool:
        """Whether the server answers, within the timeout."""
        try:
            return bool(self.cmd("PING") == b"PONG")
        except (ServerRefused, StoreUnavailable):
            return False


def _length(part: Part) -> int:
    """About how many bytes an argument has."""
    if isinstance(part, (memoryview, np.ndarray)):
        return part.nbytes
    return 20 if isinstance(part, int) else len(part)


def _refused(error: CommandError) -> ServerRefused:
    return ServerRefused(f"{error.code} {error.sentence}")


def _plain(reply: Any) -> Answer:
    """Text as bytes, at any depth."""
    if isinstance(reply, str):
        return reply.encode()
    if isinstance(reply, memoryview):
        return reply.tobytes()
    if isinstance(reply, (list, tuple)):
        return [_plain(item) for item in reply]
    return reply


def info_fields(text: bytes) -> dict[str, int | str]:
    """The fields of an INFO-like reply; digits become ints."""
    found: dict[str, int | str] = {}
    for line in text.decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if colon and not name.startswith("#"):
            found[name] = int(value) if value.isdigit() and value.isascii() else value
    return found
