"""What the index of a store is made of: sessions, runs of rows, extents, states."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import resolve
from pion_vllm_mlx.server.store.blocks import BlockTable
from pion_vllm_mlx.server.store.files import FileHandle
from pion_vllm_mlx.server.store.segment import Segment
from pion_vllm_mlx.server.store.shapes import LayerSpec, RunShape
from pion_vllm_mlx.server.store.wal import Inline

#: highest layer number of a session.
MAX_LAYER = 1023
KEY_SUFFIX, VALUE_SUFFIX = b"_pk", b"_pv"


def group_of(sid: bytes) -> bytes:
    """The segment group of a session: ``x`` for ``x_pk`` and ``x_pv``, else its own id."""
    if sid.endswith((KEY_SUFFIX, VALUE_SUFFIX)):
        return sid[: -len(KEY_SUFFIX)]
    return sid


def namespaces_of(sid: bytes) -> list[bytes]:
    """The namespaces whose states may have this sid: of ``a@1@2`` ``a``, ``a@1``, ``a@1@2``."""
    parts = sid.split(b"@")
    return [b"@".join(parts[: count + 1]) for count in range(len(parts))]


class InSegment(NamedTuple):
    """A run's or state's first byte in a segment."""

    segment: Segment
    offset: int


Place = InSegment | Inline


def same_place(one: Place, other: Place) -> bool:
    """Whether two places are one and the same in a segment."""
    if not (isinstance(one, InSegment) and isinstance(other, InSegment)):
        return False
    return one.segment is other.segment and one.offset == other.offset


def place_file(place: Place) -> FileHandle:
    """The file to read a place from. Raises OSError."""
    return place.segment.file if isinstance(place, InSegment) else place.file


@dataclass(slots=True)
class Run:
    """Consecutive rows of one layer that were stored together.

    ``live`` counts the extents that still show part of it; ``shown`` counts the rows from
    its first on that no truncation has taken away. ``place`` and ``shape``
    never change: threads read them together. A run that moves is replaced by another.
    """

    run_id: int
    start: int
    shape: RunShape
    place: Place
    crc: int
    sent_crc: int
    verified: bool
    shown: int
    live: int = 0


class Extent(NamedTuple):
    """Rows ``[start, end)`` of a layer: they are rows ``row …`` of ``run``."""

    start: int
    end: int
    run: Run
    row: int


def _end(extent: Extent) -> int:
    return extent.end


@dataclass(slots=True)
class LayerRows:
    """The rows of one layer: its spec, its token count and which run shows where."""

    spec: LayerSpec
    count: int = 0
    extents: list[Extent] = field(default_factory=list)

    def insert(self, run: Run) -> list[Run]:
        """Lay a run over what is there; the runs of which nothing is left."""
        start, end = run.start, run.start + run.shown
        kept: list[Extent] = []
        touched: list[Run] = []
        for old in self.extents:
            if old.end <= start or old.start >= end:
                kept.append(old)
                continue
            old.run.live -= 1
            touched.append(old.run)
            if old.start < start:
                kept.append(Extent(old.start, start, old.run, old.row))
                old.run.live += 1
            if old.end > end:
                kept.append(Extent(end, old.end, old.run, old.row + end - old.start))
                old.run.live += 1
        run.live = 1
        bisect.insort(kept, Extent(start, end, run, 0), key=lambda extent: extent.start)
        self.extents = kept
        self.count = max(self.count, end)
        return list({id(old): old for old in touched if old.live == 0}.values())

    def truncate(self, length: int) -> list[Run]:
        """Let ``length`` be the token count, with no row behind it; the runs that went."""
        runs = self.runs()
        for run in runs:
            # also where another run lies over its end: what was exported shows as much no more
            run.shown = max(0, min(run.shown, length - run.start))
        kept: list[Extent] = []
        for old in self.extents:
            if old.start < length:
                kept.append(old._replace(end=min(old.end, length)))
            else:
                old.run.live -= 1
        self.extents = kept
        self.count = length
        return [run for run in runs if run.live == 0]

    def replace_runs(self, moved: Mapping[int, Run]) -> None:
        """Show other runs, found by the number of the run whose place they take."""
        self.extents = [
            extent._replace(run=moved.get(extent.run.run_id, extent.run)) for extent in self.extents
        ]

    def covering(self, start: int, end: int) -> Iterator[Extent]:
        """The extents that show rows of ``[start, end)``, clipped to it."""
        extents = self.extents
        for index in range(bisect.bisect_right(extents, start, key=_end), len(extents)):
            extent = extents[index]
            if extent.start >= end:
                return
            first, last = max(extent.start, start), min(extent.end, end)
            if first < last:
                yield Extent(first, last, extent.run, extent.row + first - extent.start)

    def shows(self, token: int) -> bool:
        """Whether there is a row of a token."""
        index = bisect.bisect_right(self.extents, token, key=_end)
        return index < len(self.extents) and self.extents[index].start <= token

    def as_now(self, start: int, end: int) -> LayerRows:
        """What rows ``[start, end)`` show at this moment, for a thread that reads them later.

        Its runs keep their place, and a file that goes meanwhile can be read to its end.
        """
        return LayerRows(self.spec, self.count, list(self.covering(start, end)))

    def runs(self) -> list[Run]:
        """Every run that shows, in order of position, each once."""
        return list({id(extent.run): extent.run for extent in self.extents}.values())

    def showing(self) -> list[tuple[Run, int]]:
        """As ``runs``, each with the number of its first rows that end with the last one shown.

        By the extents alone: a copy of them (``freezing``) shares the runs, and says what
        showed when it was made.
        """
        found = {id(e.run): (e.run, e.row + e.end - e.start) for e in self.extents}
        return list(found.values())

    def live_rows(self) -> int:
        return sum(extent.end - extent.start for extent in self.extents)


@dataclass
class StateBlob:
    """A recurrent state: ``length`` opaque bytes; ``accessed`` as of a session."""

    length: int
    crc: int
    place: Place
    verified: bool
    accessed: int = field(default=0, compare=False)


@dataclass
class Session:
    """A V-store session: rows of one side, all layers.

    ``expects_head_major`` is the layout in which its last rows came: a guess, used to
    receive long rows straight into their place. ``rollback`` holds the token counts of its
    layers at each rollback point; they are in memory only. ``deadline_ms``: unix
    milliseconds after which it must not be served, 0 for never. ``checked``: all of it was
    verified, and no rows have come since.
    """

    sid: bytes
    slot: int
    dim: int
    requested: str
    fmt: str
    heads: int
    specs: dict[int, LayerSpec]
    accessed: int = 0
    expects_head_major: bool = True
    pinned: bool = False
    deadline_ms: int = 0
    checked: bool = False
    blocks: BlockTable | None = None
    rollback: dict[int, dict[int, int]] = field(default_factory=dict)
    layers: dict[int, LayerRows] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.layers

    def spec(self, layer: int) -> LayerSpec:
        """The layer's spec, stored or not. Raises CommandError for one it cannot have."""
        if not 0 <= layer <= MAX_LAYER:
            raise CommandError("layer out of range")
        if layer in self.specs:
            return self.specs[layer]
        if layer in self.layers:
            return self.layers[layer].spec
        if self.dim == 0:
            raise CommandError(f"layer {layer} has no dimension in the session's schema")
        default = self.fmt if not self.specs else resolve("int8", self.dim).name
        return LayerSpec(self.dim, default, self.heads)

    def layer_count(self) -> int:
        """Schema size, or highest stored layer + 1."""
        return max([*self.specs, *self.layers], default=-1) + 1

    def runs(self) -> Iterator[Run]:
        for rows in self.layers.values():
            yield from rows.runs()

    @property
    def published(self) -> bool:
        """Whether every run lies in a sealed segment."""
        places = [run.place for run in self.runs()]
        return all(isinstance(place, InSegment) and place.segment.sealed for place in places)

    def segments(self) -> list[Segment]:
        """The segments its runs lie in, each once."""
        places = [run.place for run in self.runs()]
        return list(
            {p.segment.name: p.segment for p in places if isinstance(p, InSegment)}.values()
        )

    def row_bytes(self) -> int:
        """Bytes of all logical rows in their storage format."""
        return sum(rows.live_rows() * rows.spec.row_bytes for rows in self.layers.values())
