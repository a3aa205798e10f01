"""Reading a command's arguments: strict numbers, whole-word options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.inbound import RefusedBulk
from pion_vllm_mlx.server.long_arguments import LongInbound
from pion_vllm_mlx.wire.resp import Arg

#: token positions, and counts of tokens, are at most this.
MAX_TOKENS = (1 << 31) - 1


def word(arg: Arg) -> bytes:
    """A short argument; a long bulk string where a word belongs is refused."""
    if isinstance(arg, bytes):
        return arg
    raise CommandError("argument is too long")


def data(arg: Arg) -> bytes | memoryview:
    """An argument of any length, of a command that declares ``long_arguments``.

    A view keeps its memory: it may be stored as it is.
    """
    if isinstance(arg, bytes):
        return arg
    if isinstance(arg, LongInbound):
        return arg.view
    if isinstance(arg, RefusedBulk):
        raise arg.reason
    raise CommandError("argument is too long")


def sid(arg: Arg) -> bytes:
    """A namespace or session id: 1 to 65535 bytes, any bytes."""
    name = word(arg)
    if not 1 <= len(name) <= 65535:
        raise CommandError("a namespace or session id has 1 to 65535 bytes")
    return name


def check_prefix(names: Sequence[Arg], required: bytes) -> None:
    """Raise CommandError unless every namespace or session id begins with ``required``."""
    if not all(isinstance(name, bytes) and name.startswith(required) for name in names):
        prefix = required.decode("utf-8", "replace")
        raise CommandError(f"namespace must start with required prefix '{prefix}'")


def integer(arg: Arg, what: str, low: int, high: int) -> int:
    """A decimal number of ``[low, high]``: ASCII digits and nothing else.

    A minus sign is allowed where ``low`` is negative.
    """
    text = word(arg)
    digits = text[1:] if low < 0 and text.startswith(b"-") else text
    if not digits.isdigit() or not digits.isascii() or len(digits) > 20:
        raise CommandError(f"{what} is not an integer or out of range")
    value = int(text)
    if not low <= value <= high:
        raise CommandError(f"{what} must be {low} to {high}")
    return value


def options(args: Sequence[Arg], known: Mapping[str, int], where: str) -> dict[str, list[Arg]]:
    """Keywords with their values, in any order, each at most once.

    ``known`` says how many values follow each keyword. Raises CommandError for
    anything else, before anything has happened.
    """
    found: dict[str, list[Arg]] = {}
    at = 0
    while at < len(args):
        keyword = word(args[at]).upper().decode("latin-1")
        if keyword not in known:
            raise CommandError(f"{where}: unknown option '{keyword[:64]}'")
        if keyword in found:
            raise CommandError(f"{where}: {keyword} is given twice")
        values = list(args[at + 1 : at + 1 + known[keyword]])
        if len(values) < known[keyword]:
            raise CommandError(f"{where}: {keyword} lacks its value")
        found[keyword] = values
        at += 1 + known[keyword]
    return found


def given_integer(given: Mapping[str, list[Arg]], name: str, low: int, high: int) -> int:
    """The number behind an option, 0 when it was not given."""
    return integer(given[name][0], name, low, high) if name in given else 0


def given_word(given: Mapping[str, list[Arg]], name: str, otherwise: bytes = b"") -> bytes:
    """The word behind an option, ``otherwise`` when it was not given."""
    return word(given[name][0]) if name in given else otherwise


def choice(arg: Arg, allowed: Sequence[str], what: str) -> str:
    """One of a few words, in any case."""
    text = word(arg).upper().decode("latin-1")
    if text not in allowed:
        raise CommandError(f"{what} must be one of {', '.join(allowed)}")
    return text


def head_major(given: Mapping[str, list[Arg]], encoding: str, where: str) -> bool:
    """Whether LAYOUT asks for ``[H, n, D]``: only rows as they are stored have a layout."""
    if "LAYOUT" not in given:
        return False
    wanted = choice(given["LAYOUT"][0], ("HND", "NHD"), f"{where}: LAYOUT") == "HND"
    if wanted and encoding != "STORED":
        raise CommandError(f"{where}: LAYOUT HND needs FMT STORED")
    return wanted


def at_most(args: Sequence[Arg], count: int, where: str) -> None:
    """Raise CommandError for more than ``count`` words, the name included."""
    if len(args) > count:
        raise CommandError(f"wrong number of arguments for '{where.lower()}' command")


def lines(**fields: object) -> str:
    """Fields of an INFO-like reply, one a line."""
    return "".join(f"{name}:{value}\r\n" for name, value in fields.items())
