"""The manifest of a SAVE: the log that would build today's state, and no more.

``pion.vstore.<w>`` and ``pion.ssm.<w>`` are files of records like the WALs (see
``framing``): session after session in access order, each with its surviving runs in
the order they were stored, then the sealed segments, then END with the number of
records. The rows stay in ``pion.segments.<w>/``.

A portable copy is one file that carries all of it:

============  =============================================================
type          meaning (all little endian)
============  =============================================================
bytes         the V-store manifest, the SSM snapshot, every segment
JSON          table of ``[name, offset, length]``, one entry for each of them
u64           length of the table
u32           CRC-32C of the table
u32           format version, 1
8 s           magic ``PIONPC01``
============  =============================================================
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from crc32c import crc32c

from pion_vllm_mlx.errors import DamagedData, NewerFormat
from pion_vllm_mlx.server.store import framing, records
from pion_vllm_mlx.server.store.files import (
    TEMPORARY,
    FileHandle,
    NotRegular,
    pread_exactly,
    publish,
)
from pion_vllm_mlx.server.store.index import InSegment, Place, Run, Session
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES
from pion_vllm_mlx.server.store.segment import SUFFIX, Segment
from pion_vllm_mlx.server.store.state import SavedState, State
from pion_vllm_mlx.server.store.wal import Inline, Logged

PORTABLE = b"PIONPC01"
_CUT = "the file is cut short; if it is a copy, copy it once more, whole"
_TRAILER = struct.Struct("<QII8s")


def _kept(place: Place, length: int) -> tuple[str, int, bytes]:
    """Segment and offset of a place, or the bytes that lie in a log: a record carries them."""
    if isinstance(place, InSegment):
        return place.segment.name, place.offset, b""
    return "", 0, pread_exactly(place.file.fd, length, place.offset)


def _run_record(session: Session, layer: int, run: Run, shown: int) -> records.Rows:
    shape = run.shape
    segment, offset, blob = _kept(run.place, shape.file_bytes)
    return records.Rows(
        session.sid,
        layer,
        run.start,
        shape.rows,
        shape.head_major,
        shape.padded,
        run.crc,
        run.sent_crc,
        segment,
        offset,
        blob,
        run.run_id,
        shown if shown < shape.rows else 0,
    )


def _keeping(session: Session) -> Iterator[records.Record]:
    """What a session has beside its rows."""
    if session.blocks is not None:
        yield records.Blocks(session.sid, session.blocks.block_size, session.blocks.blob)
    if session.pinned:
        yield records.Pin((session.sid,), True)
    if session.deadline_ms:
        yield records.Expire((session.sid,), session.deadline_ms)


def sealed_names(segments: Iterable[Segment]) -> set[str]:
    """The names of those that are sealed now."""
    return {segment.name for segment in segments if segment.sealed}


def vstore_records(state: State, sealed: Collection[str] | None = None) -> Iterator[records.Record]:
    """Sessions least recently used first, each with its runs as they arrived; then seals.

    Replaying a session's runs touches it, so that the order of access is this order. Seals are
    told of segments among ``sealed``, by default of all that are sealed by the end.
    """
    for session in state.by_access():
        specs = {layer: (spec.width, spec.fmt, spec.heads) for layer, spec in session.specs.items()}
        yield records.Create(
            session.sid, session.dim, session.requested, session.fmt, session.heads, specs
        )
        yield from _keeping(session)
        runs = [(layer, *one) for layer, rows in session.layers.items() for one in rows.showing()]
        for layer, run, shown in sorted(runs, key=lambda entry: entry[1].run_id):
            yield _run_record(session, layer, run, shown)
        # a truncation may leave a count that no run reaches
        counts = {
            layer: rows.count
            for layer, rows in session.layers.items()
            if rows.count > rows.extents[-1].end
        }
        if counts:
            yield records.Truncate(session.sid, counts)
    segments = live_segments(state)
    told = sealed_names(segments) if sealed is None else sealed
    for segment in segments:
        if segment.name in told:
            yield records.Seal(segment.name, segment.size, segment.header_bytes, segment.header_crc)


def ssm_records(state: State) -> Iterator[records.Record]:
    """Every recurrent state, least recently used first; short ones with their bytes.

    A start knows no times: this order is all that it has.
    """
    found = state.states.items()
    for sid, layers in sorted(found, key=lambda one: max(b.accessed for b in one[1].values())):
        for layer, blob in layers.items():
            segment, offset, data = _kept(blob.place, blob.length)
            yield records.StoreState(sid, layer, blob.length, blob.crc, segment, offset, data)


def chunks(
    magic: bytes,
    covered_lsn: int,
    content: Iterable[records.Record],
    placed: Callable[[records.Record, int], None] = lambda record, offset: None,
) -> Iterator[bytes]:
    """The bytes of a snapshot file. ``placed`` learns where a record's inline bytes lie."""
    head = framing.header(magic, covered_lsn)
    at, lsn = len(head), 0
    yield head
    for lsn, record in enumerate(content, start=1):
        data = framing.frame(lsn, record.op, record.payload())
        at += len(data)
        placed(record, at - len(record.inline))
        yield data
    yield framing.frame(lsn + 1, framing.END, framing.end_payload(lsn))


