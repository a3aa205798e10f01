"""Sealing: what lies in a segment, and moving short runs out of the log into it."""

from __future__ import annotations

from collections.abc import Iterator

from pion_vllm_mlx.server.store.files import pread_exactly, pwrite_all
from pion_vllm_mlx.server.store.index import (
    KEY_SUFFIX,
    VALUE_SUFFIX,
    InSegment,
    Run,
    Session,
    place_fd,
)
from pion_vllm_mlx.server.store.records import Seal
from pion_vllm_mlx.server.store.segments import (
    TENSOR_HEADER_BYTES,
    Segment,
    SegmentFolder,
    Tensor,
    header_bytes_for,
)
from pion_vllm_mlx.server.store.shapes import RunShape
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.server.store.wal import Inline


def side_of(sid: bytes) -> str:
    """``k`` or ``v`` for the sides of a namespace, ``x`` for any other session."""
    return {KEY_SUFFIX: "k", VALUE_SUFFIX: "v"}.get(sid[-3:], "x")


def sessions_of(state: State, group: bytes) -> Iterator[Session]:
    """The sessions whose rows lie in the segments of ``group``."""
    for sid in (group + KEY_SUFFIX, group + VALUE_SUFFIX, group):
        session = state.sessions.get(sid)
        if session is not None and (sid != group or side_of(sid) == "x"):
            yield session


def tensor_name(session: Session, layer: int, run: Run) -> str:
    """The name of a run's tensor, without the suffix of a part."""
    return f"{side_of(session.sid)}.{layer}.{run.start}-{run.start + run.shape.rows}"


def run_tensors(name: str, shape: RunShape, origin: int) -> Iterator[Tensor]:
    """The header entries of a run whose first byte is at ``origin``."""
    for part, base in shape.part_offsets():
        length = shape.padded * part.bytes_per_row
        yield Tensor(
            name + part.suffix, part.dtype, shape.tensor_shape(part), origin + base, length
        )


def segment_tensors(state: State, segment: Segment) -> Iterator[Tensor]:
    """Everything that lives in a segment."""
    for session in sessions_of(state, segment.group):
        for layer, rows in session.layers.items():
            for run in rows.runs():
                if isinstance(run.place, InSegment) and run.place.segment is segment:
                    name = tensor_name(session, layer, run)
                    yield from run_tensors(name, run.shape, run.place.offset)
    for layer, blob in state.states.get(segment.group, {}).items():
        if isinstance(blob.place, InSegment) and blob.place.segment is segment:
            yield Tensor(f"state.{layer}", "U8", [blob.length], blob.place.offset, blob.length)


class Mover:
    """Copies the inline runs of one group into a segment and lists the moves for its SEAL."""

    def __init__(self, state: State, folder: SegmentFolder, group: bytes) -> None:
        self.folder = folder
        self.group = group
        self.runs = [
            (session, layer, run)
            for session in sessions_of(state, group)
            for layer, rows in session.layers.items()
            for run in rows.runs()
            if isinstance(run.place, Inline)
        ]
        self.last = {
            (session.sid, layer): rows.extents[-1].run
            for session in sessions_of(state, group)
            for layer, rows in session.layers.items()
            if rows.extents
        }

    def tensors_needed(self) -> int:
        return sum(len(run.shape.spec.parts()) for _, _, run in self.runs)

    def target(self, unsealed: list[Segment]) -> Segment | None:
        """The segment to move into: the newest unsealed one with header space, or a new one."""
        if not self.runs:
            return None
        needed = self.tensors_needed()
        for segment in reversed(unsealed):
            room = segment.data_start // TENSOR_HEADER_BYTES - segment.tensors - 2
            if room >= needed:
                return segment
        segment = self.folder.create(self.group, 8 + header_bytes_for(needed + 2))
        segment.closed = True
        return segment

    def move(self, segment: Segment) -> tuple[list[Tensor], tuple[tuple[int, int, int], ...]]:
        """Copy every run; their tensors and the moves. Reads and writes the disk."""
        tensors: list[Tensor] = []
        moves = []
        for session, layer, run in self.runs:
            last = self.last[session.sid, layer] is run
            shape = run.shape
            if last and shape.head_major:
                shape = RunShape.spaced(shape.spec, shape.rows, True)
            origin = segment.tail
            self._copy(run, shape, segment, origin)
            segment.tail += shape.file_bytes
            segment.tensors += len(shape.spec.parts())
            tensors += run_tensors(tensor_name(session, layer, run), shape, origin)
            moves.append((run.run_id, origin, shape.padded))
        return tensors, tuple(moves)

    def _copy(self, run: Run, shape: RunShape, segment: Segment, origin: int) -> None:
        fd = place_fd(run.place)
        for source, target in zip(run.shape.pieces(), shape.pieces(), strict=True):
            data = pread_exactly(fd, source.length, run.place.offset + source.offset)
            pwrite_all(segment.file.fd, data, origin + target.offset)
        segment.dirty = True


def prepare_segment(state: State, segment: Segment) -> None:
    """Work out tail and header space of a segment that was found unsealed at start."""
    if segment.tail:
        return
    tensors = list(segment_tensors(state, segment))
    segment.data_start = min((t.offset for t in tensors), default=segment.data_start)
    segment.tail = max((t.offset + t.length for t in tensors), default=segment.data_start)
    segment.tensors = len(tensors)


def seal_group(state: State, folder: SegmentFolder, group: bytes) -> list[Seal]:
    """Seal every unsealed segment of a group, its inline runs moved in; the records to log.

    Changes files only. Called under the store's write lock, off the event loop; raises OSError.
    """
    unsealed = [s for s in folder.segments.values() if s.group == group and not s.sealed]
    for segment in unsealed:
        prepare_segment(state, segment)
    unsealed = [s for s in unsealed if s.writers == 0 and s.uses]
    mover = Mover(state, folder, group)
    target = mover.target(unsealed)
    if target is not None and target not in unsealed:
        unsealed.append(target)
    seals = []
    for segment in unsealed:
        tensors = list(segment_tensors(state, segment))
        moves: tuple[tuple[int, int, int], ...] = ()
        if segment is target:
            moved, moves = mover.move(segment)
            tensors += moved
        folder.seal(segment, tensors)
        seals.append(
            Seal(segment.name, segment.size, segment.header_bytes, segment.header_crc, moves)
        )
    return seals
