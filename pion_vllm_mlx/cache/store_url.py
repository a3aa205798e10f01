"""What a URL says: where the store is.

============================  ==================================================
``tcp://host:port``           a server anywhere
``tls://host:port``           its ``--tls-port``; ``?ca=FILE``, ``cert=``, ``key=`` may follow
``unix:///path``              a server on this host
``embedded:///path``          the server that owns this data folder; started if none does
``embedded:``                 the same for the user's own data folder
============================  ==================================================

``tcp://NAME@host:port``, and so with tls and unix, logs in as the user or tenant NAME.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pion_vllm_mlx.cache.channel import Address
from pion_vllm_mlx.cache.tls import client_context
from pion_vllm_mlx.config import DEFAULT_PORT, ClientTls
from pion_vllm_mlx.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """What a URL says: an address, or the folder of an embedded server; as whom to log in."""

    address: Address | None = None
    embedded: bool = False
    folder: str | None = None
    username: str | None = None


def parse_url(url: str) -> Place:
    """The place that ``url`` names; raises ConfigError, a ValueError, for another URL."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}") from None
    path = unquote(parts.path)
    if parts.password is not None:
        raise ConfigError("no password belongs in a URL: use password= or PION_REQUIREPASS")
    username = None if parts.username is None else unquote(parts.username)
    if username == "":
        raise ConfigError(f"{url!r}: no user is named before the @")
    if parts.scheme == "tls" and not parts.fragment:
        return Place(_secure_address(url, parts), username=username)
    if parts.query or parts.fragment:
        raise ConfigError(f"{url!r}: nothing may follow the place; write ? and # as %3F and %23")
    if "\0" in path:
        raise ConfigError(f"{url!r}: a path holds no NUL character")
    if parts.scheme == "embedded" and not parts.netloc:
        return Place(embedded=True, folder=path or None)
    if parts.scheme == "unix" and path and not parts.netloc.rpartition("@")[2]:
        return Place(Address(path=path), username=username)
    if parts.scheme == "tcp" and parts.hostname and parts.path in ("", "/"):
        port = _port(url, parts)
        address = Address(host=parts.hostname, port=DEFAULT_PORT if port is None else port)
        return Place(address, username=username)
    raise ConfigError(
        f"{url!r} is no store: use tcp://host:port, tls://host:port, unix:///path, "
        "embedded:///path or embedded:"
    )


def _port(url: str, parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}") from None


def _secure_address(url: str, parts: SplitResult) -> Address:
    """The address of a tls:// URL; its files are tried here. Raises ConfigError."""
    port = _port(url, parts)
    if not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ConfigError(f"{url!r}: use tls://host:port, with the port of --tls-port")
    tls = ClientTls.from_environment()
    try:
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        given = [(parts.query, "")]
    for name, file in given:
        if name not in ("ca", "cert", "key") or not file:
            raise ConfigError(f"{url!r}: after the place may stand ?ca=FILE, cert=FILE, key=FILE")
        tls = replace(tls, **{f"{name}_file": Path(file).expanduser()})
    client_context(tls)
    return Address(host=parts.hostname, port=port, tls=tls)
