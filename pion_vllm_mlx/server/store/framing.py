"""The bytes of a log file. WALs and snapshots share them.

=======  ======  ============================================================
offset   type    meaning (all little endian)
=======  ======  ============================================================
0        8 s     magic: which file this is
8        u32     format version, 1
12       u32     0
16       u64     snapshots: last log sequence number they cover; WALs: 0
24       u32     CRC-32C of bytes 0 … 23
28       u32     0
32 …             records, back to back
=======  ======  ============================================================

A record: ``[u32 CRC-32C of the rest][u32 payload length][u64 LSN][u8 op][payload]``.
LSNs of one file follow each other without a gap. A snapshot ends with an END
record, so that a cut is seen. An empty WAL is 0 bytes long: it has no header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from pion_vllm_mlx.errors import DamagedData, NewerFormat

VERSION = 1
VSTORE_WAL = b"PIONVW01"
SSM_WAL = b"PIONSW01"
VSTORE_SNAPSHOT = b"PIONVS01"
SSM_SNAPSHOT = b"PIONSS01"
END = 255

_HEADER = struct.Struct("<8sIIQ")
_TAIL = struct.Struct("<II")
_FRAME = struct.Struct("<IIQB")
_REST = struct.Struct("<IQB")
_COUNT = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _TAIL.size
FRAME_BYTES = _FRAME.size
#: no record is longer: all but short rows and states live in segments.
MAX_PAYLOAD = 64 << 20
#: how far a search for a later record goes when not even the first one is valid.
_SEARCH_BYTES = 1 << 20
#: how many lost records a search for a later valid one looks past.
_RESYNC = 256


class Frame(NamedTuple):
    """One valid record: its LSN, operation, payload and the payload's place in the file."""

    lsn: int
    op: int
    payload: memoryview
    payload_offset: int


@dataclass(frozen=True)
class Damage:
    """An invalid place in a file that is not a torn end."""

    offset: int
    reason: str


@dataclass(frozen=True)
class Scan:
    """A file: valid records up to ``valid_bytes``, then nothing, a torn end or damage.

    ``last_changed``: the torn end is as long as a record; who is killed leaves a part of one.
    """

    frames: list[Frame]
    covered_lsn: int
    valid_bytes: int
    torn_bytes: int = 0
    damage: Damage | None = None
    last_changed: bool = False


def header(magic: bytes, covered_lsn: int = 0) -> bytes:
    """The first 32 bytes of a file."""
    head = _HEADER.pack(magic, VERSION, 0, covered_lsn)
    return head + _TAIL.pack(crc32c(head), 0)


def frame(lsn: int, op: int, payload: bytes) -> bytes:
    """One record's bytes."""
    rest = _REST.pack(len(payload), lsn, op)
    return struct.pack("<I", crc32c(payload, crc32c(rest))) + rest + payload


def _read_header(data: memoryview, magic: bytes, name: str) -> int:
    """The covered LSN; raises DamagedData or NewerFormat."""
    if len(data) < HEADER_BYTES:
        raise DamagedData("shorter than its header")
    found, version, _, covered = _HEADER.unpack_from(data)
    crc, _ = _TAIL.unpack_from(data, _HEADER.size)
    if found != magic:
        raise DamagedData(f"starts with {bytes(found)!r}, not {magic!r}")
    if crc != crc32c(data[: _HEADER.size]):
        raise DamagedData("header checksum is wrong")
    if version > VERSION:
        raise NewerFormat(
            f"{name} has format version {version}, this version reads up to {VERSION}"
        )
    return int(covered)


def _frame_at(data: memoryview, offset: int) -> Frame | None:
    """The valid record that begins at ``offset``, if one does."""
    if offset + FRAME_BYTES > len(data):
        return None
    crc, length, lsn, op = _FRAME.unpack_from(data, offset)
    end = offset + FRAME_BYTES + length
    if length > MAX_PAYLOAD or end > len(data) or crc != crc32c(data[offset + 4 : end]):
        return None
    return Frame(lsn, op, data[offset + FRAME_BYTES : end], offset + FRAME_BYTES)


def is_whole(data: memoryview) -> bool:
    """Whether bytes are as long as the record they begin with says, whatever else is in it."""
    return len(data) >= FRAME_BYTES and _FRAME.unpack_from(data)[1] == len(data) - FRAME_BYTES


def _later_frame(data: memoryview, offset: int, lsn: int) -> Frame | None:
    """A valid record behind ``offset`` whose LSN is one of those that should follow ``lsn``."""
    rest = bytes(data[offset:])
    for candidate in range(lsn, lsn + _RESYNC):
        pattern = struct.pack("<Q", candidate)
        found = rest.find(pattern)
        while found >= 0:
            begin = offset + found - 8
            if begin > offset:
                later = _frame_at(data, begin)
                if later is not None and later.lsn == candidate:
                    return later
            found = rest.find(pattern, found + 1)
    return None


