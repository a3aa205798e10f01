"""fp32: float32 as it comes."""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.formats.base import Bytes, FloatFormat, Floats


class Fp32(FloatFormat):
    """Wire row: W × f32."""

    name = "fp32"
    item_bytes = 4
    dtype = "F32"

    def _encode(self, rows: Floats, out: Bytes) -> None:
        out.view("<u4")[...] = np.ascontiguousarray(rows).view(np.uint32)

    def _decode(self, stored: Bytes, out: Floats) -> None:
        out.view(np.uint32)[...] = np.ascontiguousarray(stored).view("<u4")
