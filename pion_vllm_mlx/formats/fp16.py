"""fp16: IEEE binary16, rounded to nearest even from float32."""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.formats.base import Bytes, FloatFormat, Floats


class Fp16(FloatFormat):
    """Wire row: W × f16."""

    name = "fp16"
    item_bytes = 2
    dtype = "F16"

    def _encode(self, rows: Floats, out: Bytes) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            out.view("<f2")[...] = rows

    def _decode(self, stored: Bytes, out: Floats) -> None:
        out[...] = np.ascontiguousarray(stored).view("<f2")
