"""Commands that have to be refused whatever is stored, at least one for every write."""

from __future__ import annotations

from pion_vllm_mlx.server import commands
from pion_vllm_mlx.server.command import TABLE, Command

assert commands.__all__

HUGE = b"99999999999999999999999999"
_NUMBERS = (b"x", b"", HUGE, b"1.5", b" 1", b"+1", b"\xd9\xa1")


def _numbers(*words: bytes, at: int, more: tuple[bytes, ...] = ()) -> list[tuple[bytes, ...]]:
    """The command with each bad number in place of word ``at``."""
    return [(*words[:at], bad, *words[at + 1 :]) for bad in (*_NUMBERS, *more)]


def _wrong_count(command: Command) -> list[tuple[bytes, ...]]:
    """Too few words, or too many where a command takes exactly so many."""
    name = command.name.encode()
    if command.arity >= 0:
        return [
            (name, *[b"k"] * count) for count in (command.arity - 2, command.arity) if count >= 0
        ]
    return [(name, *[b"k"] * (-command.arity - 2))] if command.arity < -1 else []


_ROWS = (b"V.STOREBATCH", b"alpha_pk", b"0", b"0", b"1", b"blob")
_STATE = (b"SSM.PREFIX.STORE", b"alpha", b"0", b"blob")
_REGISTER = (b"KV.PREFIX.REGISTER", b"fresh", b"64", b"fp16")
_CREATE = (b"V.CREATE", b"fresh_pk", b"64")

