"""Hashes."""

from __future__ import annotations

from pion_vllm_mlx.server.arguments import word
from pion_vllm_mlx.server.command import Effect, Reply
from pion_vllm_mlx.server.keyspace.changes import Verb, change
from pion_vllm_mlx.server.keyspace_command import (
    reads,
    sendable,
    value,
    values,
    writes,
    wrong_arity,
)
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import Arg, Map


@writes(
    "HSET",
    -4,
    "Sets fields of a hash; how many are new.",
    syntax="key (field value)...",
    grows=True,
)
def hset(context: Context, args: list[Arg]) -> Effect:
    if len(args) % 2:
        raise wrong_arity("hset")
    key, pairs = word(args[1]), values(args[2:])
    held = context.keys.hash(key)
    new = sum(1 for field in set(pairs[::2]) if field not in held)
    return Effect([change(Verb.HSET, key, *pairs)], new)


@reads("HGET", 3, "One field of a hash.", syntax="key field")
def hget(context: Context, args: list[Arg]) -> Reply:
    return context.keys.hash(word(args[1])).get(value(args[2]))


@reads("HMGET", -3, "Several fields of a hash.", syntax="key field...")
def hmget(context: Context, args: list[Arg]) -> Reply:
    held = context.keys.hash(word(args[1]))
    return sendable(held.get(value(arg)) for arg in args[2:])


@writes("HDEL", -3, "Removes fields of a hash; how many there were.", syntax="key field...")
def hdel(context: Context, args: list[Arg]) -> Effect:
    key = word(args[1])
    held = context.keys.hash(key)
    there = [field for field in dict.fromkeys(values(args[2:])) if field in held]
    return Effect([change(Verb.HDEL, key, *there)] if there else [], len(there))


@reads("HGETALL", 2, "Every field of a hash.", syntax="key")
def hgetall(context: Context, args: list[Arg]) -> Reply:
    held = context.keys.hash(word(args[1]))
    sendable(held.values())
    return Map(held.items())


@reads("HKEYS", 2, "The names of a hash's fields.", syntax="key")
def hkeys(context: Context, args: list[Arg]) -> Reply:
    return sendable(context.keys.hash(word(args[1])))


@reads("HVALS", 2, "The values of a hash's fields.", syntax="key")
def hvals(context: Context, args: list[Arg]) -> Reply:
    return sendable(context.keys.hash(word(args[1])).values())


@reads("HLEN", 2, "Number of a hash's fields.", syntax="key")
def hlen(context: Context, args: list[Arg]) -> Reply:
    return len(context.keys.hash(word(args[1])))


@reads("HEXISTS", 3, "Whether a hash has a field.", syntax="key field")
def hexists(context: Context, args: list[Arg]) -> Reply:
    return int(value(args[2]) in context.keys.hash(word(args[1])))
