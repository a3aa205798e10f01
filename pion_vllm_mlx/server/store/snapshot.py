"""The manifest of a SAVE: the log that would build today's state, and no more.

``pion.vstore.<w>`` and ``pion.ssm.<w>`` are files of records like the WALs (see
``framing``): sessions in access order, their sealed segments, their surviving
runs in the order they were stored; then END with the number of records. The rows
stay in ``pion.segments.<w>/``. A portable copy carries the segments' bytes behind
END, in the order of its SEAL records.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.server.store import framing, records
from pion_vllm_mlx.server.store.files import (
    FILE_MODE,
    FileHandle,
    flush,
    flush_directory,
    pread_exactly,
    pwrite_all,
)
from pion_vllm_mlx.server.store.index import InSegment, Run, Session, place_fd
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES
from pion_vllm_mlx.server.store.segments import Segment
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.server.store.wal import Inline, Logged

_COUNT = struct.Struct("<Q")


def _run_record(session: Session, layer: int, run: Run) -> records.Rows:
    shape = run.shape
    segment, offset = "", 0
    blob = b""
    if isinstance(run.place, InSegment):
        segment, offset = run.place.segment.name, run.place.offset
    else:
        blob = pread_exactly(place_fd(run.place), shape.file_bytes, run.place.offset)
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
    )


def vstore_records(state: State) -> Iterator[records.Record]:
    """Sessions least recently used first, then runs in the order they arrived, then seals."""
    runs: list[tuple[int, Session, int, Run]] = []
    segments: dict[str, Segment] = {}
    for session in state.by_access():
        specs = {layer: (spec.width, spec.fmt, spec.heads) for layer, spec in session.specs.items()}
        yield records.Create(
            session.sid, session.dim, session.requested, session.fmt, session.heads, specs
        )
        for layer, rows in session.layers.items():
            runs += [(run.run_id, session, layer, run) for run in rows.runs()]
    for _, session, layer, run in sorted(runs, key=lambda entry: entry[0]):
        if isinstance(run.place, InSegment):
            segments[run.place.segment.name] = run.place.segment
        yield _run_record(session, layer, run)
    for layers in state.states.values():
        for blob in layers.values():
            if isinstance(blob.place, InSegment):
                segments[blob.place.segment.name] = blob.place.segment
    for segment in segments.values():
        if segment.sealed:
            yield records.Seal(segment.name, segment.size, segment.header_bytes, segment.header_crc)


def ssm_records(state: State) -> Iterator[records.Record]:
    """Every recurrent state; short ones with their bytes."""
    for sid, layers in state.states.items():
        for layer, blob in layers.items():
            segment, offset, data = "", 0, b""
            if isinstance(blob.place, InSegment):
                segment, offset = blob.place.segment.name, blob.place.offset
            else:
                data = pread_exactly(place_fd(blob.place), blob.length, blob.place.offset)
            yield records.StoreState(sid, layer, blob.length, blob.crc, segment, offset, data)


def chunks(
    magic: bytes, covered_lsn: int, content: Iterator[records.Record]
) -> list[bytes | memoryview]:
    """The bytes of a snapshot file."""
    result: list[bytes | memoryview] = [framing.header(magic, covered_lsn)]
    lsn = 0
    for lsn, record in enumerate(content, start=1):
        result.append(framing.frame(lsn, record.op, record.payload()))
    result.append(framing.frame(lsn + 1, framing.END, _COUNT.pack(lsn)))
    return result


def load(path: Path, magic: bytes) -> tuple[int, list[Logged]] | None:
    """A snapshot's covered LSN and records; None when there is no file.

    Raises DamagedData or NewerFormat.
    """
    if not path.exists():
        return None
    file = FileHandle(path, os.O_RDONLY)
    data = memoryview(pread_exactly(file.fd, file.size(), 0))
    found = framing.scan(data, magic, path.name)
    if found.damage is not None:
        raise DamagedData(f"{path.name} at {found.damage.offset}: {found.damage.reason}")
    logged: list[Logged] = []
    for frame in found.frames:
        if frame.op == framing.END:
            if _COUNT.unpack(frame.payload)[0] != len(logged):
                raise DamagedData(f"{path.name}: END counts other records than there are")
            return found.covered_lsn, logged
        record, begin = records.parse(frame.op, frame.payload)
        logged.append(Logged(frame.lsn, record, Inline(file, frame.payload_offset + begin)))
    raise DamagedData(f"{path.name} at {found.valid_bytes}: the file is cut")


def write_portable(path: Path, state: State, covered_lsn: int) -> None:
    """One file with the manifest, the states and every segment's bytes. Raises OSError.

    Layout: the V-store manifest, the SSM snapshot, the segments, then a JSON table of
    ``[name, offset, length]`` and its length as u64.
    """
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        table, at = [], 0
        parts = {
            "manifest": chunks(framing.VSTORE_SNAPSHOT, covered_lsn, vstore_records(state)),
            "states": chunks(framing.SSM_SNAPSHOT, 0, ssm_records(state)),
        }
        for name, pieces in parts.items():
            begin = at
            for piece in pieces:
                pwrite_all(fd, piece, at)
                at += len(piece)
            table.append([name, begin, at - begin])
        for segment in live_segments(state):
            table.append([segment.name, at, segment.size])
            _copy(segment, fd, at)
            at += segment.size
        text = json.dumps(table).encode()
        pwrite_all(fd, text + _COUNT.pack(len(text)), at)
        flush(fd)
        os.replace(temporary, path)
        flush_directory(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def live_segments(state: State) -> list[Segment]:
    """Every segment that a run or a state lives in."""
    places = [run.place for session in state.sessions.values() for run in session.runs()]
    places += [blob.place for layers in state.states.values() for blob in layers.values()]
    found = {p.segment.name: p.segment for p in places if isinstance(p, InSegment)}
    return list(found.values())


def _copy(segment: Segment, fd: int, offset: int) -> None:
    at = 0
    while at < segment.size:
        data = pread_exactly(segment.file.fd, min(WINDOW_BYTES, segment.size - at), at)
        pwrite_all(fd, data, offset + at)
        at += len(data)


def unpack_portable(path: Path, folder: Path) -> bool:
    """Turn a portable file in the manifest's place into manifest, states and segments.

    True when ``path`` was one. Raises OSError, DamagedData.
    """
    size = path.stat().st_size
    file = FileHandle(path, os.O_RDONLY)
    if size < framing.HEADER_BYTES + _COUNT.size:
        return False
    (length,) = _COUNT.unpack(pread_exactly(file.fd, _COUNT.size, size - _COUNT.size))
    if not 0 < length < size - _COUNT.size:
        return False
    try:
        table = json.loads(pread_exactly(file.fd, length, size - _COUNT.size - length))
        entries = [(str(name), int(begin), int(count)) for name, begin, count in table]
    except (ValueError, TypeError):
        return False
    targets = {"manifest": path, "states": path.with_name(path.name.replace("vstore", "ssm"))}
    for name, begin, count in reversed(entries):
        if not (name in targets or name.isalnum()) or begin + count > size:
            raise DamagedData(f"{path.name}: table of contents names {name!r}")
        target = targets.get(name, folder / f"{name}.safetensors")
        temporary = target.with_name(target.name + ".tmp")
        out = FileHandle(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for at in range(0, count, WINDOW_BYTES):
            step = min(WINDOW_BYTES, count - at)
            pwrite_all(out.fd, pread_exactly(file.fd, step, begin + at), at)
        flush(out.fd)
        os.replace(temporary, target)
    return True
