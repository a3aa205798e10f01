"""fp32: float32 as it comes."""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.formats.base import Bytes, Floats, Format, Part


class Fp32(Format):
    """Wire row: W × f32."""

    name = "fp32"
    lossless = True

    def row_bytes(self, width: int) -> int:
        """Four bytes a value."""
        return 4 * width

    def width_of(self, row_bytes: int) -> int:
        """A quarter of the bytes."""
        return row_bytes // 4

    def parts(self, width: int) -> tuple[Part, ...]:
        """One F32 tensor."""
        return (Part("", "F32", 4 * width, width),)

    def _encode(self, rows: Floats, out: Bytes) -> None:
        out.view("<u4")[...] = np.ascontiguousarray(rows).view(np.uint32)

    def _decode(self, stored: Bytes, out: Floats) -> None:
        out.view(np.uint32)[...] = np.ascontiguousarray(stored).view("<u4")
