"""Lists."""

from __future__ import annotations

from itertools import islice

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.arguments import word
from pion_vllm_mlx.server.command import Effect, Reply
from pion_vllm_mlx.server.keyspace.changes import Verb, change
from pion_vllm_mlx.server.keyspace_command import (
    integer,
    reads,
    sendable,
    values,
    writes,
    wrong_arity,
)
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import NULL_ARRAY, Arg


def span(start: int, stop: int, length: int) -> range:
    """Indices of ``start`` to ``stop``, both included, negative ones from the end."""
    begin = max(start + length if start < 0 else start, 0)
    end = stop + length if stop < 0 else stop
    return range(begin, min(end + 1, length))


def _push(context: Context, args: list[Arg], verb: Verb) -> Effect:
    key, items = word(args[1]), values(args[2:])
    return Effect([change(verb, key, *items)], len(context.keys.list(key)) + len(items))


@writes("RPUSH", -3, "Puts items behind a list's last.", syntax="key item...", grows=True)
def rpush(context: Context, args: list[Arg]) -> Effect:
    return _push(context, args, Verb.RPUSH)


@writes(
    "LPUSH",
    -3,
    "Puts items, one by one, before a list's first.",
    syntax="key item...",
    grows=True,
)
def lpush(context: Context, args: list[Arg]) -> Effect:
    return _push(context, args, Verb.LPUSH)


def _count(arg: Arg) -> int:
    message = "value is out of range, must be positive"
    try:
        count = integer(arg)
    except CommandError as error:
        raise CommandError(message) from error
    if count < 0:
        raise CommandError(message)
    return count


def _pop(context: Context, args: list[Arg], verb: Verb) -> Effect:
    if len(args) > 3:
        raise wrong_arity(verb.name.lower())
    key = word(args[1])
    many = len(args) == 3
    count = _count(args[2]) if many else 1
    held = context.keys.list(key)
    if not held:
        return Effect([], NULL_ARRAY if many else None)
    count = min(count, len(held))
    items = list(islice(held if verb is Verb.LPOP else reversed(held), count))
    changes = [change(verb, key, b"%d" % count)] if count else []
    return Effect(changes, items if many else items[0])


@writes("LPOP", -2, "Takes a list's first item, or several.", syntax="key [count]")
def lpop(context: Context, args: list[Arg]) -> Effect:
    return _pop(context, args, Verb.LPOP)


@writes("RPOP", -2, "Takes a list's last item, or several.", syntax="key [count]")
def rpop(context: Context, args: list[Arg]) -> Effect:
    return _pop(context, args, Verb.RPOP)


@reads(
    "LRANGE",
    4,
    "The items of a list between two places, both included.",
    syntax="key start stop",
)
def lrange(context: Context, args: list[Arg]) -> Reply:
    start, stop = integer(args[2]), integer(args[3])
    held = context.keys.list(word(args[1]))
    chosen = span(start, stop, len(held))
    return sendable(islice(held, chosen.start, max(chosen.start, chosen.stop)))


@reads("LLEN", 2, "Number of a list's items.", syntax="key")
def llen(context: Context, args: list[Arg]) -> Reply:
    return len(context.keys.list(word(args[1])))
