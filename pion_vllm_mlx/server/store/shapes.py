"""How the rows of one run lie in a file.

Letters: H heads, n rows of the run, n_pad rows reserved for it, W values of a
row over all heads (``H * D``).

A *token-major* run is ``[n, W]``. A *head-major* run is ``[H, n_pad, D]``: the
spare rows up to ``n_pad`` are a hole in the file, so that a client that maps the
run can append tokens in place instead of copying it; short runs have none. A format with several
parts (mlx4g32: codes, scales, biases) lays one such array after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import Format, Part, get_format

#: rows left free at the least, so that a short suffix needs no copy. Every client that maps
#: the run reads them too: more of them is slower than the copy of a long suffix's first append.
SPARE_ROWS = 64
#: runs end at a multiple of this many rows.
GROWTH_ROWS = 64
#: shorter runs are copied in no time, and would take far more blocks than they have bytes.
SPACED_BYTES = 64 << 10


def padded_rows(rows: int) -> int:
    """Rows reserved for a head-major run of ``rows`` rows."""
    return -(-(rows + SPARE_ROWS) // GROWTH_ROWS) * GROWTH_ROWS


@dataclass(frozen=True)
class LayerSpec:
    """What the rows of one layer of a session are: width, format, heads (0: unknown)."""

    width: int
    fmt: str
    heads: int = 0

    @cached_property
    def format(self) -> Format:
        return get_format(self.fmt)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the storage format."""
        return self.format.row_bytes(self.width)

    def head_major(self) -> bool:
        """Whether runs of this layer may be stored head-major."""
        return self.heads > 0 and self.format.head_major(self.width, self.heads)

    def parts(self) -> tuple[Part, ...]:
        return self.format.parts(self.width)


class Piece(NamedTuple):
    """Consecutive bytes: ``length`` of them at ``offset`` from the run's start."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RunShape:
    """The place of every row of a run, relative to the run's first byte."""

    spec: LayerSpec
    rows: int
    head_major: bool
    padded: int

    @classmethod
    def dense(cls, spec: LayerSpec, rows: int, head_major: bool) -> RunShape:
        """A run without spare rows."""
        return cls(spec, rows, head_major, rows)

    @classmethod
    def spaced(cls, spec: LayerSpec, rows: int, head_major: bool) -> RunShape:
        """A run as segments hold it: long head-major runs with spare rows."""
        long = rows * spec.row_bytes >= SPACED_BYTES
        return cls(spec, rows, head_major, padded_rows(rows) if head_major and long else rows)

    @property
    def data_bytes(self) -> int:
        """Bytes of the rows themselves."""
        return self.rows * self.spec.row_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes from the first to the last row's end, spare rows of the last head included."""
        return self.padded * self.spec.row_bytes

    @property
    def reach_bytes(self) -> int:
        """Bytes from the first to the last row's end, without spare rows behind it."""
        *_, last = self.part_offsets()
        *_, piece = self.part_pieces(*last, self.rows - 1, self.rows)
        return piece.offset + piece.length

    def part_offsets(self) -> Iterator[tuple[Part, int]]:
        """Every part with its offset."""
        offset = 0
        for part in self.spec.parts():
            yield part, offset
            offset += self.padded * part.bytes_per_row

    def part_pieces(self, part: Part, base: int, first: int, last: int) -> Iterator[Piece]:
        """Where rows ``[first, last)`` of one part lie, in file order."""
        if not self.head_major:
            yield Piece(base + first * part.bytes_per_row, (last - first) * part.bytes_per_row)
            return
        head_row = part.bytes_per_row // self.spec.heads
        for head in range(self.spec.heads):
            start = base + (head * self.padded + first) * head_row
            yield Piece(start, (last - first) * head_row)

    def pieces(self) -> Iterator[Piece]:
        """Where all rows lie: part by part, head by head."""
        for part, base in self.part_offsets():
            yield from self.part_pieces(part, base, 0, self.rows)

    def tensor_shape(self, part: Part) -> list[int]:
        """The safetensors shape of one part."""
        if not self.head_major:
            return [self.rows, part.items_per_row]
        return [self.spec.heads, self.padded, part.items_per_row // self.spec.heads]


def check_width(width: int) -> None:
    """Refuse a row width outside 0 … 65536 (0: the side has no values)."""
    if not 0 <= width <= 65536:
        raise CommandError(f"row width must be 0 to 65536, not {width}")
