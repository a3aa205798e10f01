"""The logged effects, one class each, and their bytes.

A payload is ``[u32 length of the JSON][JSON][blob]``: the JSON holds the fields
(session ids as Latin-1 text, which maps every byte to itself), the blob the
bytes of short runs and states. ``State.apply`` turns a record into state; it
must not need anything that is not in the record.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pion_vllm_mlx.errors import DamagedData

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Record:
    """Base of every effect. ``log`` names the WAL it belongs to."""

    op: ClassVar[int]
    log: ClassVar[str] = "vstore"

    def fields(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def inline(self) -> bytes | memoryview:
        """Bytes that ride in the log itself."""
        return b""

    def payload(self) -> bytes:
        head = json.dumps(self.fields(), separators=(",", ":")).encode()
        return b"".join((_LENGTH.pack(len(head)), head, self.inline))


def text(sid: bytes) -> str:
    """A session id as JSON text."""
    return sid.decode("latin-1")


def raw(value: str) -> bytes:
    """A session id from JSON text."""
    return value.encode("latin-1")


@dataclass(frozen=True)
class Create(Record):
    """A session exists. ``specs`` maps a layer to ``[width, format, heads]``."""

    op = 1
    sid: bytes
    dim: int
    requested: str
    fmt: str
    heads: int = 0
    specs: dict[int, tuple[int, str, int]] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        return {
            "sid": text(self.sid),
            "dim": self.dim,
            "requested": self.requested,
            "fmt": self.fmt,
            "heads": self.heads,
            "specs": self.specs,
        }

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> Create:
        specs = {int(k): (int(w), str(m), int(h)) for k, (w, m, h) in f["specs"].items()}
        return cls(raw(f["sid"]), f["dim"], f["requested"], f["fmt"], f["heads"], specs)


@dataclass(frozen=True)
class Rows(Record):
    """A run of rows arrived. In a segment at ``offset``, or inline when ``segment`` is empty.

    A ``blob`` beside a segment is what has to be written there before the record is logged.

    ``crc`` covers the rows as stored, ``sent_crc`` the same rows as they travel
    in the storage format (they differ for formats of several parts only). A run is
    known by the sequence number of its first record; a snapshot, whose records are
    numbered anew, carries it in ``run_id``, and in ``shown`` how many rows from the first
    on a truncation has left (0: all). ``copied`` rows were there before: that is no access.
    """

    op = 2
    sid: bytes
    layer: int
    start: int
    rows: int
    head_major: bool
    padded: int
    crc: int
    sent_crc: int
    segment: str = ""
    offset: int = 0
    blob: bytes | memoryview = b""
    run_id: int = 0
    shown: int = 0
    copied: bool = False

    @property
    def inline(self) -> bytes | memoryview:
        return b"" if self.segment else self.blob

    def fields(self) -> dict[str, Any]:
        saved = {"run": self.run_id} if self.run_id else {}
        if self.shown:
            saved["shown"] = self.shown
        if self.copied:
            saved["copied"] = 1
        return {
            **saved,
            "sid": text(self.sid),
            "layer": self.layer,
            "start": self.start,
            "rows": self.rows,
            "hnd": self.head_major,
            "padded": self.padded,
            "crc": self.crc,
            "sent": self.sent_crc,
            "segment": self.segment,
            "offset": self.offset,
        }

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> Rows:
        return cls(
            raw(f["sid"]),
            f["layer"],
            f["start"],
            f["rows"],
            f["hnd"],
            f["padded"],
            f["crc"],
            f["sent"],
            f["segment"],
            f["offset"],
            blob,
            f.get("run", 0),
            f.get("shown", 0),
            bool(f.get("copied")),
        )


@dataclass(frozen=True)
class Drop(Record):
    """Sessions are gone: dropped, evicted, expired or damaged; ``at`` in unix seconds."""

    op = 3
    sids: tuple[bytes, ...]
    reason: str
    at: int

    def fields(self) -> dict[str, Any]:
        return {"sids": [text(s) for s in self.sids], "reason": self.reason, "at": self.at}

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> Drop:
        return cls(tuple(raw(s) for s in f["sids"]), f["reason"], f["at"])


@dataclass(frozen=True)
class Truncate(Record):
    """Layers of a session get these token counts; rows behind them are gone."""

    op = 5
    sid: bytes
    lengths: dict[int, int]

    def fields(self) -> dict[str, Any]:
        return {"sid": text(self.sid), "lengths": self.lengths}

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> Truncate:
        return cls(raw(f["sid"]), {int(n): int(length) for n, length in f["lengths"].items()})


@dataclass(frozen=True)
class Blocks(Record):
    """A session has this table of block hashes (u64 little endian); it replaces an earlier one."""

    op = 6
    sid: bytes
    block_size: int
    hashes: bytes | memoryview

    @property
    def inline(self) -> bytes | memoryview:
        return self.hashes

    def fields(self) -> dict[str, Any]:
        return {"sid": text(self.sid), "block_size": self.block_size}

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> Blocks:
        if len(blob) % 8:
            raise ValueError("half a block hash")
        return cls(raw(f["sid"]), f["block_size"], bytes(blob))


@dataclass(frozen=True)
class Pin(Record):
    """Sessions are evicted last, or no longer."""

    op = 7
    sids: tuple[bytes, ...]
    pinned: bool

    def fields(self) -> dict[str, Any]:
        return {"sids": [text(s) for s in self.sids], "pinned": self.pinned}

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> Pin:
        return cls(tuple(raw(s) for s in f["sids"]), bool(f["pinned"]))


@dataclass(frozen=True)
class Expire(Record):
    """Sessions end at ``deadline_ms``, unix milliseconds; 0: never."""

    op = 8
    sids: tuple[bytes, ...]
    deadline_ms: int

    def fields(self) -> dict[str, Any]:
        return {"sids": [text(s) for s in self.sids], "deadline_ms": self.deadline_ms}

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> Expire:
        return cls(tuple(raw(s) for s in f["sids"]), int(f["deadline_ms"]))


@dataclass(frozen=True)
class Seal(Record):
    """A segment is complete: its size, its header's checksum, and the inline runs it took in.

    ``moves`` holds ``(log sequence number of the run's record, offset)``; a moved
    run is stored dense or spaced as ``padded`` of the third entry says.
    """

    op = 4
    segment: str
    size: int
    header_bytes: int
    header_crc: int
    moves: tuple[tuple[int, int, int], ...] = ()

    def fields(self) -> dict[str, Any]:
        return {
            "segment": self.segment,
            "size": self.size,
            "header": self.header_bytes,
            "crc": self.header_crc,
            "moves": self.moves,
        }

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> Seal:
        moves = tuple((int(a), int(b), int(c)) for a, b, c in f["moves"])
        return cls(f["segment"], f["size"], f["header"], f["crc"], moves)


@dataclass(frozen=True)
class StoreState(Record):
    """A recurrent state (opaque bytes), in a segment or inline."""

    op = 16
    log = "ssm"
    sid: bytes
    layer: int
    length: int
    crc: int
    segment: str = ""
    offset: int = 0
    blob: bytes | memoryview = b""

    @property
    def inline(self) -> bytes | memoryview:
        return self.blob

    def fields(self) -> dict[str, Any]:
        return {
            "sid": text(self.sid),
            "layer": self.layer,
            "length": self.length,
            "crc": self.crc,
            "segment": self.segment,
            "offset": self.offset,
        }

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> StoreState:
        return cls(
            raw(f["sid"]), f["layer"], f["length"], f["crc"], f["segment"], f["offset"], blob
        )


@dataclass(frozen=True)
class DropStates(Record):
    """States are gone: one layer, or with ``layer`` −1 all layers, of each sid.

    ``reason`` is not logged: who counts what left reads it, and nobody later.
    """

    op = 17
    log = "ssm"
    sids: tuple[bytes, ...]
    layer: int = -1
    reason: str = field(default="", compare=False)

    def fields(self) -> dict[str, Any]:
        return {"sids": [text(s) for s in self.sids], "layer": self.layer}

    @classmethod
    def parse(cls, f: dict[str, Any], blob: bytes | memoryview) -> DropStates:
        return cls(tuple(raw(s) for s in f["sids"]), f["layer"])


_PARSERS = {
    kind.op: kind.parse
    for kind in (Create, Rows, Drop, Seal, Truncate, Blocks, Pin, Expire, StoreState, DropStates)
}


def changed_sids(record: Record) -> tuple[bytes, ...]:
    """The V-store sessions that a record changes."""
    match record:
        case Rows() | Create() | Truncate():
            return (record.sid,)
        case Drop():
            return record.sids
    return ()


def told_sids(record: Record) -> tuple[bytes, ...]:
    """The sessions about which a record changes anything that others are told."""
    return record.sids if isinstance(record, Expire) else changed_sids(record)


def is_known(op: int) -> bool:
    """Whether this version has an effect for the operation."""
    return op in _PARSERS


def parse(op: int, payload: bytes | memoryview) -> tuple[Record, int]:
    """The record of a payload, and where in the payload its inline bytes begin.

    Raises DamagedData for an operation or a payload this version cannot read.
    """
    parser = _PARSERS.get(op)
    if parser is None:
        raise DamagedData(f"unknown operation {op}")
    try:
        (length,) = _LENGTH.unpack_from(payload)
        begin = _LENGTH.size + length
        fields = json.loads(str(payload[_LENGTH.size : begin], "ascii"))
        return parser(fields, payload[begin:]), begin
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DamagedData(f"operation {op}: {error}") from error
