"""raw: opaque rows of a fixed number of bytes, for what mlx-lm packed itself."""

from __future__ import annotations

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats.base import Bytes, Floats, Format, Part


class Raw(Format):
    """Wire row: ``bytes_per_row`` bytes, whatever the width says."""


    def __init__(self, bytes_per_row: int) -> None:
        self.name = f"raw:{bytes_per_row}"
        self.bytes_per_row = bytes_per_row

    def row_bytes(self, width: int) -> int:
        """The fixed number of bytes; 0 for width 0."""
        return self.bytes_per_row if width else 0

    def width_of(self, row_bytes: int) -> int:
        """An opaque row has no width of its own: its bytes."""
        return row_bytes

    def parts(self, width: int) -> tuple[Part, ...]:
        """One U8 tensor."""
        n = self.row_bytes(width)
        return (Part("", "U8", n, n),)

    def per_head(self, heads: int) -> Format:
        """A head's share: an equal part of the bytes."""
        return Raw(self.bytes_per_row // heads)

    def head_major(self, width: int, heads: int) -> bool:
        """Where the bytes divide evenly over the heads."""
        return heads > 0 and self.bytes_per_row % heads == 0

    def encode(self, rows: Floats) -> Bytes:
        """Refused: opaque rows are stored as they are."""
        raise CommandError(f"{self.name}: opaque rows have no float32 form")

    def decode(self, stored: Bytes) -> Floats:
        """Refused: opaque rows are read as they are."""
        raise CommandError(f"{self.name}: opaque rows have no float32 form")

    def _encode(self, rows: Floats, out: Bytes) -> None:
        raise NotImplementedError

    def _decode(self, stored: Bytes, out: Floats) -> None:
        raise NotImplementedError
