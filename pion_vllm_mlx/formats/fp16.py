"""fp16: IEEE binary16, rounded to nearest even from float32."""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.formats.base import Bytes, Floats, Format, Part


class Fp16(Format):
    """Wire row: W × f16."""

    name = "fp16"
    lossless = True

    def row_bytes(self, width: int) -> int:
        """Two bytes a value."""
        return 2 * width

    def width_of(self, row_bytes: int) -> int:
        """Half the bytes."""
        return row_bytes // 2

    def parts(self, width: int) -> tuple[Part, ...]:
        """One F16 tensor."""
        return (Part("", "F16", 2 * width, width),)

    def _encode(self, rows: Floats, out: Bytes) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            out.view("<f2")[...] = rows

    def _decode(self, stored: Bytes, out: Floats) -> None:
        out[...] = np.ascontiguousarray(stored).view("<f2")
