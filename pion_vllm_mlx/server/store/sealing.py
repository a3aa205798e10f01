"""Sealing: what lies in a segment, and moving short runs out of the log into it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pion_vllm_mlx.server.store.files import pread_exactly, pwrite_all
from pion_vllm_mlx.server.store.index import (
    KEY_SUFFIX,
    VALUE_SUFFIX,
    InSegment,
    Run,
    Session,
    place_file,
)
from pion_vllm_mlx.server.store.records import Seal
from pion_vllm_mlx.server.store.segment import ALIGNMENT, Segment
from pion_vllm_mlx.server.store.segment_header import (
    TENSOR_HEADER_BYTES,
    Tensor,
    header_bytes_for,
)
from pion_vllm_mlx.server.store.segments import SegmentFolder
from pion_vllm_mlx.server.store.shapes import RunShape
from pion_vllm_mlx.server.store.state import InlineRun, State

#: files take whole ones of these on most file systems.
_DISK_BLOCK_BYTES = 4096


def side_of(sid: bytes) -> str:
    """``k`` or ``v`` for the sides of a namespace, ``x`` for any other session."""
    return {KEY_SUFFIX: "k", VALUE_SUFFIX: "v"}.get(sid[-3:], "x")


def sessions_of(state: State, group: bytes) -> Iterator[Session]:
    """The sessions whose rows lie in the segments of ``group``."""
    for sid in (group + KEY_SUFFIX, group + VALUE_SUFFIX, group):
        session = state.sessions.get(sid)
        if session is not None and (sid != group or side_of(sid) == "x"):
            yield session


def group_segments(state: State, group: bytes) -> list[Segment]:
    """The segments in which something of a group lives, each once."""
    places = [run.place for session in sessions_of(state, group) for run in session.runs()]
    places += [blob.place for blob in state.states.get(group, {}).values()]
    return list({p.segment.name: p.segment for p in places if isinstance(p, InSegment)}.values())


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


def segment_tensors(
    state: State, group: bytes, segments: Iterable[Segment]
) -> dict[str, list[Tensor]]:
    """Everything that lives in segments of a group, by their names: one look at all its runs."""
    found: dict[str, list[Tensor]] = {segment.name: [] for segment in segments}
    for session in sessions_of(state, group):
        for layer, rows in session.layers.items():
            for run in rows.runs():
                if isinstance(run.place, InSegment) and run.place.segment.name in found:
                    name = tensor_name(session, layer, run)
                    tensors = run_tensors(name, run.shape, run.place.offset)
                    found[run.place.segment.name] += tensors
    for layer, blob in state.states.get(group, {}).items():
        if isinstance(blob.place, InSegment) and blob.place.segment.name in found:
            tensor = Tensor(f"state.{layer}", "U8", [blob.length], blob.place.offset, blob.length)
            found[blob.place.segment.name].append(tensor)
    return found


class Mover:
    """Copies the inline runs of one group into a segment and lists the moves for its SEAL.

    ``most_bytes`` of them, by one run more at most; ``complete`` says whether that is all.
    """

    def __init__(self, state: State, group: bytes, most_bytes: int) -> None:
        self.runs: list[InlineRun] = []
        self.nbytes = 0
        self.complete = True
        for entry in state.inline_of(group):
            if self.nbytes >= most_bytes:
                self.complete = False
                break
            self.runs.append(entry)
            self.nbytes += entry.run.shape.data_bytes
        # where they are read in order, they lie in order
        self.runs.sort(key=lambda entry: (entry.session.sid, entry.layer, entry.run.start))

    def tensors_needed(self) -> int:
        return sum(len(run.shape.spec.parts()) for _, _, run in self.runs)

    def fits(self, segment: Segment) -> bool:
        """Whether the segment's header has room for every run."""
        room = segment.data_start // TENSOR_HEADER_BYTES - segment.tensors - 2
        return room >= self.tensors_needed()

    def move(self, segment: Segment) -> tuple[list[Tensor], tuple[tuple[int, int, int], ...]]:
        """Copy every run; their tensors and the moves. Reads and writes the disk."""
        tensors: list[Tensor] = []
        moves = []
        for session, layer, run in self.runs:
            shape = run.shape
            origin = segment.append(shape.file_bytes, len(shape.spec.parts()))
            self._copy(run, segment, origin)
            tensors += run_tensors(tensor_name(session, layer, run), shape, origin)
            moves.append((run.run_id, origin, shape.padded))
        return tensors, tuple(moves)

    def _copy(self, run: Run, segment: Segment, origin: int) -> None:
        source, target = place_file(run.place), segment.file
        data = pread_exactly(source.fd, run.shape.file_bytes, run.place.offset)
        pwrite_all(target.fd, data, origin)
        segment.written()


