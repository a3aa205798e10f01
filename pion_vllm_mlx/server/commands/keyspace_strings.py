"""Strings."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.arguments import word
from pion_vllm_mlx.server.command import Effect, Reply
from pion_vllm_mlx.server.commands.keyspace_keys import OK, deadline_after, deadline_changes
from pion_vllm_mlx.server.keyspace.changes import Change, Verb, change
from pion_vllm_mlx.server.keyspace.data import Entry
from pion_vllm_mlx.server.keyspace_command import (
    INT64,
    MAX_STRING_BYTES,
    integer,
    long_reply,
    reads,
    sendable,
    syntax_error,
    value,
    writes,
    wrong_arity,
)
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import Arg


@reads("GET", 2, "The string of a key.", syntax="key")
def get(context: Context, args: list[Arg]) -> Reply | Awaitable[Reply]:
    return long_reply(context, context.keys.string(word(args[1])))


@reads("STRLEN", 2, "Bytes of the string of a key.", syntax="key")
def strlen(context: Context, args: list[Arg]) -> Reply:
    return len(context.keys.string(word(args[1])) or b"")


@dataclass
class _SetOptions:
    """The options of SET; ``deadline`` 0 is none."""

    condition: bytes = b""
    get: bool = False
    keep: bool = False
    deadline: int = 0


def _set_options(args: list[Arg], now: int) -> _SetOptions:
    """Raises CommandError for words that do not go together."""
    chosen = _SetOptions()
    at = 0
    while at < len(args):
        name = word(args[at]).upper()
        at += 1
        if name in (b"NX", b"XX") and chosen.condition in (b"", name):
            chosen.condition = name
        elif name == b"GET":
            chosen.get = True
        elif name == b"KEEPTTL" and not chosen.deadline:
            chosen.keep = True
        elif name in _UNITS and at < len(args) and not chosen.deadline and not chosen.keep:
            chosen.deadline = _set_deadline(name, integer(args[at]), now)
            at += 1
        else:
            raise syntax_error()
    return chosen


_UNITS = {b"EX": (1000, True), b"PX": (1, True), b"EXAT": (1000, False), b"PXAT": (1, False)}


def _set_deadline(name: bytes, amount: int, now: int) -> int:
    unit_ms, relative = _UNITS[name]
    if amount <= 0:
        raise CommandError("invalid expire time in 'set' command")
    return deadline_after(now if relative else 0, amount, unit_ms, "set")


@writes(
    "SET",
    -3,
    "Sets the string of a key.",
    syntax="key value [NX|XX] [GET] [EX seconds|PX milliseconds|EXAT unix_seconds|PXAT "
    "unix_milliseconds|KEEPTTL]",
    grows=True,
)
def set_string(context: Context, args: list[Arg]) -> Effect:
    view = context.keys
    key = word(args[1])
    chosen = _set_options(args[3:], view.now)
    entry = view.entry(key)
    old = view.string(key) if chosen.get else None
    refused = (chosen.condition == b"NX" and entry is not None) or (
        chosen.condition == b"XX" and entry is None
    )
    if refused:
        return Effect([], old)
    changes = [change(Verb.SET, key, value(args[2]))]
    if chosen.deadline:
        changes += deadline_changes(key, chosen.deadline, view.now)
    elif chosen.keep and entry is not None and entry.deadline:
        changes.append(change(Verb.DEADLINE, key, b"%d" % entry.deadline))
    return Effect(changes, old if chosen.get else OK)


@writes(
    "SETNX",
    3,
    "Sets a key that is not there; 1 if it was not.",
    syntax="key value",
    grows=True,
)
def setnx(context: Context, args: list[Arg]) -> Effect:
    key = word(args[1])
    if context.keys.entry(key) is not None:
        return Effect([], 0)
    return Effect([change(Verb.SET, key, value(args[2]))], 1)


@writes(
    "SETEX",
    4,
    "Sets a key that ends after so many seconds.",
    syntax="key seconds value",
    grows=True,
)
def setex(context: Context, args: list[Arg]) -> Effect:
    key, seconds, now = word(args[1]), integer(args[2]), context.keys.now
    if seconds <= 0:
        raise CommandError("invalid expire time in 'setex' command")
    deadline = deadline_after(now, seconds, 1000, "setex")
    changes = [change(Verb.SET, key, value(args[3])), *deadline_changes(key, deadline, now)]
    return Effect(changes, OK)


@reads("MGET", -2, "The strings of several keys.", syntax="key...", keys=(1, -1))
def mget(context: Context, args: list[Arg]) -> Reply:
    entries = [context.keys.entry(word(arg)) for arg in args[1:]]
    return sendable(
        entry.value if entry is not None and isinstance(entry.value, bytes) else None
        for entry in entries
    )


@writes(
    "MSET",
    -3,
    "Sets several strings at once.",
    syntax="(key value)...",
    keys=(1, -1),
    key_step=2,
    grows=True,
)
def mset(context: Context, args: list[Arg]) -> Effect:
    if len(args) % 2 == 0:
        raise wrong_arity("mset")
    pairs = zip(args[1::2], args[2::2], strict=True)
    return Effect([change(Verb.SET, word(key), value(data)) for key, data in pairs], OK)


@writes("APPEND", 3, "Lengthens the string of a key.", syntax="key value", grows=True)
def append(context: Context, args: list[Arg]) -> Effect:
    key, more = word(args[1]), value(args[2])
    length = len(context.keys.string(key) or b"") + len(more)
    if length > MAX_STRING_BYTES:
        raise CommandError("string exceeds maximum allowed size (512MB)")
    return Effect([change(Verb.APPEND, key, more)], length)


# -- numbers -------------------------------------------------------------------


def _replaced(key: bytes, data: bytes, entry: Entry | None) -> list[Change]:
    """A new string that keeps the deadline of the old one."""
    changes = [change(Verb.SET, key, data)]
    if entry is not None and entry.deadline:
        changes.append(change(Verb.DEADLINE, key, b"%d" % entry.deadline))
    return changes


def _increased(context: Context, key: bytes, by: int) -> Effect:
    text = context.keys.string(key)
    number = (0 if text is None else integer(text)) + by
    if number not in INT64:
        raise CommandError("increment or decrement would overflow")
    return Effect(_replaced(key, b"%d" % number, context.keys.entry(key)), number)


@writes("INCR", 2, "Adds one to the number of a key.", syntax="key", grows=True)
def incr(context: Context, args: list[Arg]) -> Effect:
    return _increased(context, word(args[1]), 1)


@writes("DECR", 2, "Takes one from the number of a key.", syntax="key", grows=True)
def decr(context: Context, args: list[Arg]) -> Effect:
    return _increased(context, word(args[1]), -1)


@writes("INCRBY", 3, "Adds to the number of a key.", syntax="key amount", grows=True)
def incrby(context: Context, args: list[Arg]) -> Effect:
    return _increased(context, word(args[1]), integer(args[2]))


@writes("DECRBY", 3, "Takes from the number of a key.", syntax="key amount", grows=True)
def decrby(context: Context, args: list[Arg]) -> Effect:
    amount = integer(args[2])
    if -amount not in INT64:
        raise CommandError("decrement would overflow")
    return _increased(context, word(args[1]), -amount)
