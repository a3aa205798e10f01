"""Random frames of the binary lane, for every opcode, and what mutated ones call for."""

from __future__ import annotations

import struct
from random import Random

from pion_vllm_mlx.server.binary_commands import OPERATIONS
from tests.hostile.fuzz_bytes import PLAIN, Expected, Mutation

MAGIC = 0xCA5E
MAX_BODY = 1 << 30
_HEADER = struct.Struct("<HBI")
_SIDS = (b"s1", b"s2", b"s3", b"\xff\x00", b"x" * 40)
#: opcodes that nobody has declared
_UNKNOWN = tuple(
    code for code in (0, 4, 0x14, 0x25, 0x30, 0x38, 0x80, 0xFE) if code not in OPERATIONS
)
_CODES = tuple(OPERATIONS) * 4 + _UNKNOWN


def framed(code: int, body: bytes) -> bytes:
    return _HEADER.pack(MAGIC, code, len(body)) + body


def _sid(rng: Random) -> bytes:
    name = rng.choice(_SIDS) if rng.random() < 0.97 else rng.choice((b"", b"y" * 3000))
    length = len(name) if rng.random() < 0.97 else rng.choice((0, 1, 65535, len(name) + 1))
    return struct.pack("<H", length) + name


def _u16(rng: Random) -> bytes:
    value = rng.choice((0, 1, 2, 2, 4)) if rng.random() < 0.95 else rng.choice((4096, 4097, 65535))
    return struct.pack("<H", value)


def _u32(rng: Random) -> bytes:
    value = (
        rng.choice((1, 1, 2, 3)) if rng.random() < 0.95 else rng.choice((0, 1 << 31, 0xFFFFFFFF))
    )
    return struct.pack("<I", value)


def _tail(rng: Random) -> bytes:
    kind = rng.random()
    if kind < 0.01:
        return bytes(rng.choice((16_377, 16_384, 16_385, 40_000, 300_000)))
    return rng.choice((b"", bytes(16), bytes(24), rng.randbytes(48), b"abc"))


def _body(rng: Random, code: int) -> bytes:
    """Fields in the order in which the operation reads them."""
    name = OPERATIONS[code].name if code in OPERATIONS else ""
    match name:
        case "layer.store" | "layer.extend":
            return _sid(rng) + _u16(rng) + _tail(rng)
        case "layer.fetch" | "attend.finalize":
            return _sid(rng) + _u16(rng)
        case "layer.fetch_batch":
            count = rng.randint(0, 4)
            return _sid(rng) + struct.pack("<H", count) + b"".join(_u16(rng) for _ in range(count))
        case "attend.create":
            return _sid(rng) + rng.choice((struct.pack("<HH", 4, 2), _u16(rng) + _u16(rng)))
        case "attend.store":
            rows = rng.randint(1, 3)
            sensible = struct.pack("<HI", 0, rows) + rng.randbytes(24 * rows)
            return _sid(rng) + rng.choice((sensible, _u16(rng) + _u32(rng) + _tail(rng)))
        case "attend.query":
            return _sid(rng) + _u16(rng) + _u16(rng) + rng.choice((bytes(16), _tail(rng)))
        case "attend.prefix.query_fused":
            sizes = struct.pack("<HHHHII", 0, 2, 32, 2, 1, 1)
            changed = _u16(rng) * 4 + _u32(rng) * 2
            blobs = rng.randbytes(768) + b"\x00\x01" + rng.choice((b"", bytes(4)))
            return _sid(rng) + rng.choice((sizes, sizes, changed)) + blobs
    return rng.choice((b"", _tail(rng)))


def request(rng: Random) -> bytes:
    """One frame, well formed; its body may be anything."""
    code = rng.choice(_CODES)
    body = _body(rng, code)
    if body and rng.random() < 0.05:
        body = body[: rng.randrange(len(body))]
    return framed(code, body)


# -- mutations -------------------------------------------------------------------


def change_length(rng: Random, data: bytes) -> bytes:
    """Another length of the body."""
    if len(data) < _HEADER.size:
        return data
    (length,) = struct.unpack_from("<I", data, 3)
    near = [(length + step) & 0xFFFFFFFF for step in (-7, -1, 1, 2, 7)]
    far = (0, 16_384, 16_385, MAX_BODY, MAX_BODY + 1, 0xFFFFFFFF, 1 << 31)
    return data[:3] + struct.pack("<I", rng.choice((*near, *far))) + data[7:]


def change_code(rng: Random, data: bytes) -> bytes:
    return data[:2] + bytes([rng.randrange(256)]) + data[3:] if len(data) > 2 else data


def flip_in_body(rng: Random, data: bytes) -> bytes:
    """A change that leaves the frame whole."""
    if len(data) <= _HEADER.size:
        return data
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[rng.randrange(_HEADER.size, len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


MUTATIONS: tuple[Mutation, ...] = (
    *PLAIN,
    change_length,
    change_length,
    *[change_code, flip_in_body] * 4,
)


def expected(data: bytes) -> Expected:
    """One reply a whole frame; bad magic, or a body that is too long, ends the connection."""
    at = replies = 0
    while at < len(data):
        if len(data) - at < _HEADER.size:
            return Expected(replies, whole=False)
        magic, _, length = _HEADER.unpack_from(data, at)
        if magic != MAGIC or length > MAX_BODY:
            return Expected(replies, ends=True)
        at += _HEADER.size + length
        if at > len(data):
            return Expected(replies, whole=False)
        replies += 1
    return Expected(replies)


class Replies:
    """Counts whole reply frames at the beginning of a growing buffer."""

    def __init__(self) -> None:
        self.count = 0
        self._at = 0

    def update(self, data: bytearray) -> int:
        """How many whole replies there are. Raises AssertionError for what is no reply."""
        while len(data) - self._at >= _HEADER.size:
            magic, status, length = _HEADER.unpack_from(data, self._at)
            assert magic == MAGIC and status <= 3, f"no reply: {magic:#06x} {status}"
            if len(data) - self._at < _HEADER.size + length:
                break
            self._at += _HEADER.size + length
            self.count += 1
        return self.count