def prepare_segments(state: State, group: bytes, segments: Iterable[Segment]) -> None:
    """Work out the tails of segments of a group that were found unsealed at start.

    Nothing is written over: a reader may still hold a run there that no longer shows.
    """
    unknown = [segment for segment in segments if not segment.tail]
    found = segment_tensors(state, group, unknown) if unknown else {}
    for segment in unknown:
        tensors = found[segment.name]
        end = max((t.offset + t.length for t in tensors), default=segment.data_start)
        segment.tail = max(end, segment.file.size())
        segment.tensors = len(tensors)


@dataclass
class SealJob:
    """What one sealing of a group does: these segments, short runs moved into ``target``."""

    state: State
    folder: SegmentFolder
    group: bytes
    segments: list[Segment]
    mover: Mover
    target: Segment | None
    created: bool

    def carry_out(self) -> list[Seal]:
        """Write headers and moved runs; the records to log. Blocks.

        Changes files only. The write lock is held. Raises OSError, or ValueError for a
        header without room.
        """
        seals = []
        found = segment_tensors(self.state, self.group, self.segments)
        for segment in self.segments:
            tensors = found[segment.name]
            moves: tuple[tuple[int, int, int], ...] = ()
            if segment is self.target:
                moved, moves = self.mover.move(segment)
                tensors += moved
            self.folder.seal(segment, tensors)
            seals.append(
                Seal(segment.name, segment.size, segment.header_bytes, segment.header_crc, moves)
            )
        return seals

    def give_up(self) -> None:
        """Sealing failed: a segment made for it goes again. On the event loop."""
        if self.created and self.target is not None and not self.target.uses:
            self.folder.unlink(self.target)


def _header_blocks(segment: Segment) -> int:
    """What the header of an open segment takes of the disk, at most."""
    if not segment.tail:  # found at the start: nobody has counted its runs yet
        return segment.data_start
    blocks = -(-header_bytes_for(segment.tensors + 2) // _DISK_BLOCK_BYTES)
    return min(segment.data_start, blocks * _DISK_BLOCK_BYTES)


def seal_bytes(
    state: State, folder: SegmentFolder, groups: Iterable[bytes], most_bytes: int
) -> int:
    """What sealing these groups adds to the disk, at most: headers, and runs that still ride in
    the log, of which it moves about ``most_bytes``. On the event loop.
    """
    total = 0
    for group in groups:
        total += sum(_header_blocks(segment) for segment in folder.unsealed(group))
        mover = Mover(state, group, most_bytes)
        if mover.runs:
            total += header_bytes_for(mover.tensors_needed() + 2) + mover.nbytes
            total += ALIGNMENT * mover.tensors_needed() + 2 * _DISK_BLOCK_BYTES
        most_bytes -= mover.nbytes
        if most_bytes <= 0:
            break
    return total


def begin_seal(
    state: State, folder: SegmentFolder, group: bytes, most_bytes: int = sys.maxsize
) -> SealJob:
    """Choose what to seal of a group, and close it to further stores. Raises OSError.

    ``most_bytes`` limits the short runs that are moved out of the log.
    On the event loop, under the write lock: a segment that is chosen here has no writer
    and gets none.
    """
    unsealed = folder.unsealed(group)
    prepare_segments(state, group, unsealed)
    ready = [s for s in unsealed if s.writers == 0 and s.uses]
    for segment in ready:
        segment.closed = True
    mover = Mover(state, group, most_bytes)
    target, created = None, False
    if mover.runs:
        target = next((s for s in reversed(ready) if mover.fits(s)), None)
        if target is None:
            target, created = (
                folder.create(group, header_bytes_for(mover.tensors_needed() + 2)),
                True,
            )
            target.closed = True
            ready.append(target)
    return SealJob(state, folder, group, ready, mover, target, created)