def publish_states(path: Path, state: State, covered_lsn: int) -> list[SavedState]:
    """Write the SSM snapshot; where in it the short states lie. Raises OSError."""
    found: list[tuple[bytes, int, int]] = []

    def placed(record: records.Record, offset: int) -> None:
        if isinstance(record, records.StoreState) and not record.segment:
            found.append((record.sid, record.layer, offset))

    content = chunks(framing.SSM_SNAPSHOT, covered_lsn, ssm_records(state), placed)
    file = publish(path, content)
    return [SavedState(sid, layer, Inline(file, offset)) for sid, layer, offset in found]


def load(path: Path, magic: bytes) -> tuple[int, Iterator[Logged]] | None:
    """A snapshot's covered LSN and records; None when there is no file.

    The whole file is checked first, records are made one by one. Raises DamagedData or
    NewerFormat.
    """
    if not path.exists():
        return None
    file = FileHandle(path, os.O_RDONLY)
    if file.size() < framing.HEADER_BYTES:
        raise DamagedData(f"{path.name} at {file.size()}: {_CUT}")
    found = framing.scan(file.mapped(), magic, path.name)
    _refuse_cut(path.name, file, found)
    if found.damage is not None:
        raise DamagedData(f"{path.name} at {found.damage.offset}: {found.damage.reason}")
    for number, frame in enumerate(found.frames):
        end = frame.payload_offset + len(frame.payload)
        if frame.op == framing.END:
            if end != file.size():
                raise DamagedData(f"{path.name} at {end}: bytes behind the end")
            if bytes(frame.payload) != framing.end_payload(number):
                raise DamagedData(f"{path.name} at {end}: the end counts other records")
            return found.covered_lsn, logged(file, found.frames[:number])
        if not records.is_known(frame.op):
            at = frame.payload_offset - framing.FRAME_BYTES
            raise DamagedData(f"{path.name} at {at}: unknown operation {frame.op}")
    raise DamagedData(f"{path.name} at {found.valid_bytes}: {_CUT}")


def _refuse_cut(name: str, file: FileHandle, found: framing.Scan) -> None:
    """Raise DamagedData for a portable copy whose end, and with it its table, is missing."""
    if not found.frames or found.frames[-1].op != framing.END:
        return
    end = found.frames[-1].payload_offset + len(found.frames[-1].payload)
    behind = pread_exactly(file.fd, min(8, file.size() - end), end)
    if behind and framing.SSM_SNAPSHOT.startswith(behind):
        raise DamagedData(f"{name} at {file.size()}: no table of contents at its end: {_CUT}")


def logged(file: FileHandle, frames: Iterable[framing.Frame]) -> Iterator[Logged]:
    """The records of a file, made one by one. Raises DamagedData."""
    for frame in frames:
        record, begin = records.parse(frame.op, frame.payload)
        yield Logged(frame.lsn, record, Inline(file, frame.payload_offset + begin))


def write_portable(path: Path, state: State, covered_lsn: int) -> None:
    """One file with the manifest, the states and every segment's bytes. Raises OSError.

    While it is written it has one of the names that are the server's own.
    """
    table: list[tuple[str, int, int]] = []
    temporary = path.with_name(f"pion.{path.name}{TEMPORARY}")
    publish(path, _portable_chunks(state, covered_lsn, table), temporary)


