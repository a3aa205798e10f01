"""Copying what is alive out of segments that are mostly dead, and short runs into one.

A copy is stored like new rows: into a new segment, then a record that lays it over the
rows it was made from. Content never changes, whatever is lost in between; the old segment
goes when nothing lives in it any more. A source is verified before it is copied, however
often it was verified before: a copy gets a checksum of its own. A run in which rows of
several sessions live (``sharing``) is copied once, for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from crc32c import crc32c

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.server.store.files import pread_exactly
from pion_vllm_mlx.server.store.index import (
    Extent,
    InSegment,
    LayerRows,
    Session,
    StateBlob,
    group_of,
    place_file,
    same_place,
)
from pion_vllm_mlx.server.store.records import Record, Rows, Seal, StoreState
from pion_vllm_mlx.server.store.rows import (
    WINDOW_BYTES,
    RunWriter,
    as_bytes,
    check_run,
    read_head,
    read_layer,
)
from pion_vllm_mlx.server.store.sealing import prepare_segments, run_tensors, sessions_of, side_of
from pion_vllm_mlx.server.store.segment import Region, Segment
from pion_vllm_mlx.server.store.segment_header import Tensor, header_bytes_for
from pion_vllm_mlx.server.store.segments import SegmentFolder
from pion_vllm_mlx.server.store.shapes import SPACED_BYTES, RunShape
from pion_vllm_mlx.server.store.state import MANY_RUNS, State

#: fewer dead bytes of a segment are not worth a copy.
MIN_DEAD_BYTES = 256 << 10


def _shows(state: State, session: Session, layer: int, seen: list[Extent]) -> bool:
    """Whether a layer of a session that still lives shows these very extents."""
    rows = session.layers.get(layer)
    same = state.sessions.get(session.sid) is session
    return same and rows is not None and rows.extents is seen


@dataclass(frozen=True)
class RowsCopy:
    """Rows ``[start, end)`` of a layer, which ``seen`` (all its extents) shows in a row.

    ``sharers``: other sessions that show the same rows of the same run there, each with
    all extents of its layer.
    """

    session: Session
    layer: int
    seen: list[Extent]
    start: int
    end: int
    sharers: tuple[tuple[Session, list[Extent]], ...] = ()

    @property
    def group(self) -> bytes:
        return group_of(self.session.sid)

    @property
    def nbytes(self) -> int:
        return self.shape.file_bytes

    @property
    def parts(self) -> int:
        return len(self.shape.spec.parts())

    @property
    def extents(self) -> list[Extent]:
        layer = LayerRows(self.seen[0].run.shape.spec, 0, self.seen)
        return list(layer.covering(self.start, self.end))

    @property
    def shape(self) -> RunShape:
        """The new run's: spare rows only where the layer ends."""
        last = self.extents[-1].run.shape
        ends = [self.seen[-1].end, *(seen[-1].end for _, seen in self.sharers)]
        kind = RunShape.spaced if self.end in ends else RunShape.dense
        return kind(last.spec, self.end - self.start, last.head_major)

    def effects(self, state: State, record: Record) -> Iterator[Record]:
        """The copy's record, for each session whose rows are the ones that were copied."""
        assert isinstance(record, Rows)
        for session, seen in ((self.session, self.seen), *self.sharers):
            if _shows(state, session, self.layer, seen):
                yield replace(record, sid=session.sid)

    def write(self, region: Region) -> tuple[Record, list[Tensor]]:
        """Copy into the region. Blocks; raises DamagedData, OSError."""
        shape, extents = self.shape, self.extents
        for run in {id(extent.run): extent.run for extent in extents}.values():
            check_run(run)
        rows = LayerRows(shape.spec, 0, extents)
        writer = RunWriter(shape, region)
        step = max(1, WINDOW_BYTES // shape.spec.row_bytes)
        windows = [(at, min(at + step, self.end)) for at in range(self.start, self.end, step)]
        if shape.head_major:
            for head in range(shape.spec.heads):
                for first, last in windows:
                    writer.write(as_bytes(read_head(rows, head, first, last)))
        else:
            for first, last in windows:
                writer.write(as_bytes(read_layer(rows, first, last)))
        name = f"{side_of(self.session.sid)}.{self.layer}.{self.start}-{self.end}"
        return self._record(shape, writer, region), list(run_tensors(name, shape, region.offset))

    def _record(self, shape: RunShape, writer: RunWriter, region: Region) -> Rows:
        place = (region.segment.name, region.offset)
        crcs = (writer.crc, writer.stream_crc)
        layout = (shape.rows, shape.head_major, shape.padded)
        where = (self.session.sid, self.layer, self.start)
        return Rows(*where, *layout, *crcs, *place, copied=True)


@dataclass(frozen=True)
class StateCopy:
    """A recurrent state."""

    sid: bytes
    layer: int
    blob: StateBlob

    @property
    def group(self) -> bytes:
        return self.sid

    @property
    def nbytes(self) -> int:
        return self.blob.length

    @property
    def parts(self) -> int:
        return 1

    def effects(self, state: State, record: Record) -> Iterator[Record]:
        """The copy's record, if the state is the one that was copied."""
        if state.states.get(self.sid, {}).get(self.layer) is self.blob:
            yield record

    def write(self, region: Region) -> tuple[Record, list[Tensor]]:
        """Copy into the region. Blocks; raises DamagedData, OSError."""
        blob, crc = self.blob, 0
        source = blob.place
        file = place_file(source)
        for at in range(0, blob.length, WINDOW_BYTES):
            count = min(WINDOW_BYTES, blob.length - at)
            data = pread_exactly(file.fd, count, source.offset + at)
            crc = crc32c(data, crc)
            region.write(data, at)
        if crc != blob.crc:
            raise DamagedData(f"{file.path.name} at {source.offset}: checksum is wrong")
        place = (region.segment.name, region.offset)
        record = StoreState(self.sid, self.layer, blob.length, crc, *place)
        name = f"state.{self.layer}"
        return record, [Tensor(name, "U8", [blob.length], region.offset, blob.length)]


Copy = RowsCopy | StateCopy


#: the bytes of a run or state that live: with the spare rows behind them, and without.
_Live = tuple[int, int]


def _live_runs(state: State, group: bytes) -> Iterator[tuple[InSegment, _Live]]:
    """The places of a group's runs and states in segments, and what lives there for it."""
    for session in sessions_of(state, group):
        for rows in session.layers.values():
            for extent in rows.extents:
                place, shape = extent.run.place, extent.run.shape
                if isinstance(place, InSegment):
                    dense = (extent.end - extent.start) * shape.spec.row_bytes
                    spare = (shape.file_bytes - shape.data_bytes) // extent.run.live
                    yield place, (dense + spare, dense)
    for blob in state.states.get(group, {}).values():
        if isinstance(blob.place, InSegment):
            yield blob.place, (blob.length, blob.length)


def _live_bytes(state: State, segments: Sequence[Segment]) -> dict[str, _Live]:
    """Bytes of each segment that live, for whichever group; shared ones count once."""
    live: dict[str, dict[int, _Live]] = {segment.name: {} for segment in segments}
    for group in {group for segment in segments for group in segment.groups()}:
        mine: dict[tuple[str, int], _Live] = {}
        for place, (spaced, dense) in _live_runs(state, group):
            if place.segment.name in live:
                key = place.segment.name, place.offset
                before = mine.get(key, (0, 0))
                mine[key] = before[0] + spaced, before[1] + dense
        for (name, offset), found in mine.items():
            live[name][offset] = max(found, live[name].get(offset, (0, 0)))
    return {
        name: (sum(one[0] for one in runs.values()), sum(one[1] for one in runs.values()))
        for name, runs in live.items()
    }


def _wasteful(state: State, folder: SegmentFolder, group: bytes) -> list[tuple[Segment, int]]:
    """Segments of a group of which more than half is dead, and nobody writes to.

    With the bytes that live in each. Holes are not counted as dead, whether the file system has
    holes or not.
    """
    segments = [s for s in folder.of_group(group) if s.uses and not s.writers]
    live = _live_bytes(state, segments)
    prepare_segments(state, group, [segment for segment in segments if not segment.sealed])
    found: list[tuple[Segment, int]] = []
    for segment in segments:
        spaced, dense = live[segment.name]
        if segment.sealed:
            size = segment.size - segment.header_bytes
        else:
            size = segment.tail - segment.data_start
        dead = min(size - spaced, segment.disk_bytes() - dense)
        if dead > max(MIN_DEAD_BYTES, dense):
            found.append((segment, spaced))
    return found


def room_for(state: State, folder: SegmentFolder, group: bytes) -> int:
    """Bytes that are there twice before the mostly dead segments of a group are gone."""
    return sum(live for _, live in _wasteful(state, folder, group))


def _stretches(extents: Sequence[Extent], chosen: Sequence[bool]) -> Iterator[list[Extent]]:
    """Chosen extents that follow each other without a gap."""
    stretch: list[Extent] = []
    for extent, wanted in zip(extents, chosen, strict=True):
        if stretch and not (wanted and stretch[-1].end == extent.start):
            yield stretch
            stretch = []
        if wanted:
            stretch.append(extent)
    if stretch:
        yield stretch


def _sharers(
    state: State, session: Session, layer: int, extent: Extent
) -> tuple[tuple[Session, list[Extent]], ...]:
    """Other sessions that show the same rows of the same run, with their layer's extents."""
    place, found = extent.run.place, []
    if isinstance(place, InSegment) and place.segment.guests:
        for group in place.segment.groups():
            for other in sessions_of(state, group):
                seen = other.layers[layer].extents if layer in other.layers else []
                if other is not session and any(_same_rows(extent, one) for one in seen):
                    found.append((other, seen))
    return tuple(found)


def _same_rows(one: Extent, other: Extent) -> bool:
    same = same_place(one.run.place, other.run.place)
    return same and (one.start, one.end, one.row) == (other.start, other.end, other.row)


def _merging(extents: Sequence[Extent]) -> list[bool]:
    """Which extents are one of too many short runs in a row; what they become is not short."""
    short = [extent.run.shape.data_bytes < SPACED_BYTES for extent in extents]
    if sum(short) <= MANY_RUNS:
        return [False] * len(extents)
    many = [s for s in _stretches(extents, short) if len(s) > MANY_RUNS]
    chosen = {id(extent) for stretch in many for extent in stretch}
    return [id(extent) in chosen for extent in extents]


def _layer_copies(
    state: State, session: Session, layer: int, wasteful: set[str], limit: int, merge: bool
) -> Iterator[RowsCopy]:
    rows = session.layers[layer]
    extents = rows.extents
    leaving = [
        isinstance(e.run.place, InSegment) and e.run.place.segment.name in wasteful for e in extents
    ]
    merging = _merging(extents) if merge else [False] * len(extents)
    for index, extent in enumerate(extents):
        sharers = _sharers(state, session, layer, extent) if leaving[index] else ()
        if sharers:
            leaving[index] = merging[index] = False
            yield RowsCopy(session, layer, extents, extent.start, extent.end, sharers)
    step = max(1, limit // rows.spec.row_bytes)
    for stretch in _stretches(extents, [a or b for a, b in zip(leaving, merging, strict=True)]):
        start, end = stretch[0].start, stretch[-1].end
        for at_row in range(start, end, step):
            yield RowsCopy(session, layer, extents, at_row, min(at_row + step, end))


def plan(
    state: State, folder: SegmentFolder, group: bytes, limit: int, *, merge: bool = True
) -> list[Copy]:
    """What is worth copying in a group, about ``limit`` bytes of it; empty when it is tidy.

    ``merge``: too many short runs are, too, wherever they lie. On the event loop. Reads no rows.
    """
    segments = [segment for segment, _ in _wasteful(state, folder, group)]
    wasteful = {segment.name for segment in segments}
    guests = (guest for segment in segments for guest in segment.guests)
    copies: list[Copy] = []
    total = 0
    for one in dict.fromkeys((group, *guests)):
        for copy in _all_copies(state, one, wasteful, limit, merge):
            if copies and total + copy.nbytes > limit:
                return copies
            copies.append(copy)
            total += copy.nbytes
        if copies:
            # names in a file are those of one group
            return copies
    return copies


def _all_copies(
    state: State, group: bytes, wasteful: set[str], limit: int, merge: bool
) -> Iterator[Copy]:
    for session in sessions_of(state, group):
        for layer in session.layers:
            yield from _layer_copies(state, session, layer, wasteful, limit, merge)
    for layer, blob in state.states.get(group, {}).items():
        if isinstance(blob.place, InSegment) and blob.place.segment.name in wasteful:
            yield StateCopy(group, layer, blob)


@dataclass
class Job:
    """Copies of one group under way, into one new segment with a region for each."""

    folder: SegmentFolder
    copies: list[Copy]
    segment: Segment
    regions: list[Region]
    records: list[Record]
    seal: Seal | None = None
    damaged: Copy | None = None
    why: str = ""

    @classmethod
    def begin(cls, folder: SegmentFolder, copies: list[Copy]) -> Job:
        """Make the segment. On the event loop; raises OSError."""
        header = header_bytes_for(sum(copy.parts for copy in copies) + 2)
        segment = folder.create_closed(copies[0].group, header)
        regions = []
        for copy in copies:
            offset = segment.append(copy.nbytes, copy.parts)
            regions.append(Region(segment, offset, copy.nbytes))
            segment.writers += 1
        return cls(folder, copies, segment, regions, [])

    def carry_out(self) -> None:
        """Write everything, with the header, to stable storage. Blocks; raises OSError.

        A source that does not verify ends it early: ``damaged`` says which.
        """
        tensors: list[Tensor] = []
        for copy, region in zip(self.copies, self.regions, strict=True):
            try:
                record, parts = copy.write(region)
            except DamagedData as error:
                self.damaged, self.why = copy, str(error)
                return
            self.records.append(record)
            tensors += parts
        self.folder.seal(self.segment, tensors)
        self.folder.flush([self.segment])
        segment = self.segment
        self.seal = Seal(segment.name, segment.size, segment.header_bytes, segment.header_crc)

    def effects(self, state: State) -> list[Record]:
        """The records of what is still as it was copied; the seal comes last."""
        pairs = zip(self.copies, self.records, strict=True)
        records = [one for copy, record in pairs for one in copy.effects(state, record)]
        return [*records, self.seal] if records and self.seal else []
