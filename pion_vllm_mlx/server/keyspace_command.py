"""Declaring commands of the keyspace, reading their arguments, sending long values."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.arguments import data, word
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.outbound import Computed, Stream
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import Arg

#: no string gets longer, as no argument does.
MAX_STRING_BYTES = 512 << 20
#: a reply of more is refused.
MAX_REPLY_BYTES = 1 << 30
#: a longer value is sent by a thread, not joined.
_LONG_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 20
_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_FLOAT = re.compile(rb"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf(?:inity)?)", re.IGNORECASE)
INT64 = range(-(1 << 63), 1 << 63)

Handler = Callable[..., Any]


def reads(
    name: str, arity: int, summary: str, keys: tuple[int, int] | None = (1, 1), **options: Any
) -> Callable[[Handler], Handler]:
    """Declare a command that answers from the keys; tenants may use it where it names them."""
    options |= {"keys": keys, "keyspace": True, "any_prefix": True, "long_arguments": True}
    options.setdefault("tenant", keys is not None)
    return command(name, arity, summary, **options)


def writes(
    name: str, arity: int, summary: str, keys: tuple[int, int] | None = (1, 1), **options: Any
) -> Callable[[Handler], Handler]:
    """Declare a command that returns its changes as an ``Effect``."""
    return reads(name, arity, summary, keys, write=True, **options)


def value(arg: Arg) -> bytes:
    """An argument of any length."""
    return arg if isinstance(arg, bytes) else bytes(data(arg))


def values(args: Sequence[Arg]) -> list[bytes]:
    return [value(arg) for arg in args]


def integer(arg: Arg) -> int:
    """A signed 64-bit number as Redis writes it: no plus, no leading zeros."""
    text = arg if isinstance(arg, bytes) else b""
    if not _INTEGER.fullmatch(text) or int(text) not in INT64:
        raise CommandError("value is not an integer or out of range")
    return int(text)


def score(arg: Arg) -> float:
    """A score: a decimal number or an infinity."""
    text = arg if isinstance(arg, bytes) else b""
    if not _FLOAT.fullmatch(text):
        raise CommandError("value is not a valid float")
    return float(text)


def keywords(args: Sequence[Arg]) -> list[bytes]:
    """Option words in upper case."""
    return [word(arg).upper() for arg in args]


def wrong_arity(name: str) -> CommandError:
    return CommandError(f"wrong number of arguments for '{name}' command")


def syntax_error() -> CommandError:
    return CommandError("syntax error")


def sendable(items: Iterable[bytes | None]) -> list[bytes | None]:
    """The items of a reply, unless there are too many bytes of them."""
    found = list(items)
    if sum(len(item) for item in found if item is not None) > MAX_REPLY_BYTES:
        raise CommandError("the reply would be longer than 1 GiB")
    return found


def reply_bytes(reply: object) -> int:
    """Bytes that the strings of a reply have together, those inside of it included."""
    if isinstance(reply, (bytes, str)):
        return len(reply)
    if isinstance(reply, (list, tuple)):
        return sum(map(reply_bytes, reply))
    return 0


def long_reply(context: Context, found: bytes | None) -> Reply | Awaitable[Reply]:
    """A value as a reply; a long one is sent in windows, outside of transactions."""
    if found is None or len(found) <= _LONG_BYTES or context.overlay is not None:
        return found
    return _streamed(found)


async def _streamed(found: bytes) -> Reply:
    def windows() -> Iterator[memoryview]:
        view = memoryview(found)
        for at in range(0, len(view), _WINDOW_BYTES):
            yield view[at : at + _WINDOW_BYTES]

    stream = Stream(ready=True)
    stream.bulk([Computed(len(found), windows)])
    # the receipt counts rows of prefixes
    stream.payload_bytes = 0
    return stream