def _portable_chunks(
    state: State, covered_lsn: int, table: list[tuple[str, int, int]]
) -> Iterator[bytes]:
    parts: list[tuple[str, Iterator[bytes]]] = [
        ("manifest", chunks(framing.VSTORE_SNAPSHOT, covered_lsn, vstore_records(state))),
        ("states", chunks(framing.SSM_SNAPSHOT, 0, ssm_records(state))),
    ]
    parts += [(segment.name, _content(segment)) for segment in live_segments(state)]
    at = 0
    for name, pieces in parts:
        begin = at
        for piece in pieces:
            at += len(piece)
            yield piece
        table.append((name, begin, at - begin))
    text = json.dumps(table).encode()
    yield text + _TRAILER.pack(len(text), crc32c(text), framing.VERSION, PORTABLE)


def live_segments(state: State) -> list[Segment]:
    """Every segment that a run or a state lives in."""
    places = [run.place for session in state.sessions.values() for run in session.runs()]
    places += [blob.place for layers in state.states.values() for blob in layers.values()]
    found = {p.segment.name: p.segment for p in places if isinstance(p, InSegment)}
    return list(found.values())


def _content(segment: Segment) -> Iterator[bytes]:
    """A segment's file; one that a store still writes to as far as it goes now."""
    file = segment.file
    size = segment.size if segment.sealed else file.size()
    for at in range(0, size, WINDOW_BYTES):
        yield pread_exactly(file.fd, min(WINDOW_BYTES, size - at), at)


def _table(file: FileHandle, name: str) -> list[tuple[str, int, int]] | None:
    """The entries of a portable copy; None for any other file.

    Raises DamagedData, NewerFormat.
    """
    size = file.size()
    if size < _TRAILER.size:
        return None
    trailer = pread_exactly(file.fd, _TRAILER.size, size - _TRAILER.size)
    length, crc, version, magic = _TRAILER.unpack(trailer)
    if magic != PORTABLE:
        return None
    if version > framing.VERSION:
        raise NewerFormat(
            f"{name} has format version {version}, this version reads up to {framing.VERSION}"
        )
    begin = size - _TRAILER.size - length
    if begin < 0 or crc32c(text := pread_exactly(file.fd, length, begin)) != crc:
        raise DamagedData(f"{name} at {max(begin, 0)}: table of contents is wrong")
    return [(str(entry), int(at), int(count)) for entry, at, count in json.loads(text)]


def may_replace(path: Path) -> bool:
    """Whether a portable copy may be written to ``path``: nothing is there, or another one.

    Raises OSError for what cannot be read.
    """
    try:
        return is_portable(path)
    except FileNotFoundError:
        return True
    except NotRegular:
        return False


def is_portable(path: Path) -> bool:
    """Whether a file ends as portable copies do; nothing else of it is checked. Raises OSError."""
    file = FileHandle(path, os.O_RDONLY)
    at = file.size() - len(PORTABLE)
    return at >= 0 and pread_exactly(file.fd, len(PORTABLE), at) == PORTABLE


def unpack_portable(path: Path, folder: Path, source: Path | None = None) -> bool:
    """Turn a portable file in the manifest's place into manifest, states and segments.

    True when ``source``, which is ``path`` by default, was one; ``path`` is replaced last.
    Raises OSError, DamagedData, NewerFormat.
    """
    file = FileHandle(source or path, os.O_RDONLY)
    entries = _table(file, path.name)
    if entries is None:
        return False
    targets = {"manifest": path, "states": path.with_name(path.name.replace("vstore", "ssm"))}
    for name, begin, count in reversed(entries):
        if name not in targets and not name.isalnum():
            raise DamagedData(f"{path.name}: table of contents names {name!r}")
        steps = range(begin, begin + count, WINDOW_BYTES)
        end = begin + count
        publish(
            targets.get(name, folder / f"{name}{SUFFIX}"),
            (pread_exactly(file.fd, min(WINDOW_BYTES, end - at), at) for at in steps),
        )
    return True