INVALID: dict[str, list[tuple[bytes, ...]]] = {
    "SET": [
        (b"SET", b"k", b"v", *rest)
        for rest in (
            (b"NX", b"XX"),
            (b"EX",),
            (b"EX", b"0"),
            (b"PX", b"-1"),
            (b"EX", b"x"),
            (b"EX", HUGE),
            (b"EX", b"9223372036854775807"),
            (b"EX", b"1", b"PX", b"1"),
            (b"KEEPTTL", b"EX", b"1"),
            (b"BOGUS",),
        )
    ],
    "SETEX": _numbers(b"SETEX", b"k", b"1", b"v", at=2, more=(b"0", b"-1")),
    "MSET": [(b"MSET", b"k", b"v", b"l")],
    "INCRBY": _numbers(b"INCRBY", b"k", b"1", at=2),
    "DECRBY": _numbers(b"DECRBY", b"k", b"1", at=2, more=(b"-9223372036854775808",)),
    "EXPIRE": _numbers(b"EXPIRE", b"k", b"1", at=2)
    + [(b"EXPIRE", b"k", b"1", b"NX", b"GT"), (b"EXPIRE", b"k", b"1", b"\xff")],
    "PEXPIRE": _numbers(b"PEXPIRE", b"k", b"1", at=2) + [(b"PEXPIRE", b"k", b"1", b"GT", b"LT")],
    "RENAME": [(b"RENAME", b"there is no such key", b"k")],
    "HSET": [(b"HSET", b"k", b"a", b"1", b"b")],
    "LPOP": _numbers(b"LPOP", b"k", b"1", at=2, more=(b"-1",)) + [(b"LPOP", b"k", b"1", b"1")],
    "RPOP": _numbers(b"RPOP", b"k", b"1", at=2, more=(b"-1",)),
    "ZADD": [
        (b"ZADD", b"k", *rest)
        for rest in (
            (b"nan", b"a"),
            (b"x", b"a"),
            (b"1", b"a", b"2"),
            (b"NX", b"XX", b"1", b"a"),
            (b"GT", b"LT", b"1", b"a"),
            (b"1_0", b"a"),
        )
    ],
    "FLUSHALL": [(b"FLUSHALL", b"NOW"), (b"FLUSHALL", b"ASYNC", b"SYNC")],
    "FLUSHDB": [(b"FLUSHDB", b"NOW")],
    "EXEC": [(b"EXEC",), (b"EXEC", b"k")],
    "KV.PREFIX.REGISTER": [
        *_numbers(*_REGISTER, at=2, more=(b"0", b"-1", b"65537")),
        (*_REGISTER[:3], b"fp17"),
        (*_REGISTER[:3], b"bf16_rope_fp8_body:8"),
        (b"KV.PREFIX.REGISTER", b"", b"64", b"fp16"),
        *(
            (*_REGISTER, *rest)
            for rest in (
                (b"HEADS",),
                (b"HEADS", b"0"),
                (b"HEADS", b"2", b"HEADS", b"2"),
                (b"PREFILL_MS", b"-5"),
                (b"BLOCKS", b"64", b"2", b"short"),
                (b"BLOCKS", b"0", b"0", b""),
                (b"BLOCKS", b"64"),
                (b"LEAVES", b"[]"),
                (b"LEAVES", b"{}"),
                (b"LEAVES", b"[[]]"),
                (b"LEAVES", b"not json"),
                (b"LEAVES", b"\xff\xfe"),
                (b"LEAVES", b'[{"k":8,"v":8,"heads":2,"format":"\\ud800"}]'),
                (b"LEAVES", b'[{"k":8,"v":8,"heads":1e999,"format":"fp16"}]'),
                (b"LEAVES", b'[{"k":-8,"v":8,"heads":2,"format":"fp16"}]'),
                (b"LEAVES", b"[" * 5000 + b"]" * 5000),
                (b"LEAVES", b'[{"k":' + b"9" * 5000 + b',"v":8,"heads":2,"format":"fp16"}]'),
                (b"BOGUS", b"1"),
            )
        ),
    ],
    "KV.PREFIX.DROP": [(b"KV.PREFIX.DROP", b"alpha", b"")],
    "KV.PREFIX.PIN": [(b"KV.PREFIX.PIN", b"")],
    "KV.PREFIX.UNPIN": [(b"KV.PREFIX.UNPIN", b"")],
    "KV.PREFIX.EXPIRE": _numbers(b"KV.PREFIX.EXPIRE", b"alpha", b"1", at=2, more=(b"-2",)),
    "V.CREATE": [
        *_numbers(*_CREATE, at=2, more=(b"0", b"-1")),
        *(
            (*_CREATE, *rest)
            for rest in (
                (b"VQUANT",),
                (b"VQUANT", b"fp17"),
                (b"VQUANT", b"bf16_rope_fp8_body"),
                (b"SCHEMA",),
                (b"SCHEMA", b"60"),
                (b"SCHEMA", b"2", b"fmt=fp16"),
                (b"SCHEMA", b"1", b"dim=8"),
                (b"SCHEMA", b"1", b"fmt=fp8,dim=33"),
                (b"SCHEMA", b"1", b"fmt=fp16,s=1"),
                (b"SCHEMA", b"1", b"fmt=fp16,color=red"),
                (b"SCHEMA", b"1", b"fmt=bf16_rope_fp8_body,rope=64"),
                (b"SCHEMA", b"1", b"fmt=\xff,dim=8"),
            )
        ),
    ],
    "V.DROP": [(b"V.DROP", b"alpha_pk", b"")],
    "V.FREE": [(b"V.FREE", b"alpha_pk", b"")],
    "V.RESTORE": _numbers(b"V.RESTORE", b"alpha_pk", b"1", at=2, more=(b"0", b"1")),
    "V.STOREBATCH": [
        _ROWS,
        *(bad for at in (2, 3, 4) for bad in _numbers(*_ROWS, at=at, more=(b"-1",))),
        (*_ROWS[:2], b"1024", *_ROWS[3:]),
        (*_ROWS[:3], b"2147483647", b"1", b"blob"),
        (*_ROWS[:1], b"nobody_pk", *_ROWS[2:]),
        (*_ROWS, b"FMT", b"F8"),
        (*_ROWS, b"FMT"),
        (*_ROWS, b"LAYOUT", b"HND"),
        (*_ROWS, b"CRC", b"-1"),
        (*_ROWS[:5], b"x" * 70_000),
        (*_ROWS[:5], b"x" * 1_100_000),
        (*_ROWS[:4], b"1000000", b"x" * 8_400_000),
    ],
    "SSM.PREFIX.STORE": [
        *_numbers(*_STATE, at=2, more=(b"-1", b"65536")),
        (*_STATE, b"CRC"),
        (*_STATE, b"CRC", b"1"),
        (*_STATE, b"CRC", b"x"),
        (*_STATE[:3], b"x" * 70_000, b"CRC", b"1"),
        (*_STATE[:3], b"x" * 8_400_000, b"CRC", b"1"),
        (*_STATE, b"BOGUS", b"1"),
    ],
    "SSM.PREFIX.DROP": _numbers(b"SSM.PREFIX.DROP", b"alpha", b"0", at=2, more=(b"-1",))
    + [(b"SSM.PREFIX.DROP", b"alpha", b"0", b"0"), (b"SSM.PREFIX.DROP", b"")],
    "STATE.ALLOC": _numbers(b"STATE.ALLOC", b"new", b"1", at=2, more=(b"0", b"-1"))
    + [(b"STATE.ALLOC", b"new", b"8", b"MODE", b"cube"), (b"STATE.ALLOC", b"", b"8")],
    "STATE.WRITE": _numbers(b"STATE.WRITE", b"s", b"0", b"data", at=2, more=(b"-1",))
    + [(b"STATE.WRITE", b"no such slot", b"0", b"data")],
    "KV.STORE": [
        (b"KV.STORE", b"one", b"short", b"blob"),
        (b"KV.STORE", b"one", b"\xff" * 3072, b"blob"),
        (b"KV.STORE", b"one", b"\0" * 3072, b"blob", b"TTL", b"-1"),
        (b"KV.STORE", b"one", b"\0" * 3072, b"blob", b"MODEL"),
    ],
    "ATTEND.CREATE": _numbers(b"ATTEND.CREATE", b"new", b"8", b"8", at=2, more=(b"0",))
    + [
        (b"ATTEND.CREATE", b"new", b"8", b"8", b"VQUANT", b"fp17"),
        (b"ATTEND.CREATE", b"new", b"8", b"8", b"KQUANT", b"raw:x"),
        (b"ATTEND.CREATE", b"new", b"8", b"8", b"BOUNDARY", b"-1"),
    ],
    "ATTEND.STORE": _numbers(b"ATTEND.STORE", b"i", b"0", b"1", b"k", b"v", at=3, more=(b"0",))
    + _numbers(b"ATTEND.STORE", b"i", b"0", b"1", b"k", b"v", at=2, more=(b"-1", b"65536")),
}


def invalid_commands() -> list[tuple[bytes, ...]]:
    """Every command of the list, and a wrong number of words for every write."""
    writes = [command for command in TABLE.values() if command.write or command.grows]
    found = [words for command in writes for words in _wrong_count(command)]
    return found + [words for forms in INVALID.values() for words in forms]
