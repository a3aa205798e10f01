"""The logged effects of the keyspace, and their bytes.

A change is a verb and byte strings: what a command did, with every deadline and
number already worked out. ``Data.apply`` carries it out, live and on replay.

=========  ==============================  ==================================
verb       parts                           effect
=========  ==============================  ==================================
SET        key, value                      a string without a deadline
DELETE     key …                           keys are gone
DEADLINE   key, unix milliseconds          the key ends then; 0: it stays
APPEND     key, bytes                      the string gets longer
HSET       key, field, value …             fields are set
HDEL       key, field …                    fields are gone
ZADD       key, member, score …            scores are set (float.hex)
ZREM       key, member …                   members are gone
SADD       key, member …                   members are there
SREM       key, member …                   members are gone
RPUSH      key, item …                     items follow the last
LPUSH      key, item …                     each item precedes the first
RPOP       key, number                     so many last items are gone
LPOP       key, number                     so many first items are gone
RENAME     key, key                        the second name holds it now
FLUSH                                      every key is gone
=========  ==============================  ==================================

The changes of one command, or of one transaction, are one batch: replayed whole
or not at all. Its bytes are ``[u8 verb][u32 parts]{[u32 length][bytes]}`` for each
change, little endian. A long batch is cut into pieces, one record each: WHOLE, or
FIRST, MORE …, LAST. Pieces without their LAST were never acknowledged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.server.store.records import Record

#: a batch longer than this is logged in pieces.
PIECE_BYTES = 16 << 20
#: no batch is longer.
MAX_BATCH_BYTES = 1 << 30

WHOLE, FIRST, MORE, LAST = 1, 2, 3, 4

_HEAD = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")


class Verb(IntEnum):
    """What a change does; the numbers are those of the log."""

    SET = 1
    DELETE = 2
    DEADLINE = 3
    APPEND = 4
    HSET = 5
    HDEL = 6
    ZADD = 7
    ZREM = 8
    SADD = 9
    SREM = 10
    RPUSH = 11
    LPUSH = 12
    RPOP = 13
    LPOP = 14
    RENAME = 15
    FLUSH = 16


#: what only takes away.
FREEING = frozenset(
    (Verb.DELETE, Verb.HDEL, Verb.ZREM, Verb.SREM, Verb.RPOP, Verb.LPOP, Verb.FLUSH)
)


@dataclass(frozen=True)
class Change(Record):
    """One effect. The table of the module says what the parts are."""

    op = 0
    log = "keyspace"
    verb: Verb
    parts: tuple[bytes, ...] = ()

    def fields(self) -> dict[str, Any]:
        return {"verb": self.verb.name, "parts": self.parts}

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys that the change touches; FLUSH touches all and names none."""
        if self.verb in (Verb.DELETE, Verb.RENAME):
            return self.parts
        return self.parts[:1]


@dataclass(frozen=True)
class Piece(Record):
    """A batch, or a part of one, as one record of the log."""

    kind: int
    data: bytes

    @property
    def op(self) -> int:  # type: ignore[override]
        return self.kind

    def fields(self) -> dict[str, Any]:
        return {}

    def payload(self) -> bytes:
        return self.data


def change(verb: Verb, *parts: bytes) -> Change:
    """A change of these parts."""
    return Change(verb, parts)


def _chunks(changes: Iterable[Change]) -> Iterator[bytes]:
    """The bytes of a batch, nothing of it copied."""
    for one in changes:
        yield _HEAD.pack(one.verb, len(one.parts))
        for part in one.parts:
            yield _LENGTH.pack(len(part))
            yield part


def size_of(changes: Iterable[Change]) -> int:
    """How many bytes a batch of these has."""
    return sum(_HEAD.size + sum(_LENGTH.size + len(part) for part in one.parts) for one in changes)


def decode(data: bytes | memoryview) -> Iterator[Change]:
    """The changes of a batch. Raises DamagedData for bytes that are none."""
    view = memoryview(data)
    at = 0
    try:
        while at < len(view):
            verb, count = _HEAD.unpack_from(view, at)
            at += _HEAD.size
            parts: list[bytes] = []
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(view, at)
                at += _LENGTH.size + length
                if at > len(view):
                    raise DamagedData("a batch of changes is cut")
                parts.append(bytes(view[at - length : at]))
            yield Change(Verb(verb), tuple(parts))
    except (struct.error, ValueError) as error:
        raise DamagedData(f"a batch of changes cannot be read: {error}") from error


def pieces(changes: Sequence[Change]) -> Iterator[Piece]:
    """The records of one batch, made one by one: a long batch is never joined whole."""
    left = size_of(changes)
    if left <= PIECE_BYTES:
        yield Piece(WHOLE, b"".join(_chunks(changes)))
        return
    kind, held, size = FIRST, list[memoryview](), 0
    for chunk in _chunks(changes):
        view = memoryview(chunk)
        while size + len(view) >= PIECE_BYTES:
            taken, view = view[: PIECE_BYTES - size], view[PIECE_BYTES - size :]
            left -= PIECE_BYTES
            yield Piece(kind if left else LAST, b"".join([*held, taken]))
            kind, held, size = MORE, [], 0
        held.append(view)
        size += len(view)
    if left:
        yield Piece(LAST, b"".join(held))


class Assembler:
    """Puts batches together again. Pieces that another batch follows are forgotten."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._open = False

    def add(self, op: int, payload: bytes | memoryview) -> Iterator[Change]:
        """The changes that are complete with this record. Raises DamagedData."""
        if op == WHOLE:
            self._forget()
            return decode(payload)
        if op == FIRST:
            self._forget()
            self._open = True
        elif op not in (MORE, LAST):
            raise DamagedData(f"unknown operation {op}")
        elif not self._open:
            raise DamagedData("a piece without those before it")
        self._held += payload
        if op != LAST:
            return iter(())
        data = bytes(self._held)
        self._forget()
        return decode(data)

    def _forget(self) -> None:
        self._held = bytearray()
        self._open = False
