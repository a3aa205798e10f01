"""The flags of the store, shared by the front (which prints and checks them) and the engines."""

from __future__ import annotations

import argparse
import ipaddress
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pion_vllm_mlx.cache.store_url import parse_url
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.formats import FORMATS, storage_format

DURABLE_TOKENS = 64
_WHOLE = re.compile(r"[+-]?\d+")

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class PionFlags:
    """How an engine uses the store.

    ``host`` and ``port`` are None unless named: then the embedded server of the user's data
    folder is joined or started.  ``vquant`` None: rows keep the cache's own dtype.
    ``durable_tokens`` 0: no COMMIT. ``attend``: system prompts are attended at the store.
    ``preload_gb``: of the conversations used last, read into memory at the start; None: as much
    as is stored.
    """

    host: str | None = None
    port: int | None = None
    vquant: str | None = None
    budget_gb: float = 4.0
    min_gain: int = 16
    enabled: bool = True
    durable_tokens: int = 0
    resume: bool = True
    attend: bool = False
    preload_gb: float | None = None

    @property
    def budget_bytes(self) -> int:
        """The byte budget of the stored conversations; 0 is none."""
        return int(self.budget_gb * 10**9)

    @property
    def preload_bytes(self) -> int:
        """What is read into memory at the start, at most."""
        return sys.maxsize if self.preload_gb is None else int(self.preload_gb * 10**9)

    @property
    def url(self) -> str:
        """Where the store is, as the clients of ``cache`` take it."""
        if self.host is None and self.port is None:
            return "embedded:"
        host = self.host or "127.0.0.1"
        return f"tcp://{f'[{host}]' if ':' in host else host}:{self.port or 1974}"

    def to_arguments(self) -> list[str]:
        """The flags that give the same again."""
        words = ["--pion-budget-gb", repr(self.budget_gb), "--pion-min-gain", str(self.min_gain)]
        if self.host is not None:
            words += ["--pion-host", self.host]
        if self.port is not None:
            words += ["--pion-port", str(self.port)]
        if self.vquant is not None:
            words += ["--pion-vquant", self.vquant]
        if self.durable_tokens:
            words += ["--durable", str(self.durable_tokens)]
        words += [] if self.enabled else ["--no-pion"]
        words += ["--pion-attend"] if self.attend else []
        words += [] if self.preload_gb is None else ["--pion-preload-gb", repr(self.preload_gb)]
        return words if self.resume else [*words, "--no-resume"]

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> PionFlags:
        """From what a parser with ``add_pion_flags`` gave."""
        return cls(
            host=options.pion_host,
            port=options.pion_port,
            vquant=options.pion_vquant,
            budget_gb=options.pion_budget_gb,
            min_gain=options.pion_min_gain,
            enabled=not options.no_pion,
            durable_tokens=options.durable,
            resume=not options.no_resume,
            attend=bool(vars(options).get("pion_attend")),
            preload_gb=vars(options).get("pion_preload_gb", 0.0),
        )


def add_pion_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the store to ``parser``."""
    group = parser.add_argument_group("the store")
    group.add_argument(
        "--pion-host",
        type=_host,
        metavar="HOST",
        help="server of the store (default: the embedded one of the data folder)",
    )
    group.add_argument(
        "--pion-port", type=port, metavar="PORT", help="its port (with --pion-host: 1974)"
    )
    group.add_argument(
        "--pion-vquant",
        type=_format,
        metavar="FORMAT",
        help=f"storage format: {', '.join(FORMATS)} (default: the cache's own dtype)",
    )
    group.add_argument(
        "--pion-budget-gb",
        type=_gigabytes,
        default=4.0,
        metavar="GB",
        help="bytes that stored conversations may take, 0: no limit (default: %(default)g)",
    )
    group.add_argument(
        "--pion-min-gain",
        type=_count,
        default=16,
        metavar="TOKENS",
        help="restore only what adds so many tokens (default: 16)",
    )
    group.add_argument(
        "--no-pion", action="store_true", help="no store: prefixes are kept in this process only"
    )
    group.add_argument(
        "--durable",
        type=_count,
        nargs="?",
        const=DURABLE_TOKENS,
        default=0,
        metavar="TOKENS",
        help="COMMIT after each stored prompt and reply, and so many tokens of one that is not "
        "batched (bare: 64)",
    )
    group.add_argument(
        "--no-resume",
        action="store_true",
        help="keep no journal: the reply of a killed engine is not continued "
        "(else it is where requests are not batched, as with a seed)",
    )


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are serve's alone, and not those of the commands beside it."""
    parser.add_argument(
        "--pion-attend",
        action="store_true",
        help="attend to system prompts at the store: their keys and values take no memory here; "
        "requests are served one at a time, and conversations live in memory only",
    )
    parser.add_argument(
        "--pion-preload-gb",
        type=_gigabytes,
        metavar="GB",
        help="at the start read so much of the conversations that were used last into memory, "
        "half of what live ones may take at the most (default: as much as is stored)",
    )


def spare_model(arguments: Sequence[str]) -> list[str]:
    """The words for an engine whose model is one of them, a bare ``--durable`` with its number.

    argparse would take the model behind it for the number.
    """
    words = list(arguments)
    for at, (word, following) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        if word == "--durable" and not _WHOLE.fullmatch(following):
            words[at] = f"--durable={DURABLE_TOKENS}"
    return words


def take_pion_flags(arguments: Sequence[str]) -> tuple[PionFlags, list[str]]:
    """The flags of the store, and the arguments that are left."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_pion_flags(parser)
    add_serve_flags(parser)
    options, rest = parser.parse_known_args(list(arguments))
    return PionFlags.from_options(options), rest


def number_of(read: Callable[[str], Number], text: str, wanted: str) -> Number:
    """What ``read`` makes of a word on a command line.

    Raises ArgumentTypeError where it is no ``wanted``: argparse itself would name our function.
    """
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no {wanted}") from error


def whole_number(text: str) -> int:
    """A number of something on a command line, of any sign."""
    return number_of(int, text, "whole number")


def port(text: str) -> int:
    """A port on a command line."""
    number = number_of(int, text, "port")
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError("a port is 1 to 65535")
    return number


def _host(text: str) -> str:
    """A name or an address, without a port, as ``PionFlags.url`` takes it."""
    host = text.removeprefix("[").removesuffix("]")
    if ":" in host and not _is_ipv6(host):
        raise argparse.ArgumentTypeError(f"{text} is no host alone: its port is --pion-port")
    if not host or any(one.isspace() for one in host):
        raise argparse.ArgumentTypeError(f"{text!r} is no host")
    try:
        parse_url(PionFlags(host=host).url)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return host


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).version == 6
    except ValueError:
        return False


def _format(text: str) -> str:
    try:
        return storage_format(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    number = whole_number(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number


def _gigabytes(text: str) -> float:
    number = number_of(float, text, "number of gigabytes")
    if number < 0 or not math.isfinite(number):
        raise argparse.ArgumentTypeError("must be a number, not negative")
    return number
