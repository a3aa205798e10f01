"""What is kept of a damaged snapshot, and what becomes of the segments that it named.

A session is a function of its records from its Create on: one of which all of them verify is
kept, any other goes, and the log behind the snapshot says what became of those that stay. A
recurrent state is one record. No other rule is needed, since no record changes two sessions'
content, and rows and states have checksums of their own.

Segments that nothing names any more may be named by what was set aside: they are moved to a
folder beside it, and deleted by who deletes that.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crc32c import crc32c

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.server.store import framing, records, snapshot
from pion_vllm_mlx.server.store.files import (
    DIRECTORY_MODE,
    FileHandle,
    aside_name,
    flush_directory,
    pread_exactly,
)
from pion_vllm_mlx.server.store.index import InSegment
from pion_vllm_mlx.server.store.sealing import run_tensors, tensor_name
from pion_vllm_mlx.server.store.segment import MAX_SEGMENT_BYTES, Segment
from pion_vllm_mlx.server.store.segment_header import LENGTH_BYTES, Tensor
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.server.store.wal import Logged

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 256 << 20


def kept(path: Path, magic: bytes) -> tuple[int, Iterator[Logged]] | None:
    """The LSN that a damaged snapshot covers, and those of its records that are kept.

    None where nothing is. Raises NewerFormat, OSError.
    """
    file = FileHandle(path, os.O_RDONLY)
    try:
        covered, found = framing.survivors(file.mapped(), magic, path.name)
    except DamagedData:
        return None
    known = [frame if frame and records.is_known(frame.op) else None for frame in found]
    if magic == framing.VSTORE_SNAPSHOT:
        return covered, snapshot.logged(file, _whole_sessions(known))
    return covered, snapshot.logged(file, filter(None, known))


def _whole_sessions(found: Iterable[framing.Frame | None]) -> Iterator[framing.Frame]:
    """The records of sessions of which none is missing, and the seals.

    Behind a gap a session may begin whose Create is lost: nothing counts up to the next one.
    """
    session: list[framing.Frame] = []
    for frame in found:
        if frame is None:
            session = []
        elif frame.op == records.Create.op:
            yield from session
            session = [frame]
        elif frame.op == records.Seal.op:
            yield from session
            session = []
            yield frame
        elif session:
            session.append(frame)
    yield from session


def adopt_seals(state: State, segments: Iterable[Segment]) -> set[str]:
    """Seal again what was sealed, by the headers of the files; the names of what is unclear.

    With a snapshot its seals were lost. A sealed segment that several share must not be taken for
    an open one: what lives there of others than its own group would be cut off. Where the header
    says something else than the records, what lives in such a one cannot be kept; one group's
    own is sealed anew.
    """
    unsealed = {s.name: s for s in segments if not s.sealed and s.uses}
    if not unsealed:
        return set()
    unclear = set()
    living: dict[str, list[Tensor]] = {name: [] for name in unsealed}
    for name, tensor in _tensors(state):
        if name in living:
            living[name].append(tensor)
    for name, segment in unsealed.items():
        file = segment.file
        if file.fd < 0 or _is_open(file):
            continue  # gone, which is found later; or never sealed: only its records count
        header = _header(file)
        if header is None or not all(_names(header, tensor) for tensor in living[name]):
            if segment.guests:
                unclear.add(name)
            continue
        segment.sealed = segment.closed = True
        segment.size, segment.header_bytes = file.size(), len(header.raw)
        segment.header_crc = crc32c(header.raw)
    return unclear


def _tensors(state: State) -> Iterator[tuple[str, Tensor]]:
    """Everything that lives in segments, with the name of its segment."""
    for session in state.sessions.values():
        for layer, rows in session.layers.items():
            for run in rows.runs():
                if isinstance(run.place, InSegment):
                    name = tensor_name(session, layer, run)
                    for tensor in run_tensors(name, run.shape, run.place.offset):
                        yield run.place.segment.name, tensor
    for layers in state.states.values():
        for layer, blob in layers.items():
            if isinstance(blob.place, InSegment):
                at = blob.place.offset
                tensor = Tensor(f"state.{layer}", "U8", [blob.length], at, blob.length)
                yield blob.place.segment.name, tensor


@dataclass(frozen=True)
class _Header:
    """A sealed file's first bytes, and the entries in them."""

    raw: bytes
    entries: dict[str, Any]


def _is_open(file: FileHandle) -> bool:
    """Whether a header was never begun: room was left for it."""
    size = min(LENGTH_BYTES, file.size())
    return not any(pread_exactly(file.fd, size, 0))


def _header(file: FileHandle) -> _Header | None:
    """The header of a whole safetensors file; None for anything else."""
    size = file.size()
    if not LENGTH_BYTES <= size <= MAX_SEGMENT_BYTES + _MOST_HEADER_BYTES:
        return None
    (length,) = _LENGTH.unpack(pread_exactly(file.fd, LENGTH_BYTES, 0))
    if length > min(size - LENGTH_BYTES, _MOST_HEADER_BYTES):
        return None
    raw = pread_exactly(file.fd, LENGTH_BYTES + length, 0)
    try:
        entries = json.loads(raw[LENGTH_BYTES:])
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return _Header(raw, entries) if len(raw) + end == size else None


def _names(header: _Header, tensor: Tensor) -> bool:
    """Whether a file's header says of what lives there what its record says."""
    begin = tensor.offset - len(header.raw)
    expected = {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "data_offsets": [begin, begin + tensor.length],
    }
    return bool(header.entries.get(tensor.name) == expected)


def move_aside(folder: Path, files: Iterable[Path]) -> tuple[int, str]:
    """Move segment files to a folder of their own; how many, and its name, empty without any."""
    moved = [path for path in files if os.path.lexists(path)]
    if not moved:
        return 0, ""
    aside = aside_name(folder)
    aside.mkdir(mode=DIRECTORY_MODE)
    for path in moved:
        os.replace(path, aside / path.name)
    flush_directory(aside)
    flush_directory(folder)
    flush_directory(folder.parent)
    return len(moved), aside.name
