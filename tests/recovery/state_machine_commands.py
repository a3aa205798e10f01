"""What the state machine may do: commands as strategies, and what each does to the model.

An ``Op`` is plain numbers and names, drawn without a look at the state; ``prepare`` turns
it into the words to send and the effect on the model. A batch of them follows from a seed:
many are drawn in the time in which hypothesis draws a few, and a shorter batch is the
beginning of a longer one, so that failures still shrink.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple, TypeAlias

from tests.recovery.state_machine_keys import Keys, Moment, Refused
from tests.recovery.state_machine_memory import Memory
from tests.recovery.state_machine_model import Prefixes, RowsSent, Side, Spec, sent_rows

Words: TypeAlias = tuple[bytes, ...]
Effect: TypeAlias = "Callable[[World, Moment], Any]"


@dataclass
class World:
    """The model of a whole server."""

    prefixes: Prefixes = field(default_factory=Prefixes)
    keys: Keys = field(default_factory=Keys)
    memory: Memory = field(default_factory=Memory)

    def copy(self) -> World:
        return copy.deepcopy(self)

    def run_keys(self, at: Moment, words: Words) -> Any:
        return self.keys.run(words, at)

    def restarted(self) -> None:
        self.prefixes.restarted()
        self.memory.restarted()


class AnyNumber:
    """Equal to every number that is not negative."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other >= 0

    __hash__ = None  # type: ignore[assignment]


class Op(NamedTuple):
    """One command: a row of ``PREPARE`` and its parameters."""

    kind: str
    params: tuple[Any, ...]

    def prepare(self, world: World, at: Moment) -> tuple[Words, Effect]:
        return PREPARE[self.kind](world, at, *self.params)


# -- drawing ---------------------------------------------------------------------

Draw: TypeAlias = Callable[[Random], Any]


def one_of(*values: Any) -> Draw:
    """One of these values."""
    return lambda rng: rng.choice(values)


def mixed(*draws: Draw) -> Draw:
    """What one of these draws."""
    return lambda rng: rng.choice(draws)(rng)


