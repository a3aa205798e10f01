"""int8: affine per row, ``[f32 min][f32 max][W × u8 code]``.

code = round((x − min) / (max − min) · 255), value = min·(1−t) + max·t with
t = code/255, all in float32: codes 0 and 255 give min and max exactly. A constant
row has codes 0.
"""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.formats.base import Bytes, Floats, Format, Part, row_range

_HEADER = 8


class Int8(Format):
    """One byte a value and eight a row."""

    name = "int8"

    def row_bytes(self, width: int) -> int:
        """A byte a value, and the row's two ends."""
        return width + _HEADER if width else 0

    def width_of(self, row_bytes: int) -> int:
        """What the header leaves."""
        return max(row_bytes - _HEADER, 0)

    def parts(self, width: int) -> tuple[Part, ...]:
        """One U8 tensor: header and codes stay together."""
        n = self.row_bytes(width)
        return (Part("", "U8", n, n),)

    def head_major(self, width: int, heads: int) -> bool:
        """Never: the ends belong to the whole row."""
        return False

    def _encode(self, rows: Floats, out: Bytes) -> None:
        low, high = row_range(self.name, rows)
        ends = np.concatenate((low, high), axis=1).astype("<f4", copy=False)
        out[:, :_HEADER] = ends.view(np.uint8)
        with np.errstate(over="ignore"):
            span = high - low
        wide = ~np.isfinite(span)
        if wide.any():  # max − min overflows float32, its half does not
            scale = np.where(wide, np.float32(0.5), np.float32(1))
            rows, low = rows * scale, low * scale
            span = high * scale - low
        span[span == 0] = 1
        codes = rows - low
        codes /= span
        codes *= np.float32(255)
        np.rint(codes, out=codes)
        out[:, _HEADER:] = codes

    def _decode(self, stored: Bytes, out: Floats) -> None:
        ends = np.ascontiguousarray(stored[:, :_HEADER]).view("<f4")
        low, high = ends[:, :1], ends[:, 1:]
        t = stored[:, _HEADER:] / np.float32(255)
        np.multiply(high, t, out=out)
        np.subtract(np.float32(1), t, out=t)
        t *= low
        out += t