def _frames(data: memoryview, offset: int) -> Iterator[Frame]:
    while True:
        frame_here = _frame_at(data, offset)
        if frame_here is None:
            return
        yield frame_here
        offset = frame_here.payload_offset + len(frame_here.payload)


def scan(data: memoryview, magic: bytes, name: str) -> Scan:
    """Every valid record of a WAL, and what follows the last of them.

    An invalid end is torn when no later valid record follows it, damage otherwise.
    A file cut inside its header is torn at 0. Raises NewerFormat.
    """
    if not data:
        return Scan([], 0, 0)
    try:
        covered = _read_header(data, magic, name)
    except DamagedData as error:
        if len(data) < HEADER_BYTES and header(magic).startswith(bytes(data)):
            return Scan([], 0, 0, torn_bytes=len(data))
        return Scan([], 0, 0, damage=Damage(0, str(error)))
    frames: list[Frame] = []
    end = HEADER_BYTES
    for found in _frames(data, HEADER_BYTES):
        if frames and found.lsn != frames[-1].lsn + 1:
            reason = f"record {found.lsn} follows record {frames[-1].lsn}"
            return Scan(frames, covered, end, damage=Damage(end, reason))
        frames.append(found)
        end = found.payload_offset + len(found.payload)
    if end == len(data):
        return Scan(frames, covered, end)
    next_lsn = frames[-1].lsn + 1 if frames else 1
    later = _later_frame(data, end, next_lsn) if frames else _any_frame(data, end)
    if later is None:
        changed = is_whole(data[end:])
        return Scan(frames, covered, end, torn_bytes=len(data) - end, last_changed=changed)
    reason = f"record {next_lsn} is invalid, record {later.lsn} after it is not"
    return Scan(frames, covered, end, damage=Damage(end, reason))


def survivors(data: memoryview, magic: bytes, name: str) -> tuple[int, list[Frame | None]]:
    """The LSN that a damaged snapshot covers, and its records that verify, without END.

    None stands for a record that does not verify. Behind the first of them the others stay only
    where every one verifies, up to an END at the end of the file that counts them: a length that
    was damaged may lead into what is stored, which may look like a record. Raises DamagedData
    where the header does not verify, or bytes follow the END; NewerFormat.
    """
    covered = _read_header(data, magic, name)
    found: list[Frame | None] = []
    offset, lsn = HEADER_BYTES, 1
    while (here := _frame_at(data, offset)) is not None and here.lsn == lsn:
        offset = here.payload_offset + len(here.payload)
        if here.op == END:
            if offset != len(data):
                raise DamagedData("bytes behind the end")
            return covered, found
        found.append(here)
        lsn += 1
    return covered, [*found, None, *_behind(data, offset, lsn)]


def _behind(data: memoryview, offset: int, lsn: int) -> list[Frame]:
    """The records behind a damaged one; none where another length of it would lead to the END.

    What is stored may have been made to reach into the record behind it: then the true length,
    from which the damaged one differs in a byte, leads to the END as well.
    """
    if offset + FRAME_BYTES > len(data):
        return []
    said, begin = int(_FRAME.unpack_from(data, offset)[1]), offset + FRAME_BYTES
    found = _up_to_end(data, begin + said, lsn + 1)
    others = (said ^ (change << place) for place in (0, 8, 16, 24) for change in range(1, 256))
    if found is None or any(_up_to_end(data, begin + n, lsn + 1) is not None for n in others):
        return []
    return found


def _up_to_end(data: memoryview, offset: int, lsn: int) -> list[Frame] | None:
    """The records from ``lsn`` at ``offset`` on, without the END; None where one is amiss."""
    if offset + FRAME_BYTES > len(data) or _FRAME.unpack_from(data, offset)[2] != lsn:
        return None
    found: list[Frame] = []
    for here in _frames(data, offset):
        if here.lsn != lsn + len(found):
            return None
        if here.op == END:
            whole = here.payload_offset + len(here.payload) == len(data)
            return found if whole and bytes(here.payload) == end_payload(here.lsn - 1) else None
        found.append(here)
    return None


def end_payload(count: int) -> bytes:
    """The payload of an END record behind so many others."""
    return _COUNT.pack(count)


def _any_frame(data: memoryview, offset: int) -> Frame | None:
    """A valid record anywhere behind ``offset``: for a log whose very first record is invalid."""
    last = min(len(data) - FRAME_BYTES, offset + _SEARCH_BYTES)
    for begin in range(offset + 1, last + 1):
        (length,) = struct.unpack_from("<I", data, begin + 4)
        if length <= len(data) - begin - FRAME_BYTES:
            found = _frame_at(data, begin)
            if found is not None and found.lsn > 0:
                return found
    return None