def number_of(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def some(draw: Draw, low: int, high: int) -> Draw:
    """A list of ``low`` to ``high`` of them."""
    return lambda rng: [draw(rng) for _ in range(rng.randint(low, high))]


def each(*draws: Draw) -> Draw:
    """A tuple of one of each."""
    return lambda rng: tuple(draw(rng) for draw in draws)


def then(draw: Draw, change: Callable[[Any], Any]) -> Draw:
    return lambda rng: change(draw(rng))


def batch(draw: Draw, seed: int, count: int) -> list[Any]:
    """The first ``count`` things that follow from a seed."""
    rng = Random(seed)
    return [draw(rng) for _ in range(count)]


# -- plain keys ------------------------------------------------------------------

KEYS = (b"k", b"l", b"k|:\x00\r\n\xff", b"n")
_LARGEST = b"9223372036854775807"
_keys = one_of(*KEYS)
_long = then(number_of(0, 255), lambda n: bytes([n]) * 70_000)
_values = mixed(
    lambda rng: rng.randbytes(rng.randint(0, 6)),
    one_of(b"0", b"-7", b"12", _LARGEST, b"1.5", b"\x01\x02\xff"),
    one_of(b"0", b"-7", b"12"),
    _long,
)
_short = one_of(b"a", b"b", b"c", b"", b"\xff\r\n")
_many = some(_short, 1, 4)
_amount = one_of(b"1", b"-3", b"40", _LARGEST, b"-" + _LARGEST)
_seconds = then(number_of(1, 40), lambda n: n * 20_000)
_scores = one_of(b"1", b"2.5", b"-3", b"inf", b"-inf", b"1e300", b".5")


def _words(name: str, *parts: Draw) -> Draw:
    """A command of bytes and lists of bytes, flattened."""

    def draw(rng: Random) -> Words:
        out = [name.encode()]
        for part in parts:
            drawn = part(rng)
            out += [drawn] if isinstance(drawn, bytes) else drawn
        return tuple(out)

    return draw


def _flat(pairs: list[tuple[bytes, bytes]]) -> list[bytes]:
    return [word for pair in pairs for word in pair]


def _digits(draw: Draw) -> Draw:
    return then(draw, lambda n: b"%d" % n)


_in_seconds = _digits(_seconds)
_in_ms = _digits(then(_seconds, lambda n: n * 1000))
_end = mixed(
    one_of([]),
    one_of([b"KEEPTTL"], [b"EXAT", b"1"], [b"PXAT", b"99999999999999"]),
    then(_in_seconds, lambda n: [b"EX", n]),
    then(_in_ms, lambda n: [b"PX", n]),
)
_pairs = then(some(each(_short, _values), 1, 3), _flat)
_key_pairs = then(some(each(_keys, _values), 1, 3), _flat)
_scored = then(some(each(_scores, _short), 1, 3), _flat)
_condition = one_of([], [b"nx"], [b"XX"], [b"GT"], [b"LT"], [b"XX", b"GT"])
_deadline = one_of([], [], [b"NX"], [b"XX"], [b"GT"], [b"lt"], [b"XX", b"GT"])
_key_list = some(_keys, 1, 3)
_count = one_of([], [b"0"], [b"2"], [b"99"])
_how = one_of([], [b"ASYNC"], [b"sync"])


def _over(amounts: Draw) -> Draw:
    return mixed(amounts, amounts, one_of(b"0", b"-1"))


KEY_WRITES: dict[str, Draw] = {
    "SET": _words(
        "SET",
        _keys,
        _values,
        one_of([], [], [b"NX"], [b"xx"]),
        one_of([], [], [b"GET"]),
        _end,
    ),
    "SETNX": _words("SETNX", _keys, _values),
    "SETEX": _words("SETEX", _keys, _in_seconds, _values),
    "MSET": _words("MSET", _key_pairs),
    "APPEND": _words("APPEND", _keys, _values),
    "INCR": _words("INCR", _keys),
    "DECR": _words("DECR", _keys),
    "INCRBY": _words("INCRBY", _keys, _amount),
    "DECRBY": _words("DECRBY", _keys, _amount),
    "DEL": _words("DEL", _key_list),
    "UNLINK": _words("UNLINK", _key_list),
    "RENAME": _words("RENAME", _keys, _keys),
    "EXPIRE": _words("EXPIRE", _keys, _over(_in_seconds), _deadline),
    "PEXPIRE": _words("PEXPIRE", _keys, _over(_in_ms), _deadline),
    "PERSIST": _words("PERSIST", _keys),
    "FLUSHALL": _words("FLUSHALL", _how),
    "FLUSHDB": _words("FLUSHDB", _how),
    "HSET": _words("HSET", _keys, _pairs),
    "HDEL": _words("HDEL", _keys, _many),
    "RPUSH": _words("RPUSH", _keys, _many),
    "LPUSH": _words("LPUSH", _keys, _many),
    "LPOP": _words("LPOP", _keys, _count),
    "RPOP": _words("RPOP", _keys, _count),
    "SADD": _words("SADD", _keys, _many),
    "SREM": _words("SREM", _keys, _many),
    "ZADD": _words("ZADD", _keys, _condition, one_of([], [b"CH"]), _scored),
    "ZREM": _words("ZREM", _keys, _many),
}
_FLUSHES = ("FLUSHALL", "FLUSHDB")
_others = mixed(*[KEY_WRITES[name] for name in KEY_WRITES if name not in _FLUSHES])
key_words = mixed(*[_others] * 60, *[KEY_WRITES[name] for name in _FLUSHES])


def _key_op(world: World, at: Moment, words: Words) -> tuple[Words, Effect]:
    words = world.keys.settled(words, at)
    return words, partial(World.run_keys, words=words)


key_ops = then(key_words, lambda words: Op("keys", (words,)))

# -- prefixes --------------------------------------------------------------------

NAMESPACES = (b"alpha", b"a:b|c d", b"alpha@4", b"\xff\x00\n", b"e")
RAW = (b"raw", b"lone_pk")
SIDS = tuple(ns + side for ns in NAMESPACES for side in (b"_pk", b"_pv")) + RAW
STATE_SIDS = (b"alpha", b"alpha@4", b"alpha@4@x", b"a:b|c d@", b"e", b"solo", b"\xff\x00\n@\r")
FORMATS = ("fp16", "bf16", "fp32", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32", "raw:48")
_namespaces = one_of(*NAMESPACES)
_sids = one_of(*SIDS)
_formats = one_of(*FORMATS)
_dims = one_of(32, 64, 8)
_layers = one_of(0, 0, 1, 2, 1023)
_seeds = number_of(0, 3)


def _leaf(width: int, fmt: str, heads: int) -> dict[str, Any]:
    return {"k": width, "v": width // 2 * 2, "heads": heads, "format": fmt}


_leaves = some(
    then(each(one_of(32, 64, 8, 0), _formats, one_of(0, 2)), lambda drawn: _leaf(*drawn)), 1, 3
)
_blocks = then(some(lambda rng: rng.randbytes(8), 0, 5), b"".join)


def _resolved(width: int, fmt: str, heads: int) -> Spec:
    from pion_vllm_mlx.formats import resolve

    return width, resolve(fmt, width).name, heads


def _register(
    world: World,
    at: Moment,
    namespace: bytes,
    shape: tuple[int, str, int],
    leaves: list[dict[str, Any]] | None,
    hashes: bytes | None,
) -> tuple[Words, Effect]:
    dim, fmt, heads = shape
    words = [b"KV.PREFIX.REGISTER", namespace, b"%d" % dim, fmt.encode()]
    words += [b"HEADS", b"%d" % heads] if heads else []
    specs: tuple[dict[int, Spec], dict[int, Spec]] = {}, {}
    if leaves is not None:
        words += [b"leaves", json.dumps(leaves).encode()]
        for held, side in zip(specs, "kv", strict=True):
            held.update(
                (n, _resolved(leaf[side], leaf["format"], leaf["heads"]))
                for n, leaf in enumerate(leaves)
            )
    blocks = None
    if hashes is not None:
        count = len(hashes) // 8
        words += [b"BLOCKS", b"64", b"%d" % count, hashes]
        blocks = (64).to_bytes(4, "little") + count.to_bytes(4, "little") + hashes
    sides = [Side(dim, fmt, heads, held) for held in specs]
    return tuple(words), lambda after, _: after.prefixes.register(namespace, sides, blocks)


_roped = one_of((64, "bf16_rope_fp8_body:32"))
_schemas = some(mixed(each(one_of(32, 64), one_of(*FORMATS[:-1])), _roped), 1, 3)


def _create(
    world: World, at: Moment, sid: bytes, dim: int, fmt: str, schema: list[tuple[int, str]] | None
) -> tuple[Words, Effect]:
    words = [b"V.CREATE", sid, b"%d" % dim]
    if schema is None:
        words += [b"VQUANT", fmt.encode()]
        side = Side(dim, fmt, 0, {})
    else:
        words += [b"SCHEMA", b"%d" % len(schema)]
        for width, name in schema:
            fmt, _, rope = name.partition(":")
            words.append((f"fmt={fmt},dim={width}" + f",rope={rope}" * bool(rope)).encode())
        specs = {n: (width, name, 0) for n, (width, name) in enumerate(schema)}
        side = Side(dim, "int8", 0, specs)

    def effect(after: World, moment: Moment) -> AnyNumber:
        after.prefixes.create(sid, side)
        return AnyNumber()

    return tuple(words), effect


_how_sent = then(
    each(one_of("F32", "F16", "STORED"), one_of(False, True), one_of(False, True)),
    lambda drawn: dict(zip(("encoding", "head_major", "crc"), drawn, strict=True)),
)
_NO_SPEC: Spec = (8, "fp32", 0)


def _store(
    world: World, at: Moment, place: tuple[bytes, int, int], count: int, seed: int, how: Any
) -> tuple[Words, Effect]:
    sid, layer, start = place
    side = world.prefixes.sides.get(sid)
    try:
        spec = _NO_SPEC if side is None else side.spec(layer)
    except Refused:
        spec = _NO_SPEC
    if spec[0] == 0:
        count = 0
    if count > 100:
        # above what rides in the log
        count = 70_000 // max(1, len(sent_rows(place, spec, 1, seed, how).rows[0])) + 1
    sent: RowsSent = sent_rows(place, spec, count, seed, how)
    words = [b"V.STOREBATCH", sid, *(b"%d" % n for n in (layer, start, count)), sent.wire]
    return (*words, *sent.options), lambda after, _: after.prefixes.store(sent)


def _ssm_store(
    world: World, at: Moment, sid: bytes, layer: int, length: int, seed: int
) -> tuple[Words, Effect]:
    blob = bytes([seed, 255 - seed]) * (length // 2)
    words = (b"SSM.PREFIX.STORE", sid, b"%d" % layer, blob)
    return words, lambda after, _: after.prefixes.store_state(sid, layer, blob)


def _ssm_drop(world: World, at: Moment, sid: bytes, layer: int | None) -> tuple[Words, Effect]:
    words = (b"SSM.PREFIX.DROP", sid) + (() if layer is None else (b"%d" % layer,))
    return words, lambda after, _: after.prefixes.drop_state(sid, layer)


def _drop(world: World, at: Moment, namespaces: list[bytes]) -> tuple[Words, Effect]:
    words = (b"KV.PREFIX.DROP", *namespaces)
    return words, lambda after, _: after.prefixes.drop(namespaces)


def _v_drop(world: World, at: Moment, name: bytes, sids: list[bytes]) -> tuple[Words, Effect]:
    return (name, *sids), lambda after, _: after.prefixes.drop_sessions(sids)


def _pin(world: World, at: Moment, namespace: bytes, pinned: bool) -> tuple[Words, Effect]:
    name = b"KV.PREFIX.PIN" if pinned else b"KV.PREFIX.UNPIN"
    return (name, namespace), lambda after, _: after.prefixes.pin(namespace, pinned)


def _expire(world: World, at: Moment, namespace: bytes, seconds: int) -> tuple[Words, Effect]:
    """A deadline far away, or none."""
    words = (b"KV.PREFIX.EXPIRE", namespace, b"%d" % seconds)
    return words, lambda after, _: int(bool(after.prefixes.of_namespace(namespace)))


_state_layers = one_of(0, 1, 65535)
_lengths = one_of(0, 2, 300, 300, 66_000)
_nothing = one_of(None)
PREFIX_OPS: dict[str, Draw] = {
    "register": each(
        _namespaces,
        each(_dims, _formats, one_of(0, 2)),
        mixed(_nothing, _leaves),
        mixed(_nothing, _blocks),
    ),
    "create": each(_sids, _dims, _formats, mixed(_nothing, _nothing, _schemas)),
    "store": each(
        each(_sids, _layers, one_of(0, 0, 4, 20)), one_of(0, 1, 4, 7, 7, 101), _seeds, _how_sent
    ),
    "ssm_store": each(one_of(*STATE_SIDS), _state_layers, _lengths, _seeds),
    "ssm_drop": each(one_of(*STATE_SIDS), mixed(_nothing, _state_layers)),
    "drop": each(some(_namespaces, 1, 2)),
    "v_drop": each(one_of(b"V.DROP", b"V.FREE"), some(_sids, 1, 2)),
    "pin": each(_namespaces, one_of(True, True, False)),
    "expire": each(_namespaces, one_of(-1, 100_000)),
}


def _op(kind: str) -> Draw:
    return then(PREFIX_OPS[kind], lambda params: Op(kind, params))


_often = ("register", "store", "store", "store", "ssm_store", "pin")
prefix_ops = mixed(*[_op(kind) for kind in _often * 4], *[_op(kind) for kind in PREFIX_OPS])

PREPARE: dict[str, Callable[..., tuple[Words, Effect]]] = {
    "keys": _key_op,
    "register": _register,
    "create": _create,
    "store": _store,
    "ssm_store": _ssm_store,
    "ssm_drop": _ssm_drop,
    "drop": _drop,
    "v_drop": _v_drop,
    "pin": _pin,
    "expire": _expire,
}
