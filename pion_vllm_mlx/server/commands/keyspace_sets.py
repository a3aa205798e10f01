"""Sets, and sorted sets."""

from __future__ import annotations

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.arguments import word
from pion_vllm_mlx.server.command import Effect, Reply
from pion_vllm_mlx.server.commands.keyspace_lists import span
from pion_vllm_mlx.server.keyspace.changes import Verb, change
from pion_vllm_mlx.server.keyspace_command import (
    integer,
    keywords,
    reads,
    score,
    sendable,
    syntax_error,
    value,
    values,
    writes,
)
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import Arg, Set, Value


@writes("SADD", -3, "Adds members to a set; how many are new.", syntax="key member...", grows=True)
def sadd(context: Context, args: list[Arg]) -> Effect:
    key = word(args[1])
    held = context.keys.members(key)
    new = [member for member in dict.fromkeys(values(args[2:])) if member not in held]
    return Effect([change(Verb.SADD, key, *new)] if new else [], len(new))


@writes("SREM", -3, "Removes members of a set; how many there were.", syntax="key member...")
def srem(context: Context, args: list[Arg]) -> Effect:
    key = word(args[1])
    held = context.keys.members(key)
    there = [member for member in dict.fromkeys(values(args[2:])) if member in held]
    return Effect([change(Verb.SREM, key, *there)] if there else [], len(there))


@reads("SMEMBERS", 2, "Every member of a set.", syntax="key")
def smembers(context: Context, args: list[Arg]) -> Reply:
    return Set(sendable(context.keys.members(word(args[1]))))


@reads("SISMEMBER", 3, "Whether a set has a member.", syntax="key member")
def sismember(context: Context, args: list[Arg]) -> Reply:
    return int(value(args[2]) in context.keys.members(word(args[1])))


@reads("SCARD", 2, "Number of a set's members.", syntax="key")
def scard(context: Context, args: list[Arg]) -> Reply:
    return len(context.keys.members(word(args[1])))


# -- sorted sets ---------------------------------------------------------------

_ZADD_OPTIONS = {b"NX", b"XX", b"GT", b"LT", b"CH"}


def _zadd_options(args: list[Arg]) -> tuple[set[bytes], list[Arg]]:
    """The words before the first score, and the rest. Raises CommandError for a wrong mix."""
    options: set[bytes] = set()
    at = 2
    while at < len(args):
        arg = args[at]
        if not isinstance(arg, bytes) or arg.upper() not in _ZADD_OPTIONS:
            break
        options.add(arg.upper())
        at += 1
    if at == len(args) or (len(args) - at) % 2:
        raise syntax_error()
    if {b"NX", b"XX"} <= options:
        raise CommandError("XX and NX options at the same time are not compatible")
    if len(options & {b"GT", b"LT", b"NX"}) > 1:
        raise CommandError("GT, LT, and/or NX options at the same time are not compatible")
    return options, args[at:]


def _taken(options: set[bytes], current: float | None, new: float) -> bool:
    """Whether ZADD's options allow a new score."""
    if current is None:
        return b"XX" not in options
    if b"NX" in options or (b"GT" in options and new <= current):
        return False
    return not (b"LT" in options and new >= current)


@writes(
    "ZADD",
    -4,
    "Sets scores of members; how many members are new.",
    syntax="key [NX|XX] [GT|LT] [CH] (score member)...",
    grows=True,
)
def zadd(context: Context, args: list[Arg]) -> Effect:
    options, rest = _zadd_options(args)
    key = word(args[1])
    scores = [score(arg) for arg in rest[::2]]
    held = context.keys.sorted_set(key).scores
    taken: dict[bytes, float] = {}
    added = changed = 0
    for new, member in zip(scores, values(rest[1::2]), strict=True):
        current = taken.get(member, held.get(member))
        if _taken(options, current, new):
            added += current is None
            changed += current is None or current != new
            taken[member] = new
    parts = [part for m, s in taken.items() for part in (m, s.hex().encode())]
    changes = [change(Verb.ZADD, key, *parts)] if parts else []
    return Effect(changes, changed if b"CH" in options else added)


@writes("ZREM", -3, "Removes members of a sorted set; how many there were.", syntax="key member...")
def zrem(context: Context, args: list[Arg]) -> Effect:
    key = word(args[1])
    held = context.keys.sorted_set(key).scores
    there = [member for member in dict.fromkeys(values(args[2:])) if member in held]
    return Effect([change(Verb.ZREM, key, *there)] if there else [], len(there))


@reads(
    "ZRANGE",
    -4,
    "Members between two places by score; WITHSCORES, REV.",
    syntax="key start stop [REV] [WITHSCORES]",
)
def zrange(context: Context, args: list[Arg]) -> Reply:
    start, stop = integer(args[2]), integer(args[3])
    options = set(keywords(args[4:]))
    if not options <= {b"WITHSCORES", b"REV"}:
        raise syntax_error()
    order = context.keys.sorted_set(word(args[1])).in_order()
    chosen = span(start, stop, len(order))
    if b"REV" in options:
        pairs = [order[len(order) - 1 - index] for index in chosen]
    else:
        pairs = order[chosen.start : max(chosen.start, chosen.stop)]
    if b"WITHSCORES" not in options:
        return sendable(member for _, member in pairs)
    found: list[Value] = []
    for points, member in pairs:
        # a pair of its own in RESP3, members and scores in turn in RESP2
        found += ([member, points],) if context.client.proto >= 3 else (member, points)
    return found


@reads("ZSCORE", 3, "The score of a member.", syntax="key member")
def zscore(context: Context, args: list[Arg]) -> Reply:
    return context.keys.sorted_set(word(args[1])).scores.get(value(args[2]))


@reads("ZCARD", 2, "Number of a sorted set's members.", syntax="key")
def zcard(context: Context, args: list[Arg]) -> Reply:
    return len(context.keys.sorted_set(word(args[1])).scores)
