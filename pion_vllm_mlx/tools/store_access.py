"""Which store a subcommand talks to: ``--url`` as everywhere, the password from the environment."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pion_vllm_mlx import config
from pion_vllm_mlx.cache.connection import Address
from pion_vllm_mlx.cache.data_folder import read_status
from pion_vllm_mlx.cache.store_advice import what_helps, with_advice
from pion_vllm_mlx.cache.store_client import StoreClient
from pion_vllm_mlx.cache.store_client_endpoint import Endpoint, Place, parse_url
from pion_vllm_mlx.errors import ConfigError, PionError, StoreUnavailable

DEFAULT_URL = f"tcp://{config.DEFAULT_HOST}:{config.DEFAULT_PORT}"


#: no command waits longer, and no clock takes much more.
_MOST_SECONDS = 86_400.0


def seconds(text: str) -> float:
    """A time span of an option. Raises ArgumentTypeError, which argparse shows."""
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not 0 < count <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds above 0, up to {_MOST_SECONDS:.0f}"
        )
    return count


@dataclass(frozen=True)
class Access:
    """A store that was reached, and the client to use."""

    client: StoreClient
    endpoint: Endpoint
    url: str


def add_url(
    parser: argparse.ArgumentParser, default: str = DEFAULT_URL, deadline_seconds: float = 5.0
) -> None:
    """The options that name the store."""
    parser.add_argument(
        "--url",
        default=default,
        help="tcp://host:port, tls://host:port, unix:///path, embedded:///path, embedded: "
        f"(default {default})",
    )
    parser.add_argument(
        "--tls-ca-file",
        type=Path,
        metavar="FILE",
        help="the CA of a tls:// server (PION_TLS_CA_FILE; else those the system trusts)",
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=deadline_seconds,
        metavar="SECONDS",
        help="how long a reply may take",
    )


@contextmanager
def advising() -> Iterator[None]:
    """A store that is not to be had is a StoreUnavailable that says what can be done."""
    try:
        yield
    except PionError as error:
        if not what_helps(error, command_line=True):
            raise
        raise StoreUnavailable(with_advice(error, command_line=True)) from error


def url_of(options: argparse.Namespace) -> str:
    """The URL that the options name, the CA in it. Raises ConfigError."""
    url: str = options.url
    if options.tls_ca_file is None:
        return url
    if not url.startswith("tls://"):
        raise ConfigError(f"--tls-ca-file is for a tls:// URL, not {url!r}")
    separator = "&" if "?" in url else "?"
    return f"{url}{separator}ca={quote(str(options.tls_ca_file))}"


@contextmanager
def store(options: argparse.Namespace, *, start: bool) -> Iterator[Access]:
    """The store that the options name, closed at the end.

    ``start``: an embedded server may be started; else one has to run. Raises
    StoreUnavailable, its text saying what can be done, and ConfigError.
    """
    place = parse_url(url_of(options))
    if place.embedded and not start:
        place = _running(place)
    password = config.ServerEnvironment.from_environment().password
    endpoint = Endpoint(place, password, options.deadline)
    client = StoreClient(endpoint, options.deadline)
    try:
        with advising():
            yield Access(client, endpoint, options.url)
    finally:
        client.close()


def _running(place: Place) -> Place:
    """The address of the server that owns a data folder; none is started."""
    folder = Path(place.folder).expanduser() if place.folder else config.data_dir()
    status = read_status(folder)
    if status is None:
        raise StoreUnavailable(f"no server runs on {folder}")
    if status.unixsocket is not None:
        return Place(Address(path=str(status.unixsocket)))
    return Place(Address(port=status.port))


def size_text(count: float) -> str:
    """Bytes for people: ``12.3 MB``, in powers of ten."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def duration_text(seconds: float) -> str:
    """A time span for people: ``4 s``, ``12 min``, ``3 h 5 min``, ``2 d 7 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
