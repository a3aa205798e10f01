"""mlx4g32: affine 4 bits in groups of 32, the layout of MLX's quantized arrays.

Wire row ``[W/8 × u32 codes][W/32 × f16 scales][W/32 × f16 biases]``; value j of
each run of eight has the bits 4·(j mod 8) of its u32. Stored runs keep the three as
tensors ``.w``, ``.s``, ``.b``. bias = f16(min), scale = f16((max − min) / 15),
code = clip(round((x − bias) / scale), 0, 15), value = code·scale + bias in float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats.base import Bytes, Floats, Format, Part, row_range

_GROUP = 32
_CODE_BYTES = _GROUP // 2


class Mlx4G32(Format):
    """Twenty bytes for 32 values."""

    name = "mlx4g32"
    block = _GROUP

    def row_bytes(self, width: int) -> int:
        """Half a byte a value, four bytes a group."""
        return width // _GROUP * (_CODE_BYTES + 4)

    def width_of(self, row_bytes: int) -> int:
        """32 values for 20 bytes."""
        return row_bytes // (_CODE_BYTES + 4) * _GROUP

    def parts(self, width: int) -> tuple[Part, ...]:
        """Codes, scales and biases."""
        groups = width // _GROUP
        return (
            Part(".w", "U32", groups * _CODE_BYTES, width // 8),
            Part(".s", "F16", groups * 2, groups),
            Part(".b", "F16", groups * 2, groups),
        )

    def _encode(self, rows: Floats, out: Bytes) -> None:
        n, width = rows.shape
        grouped = rows.reshape(n, width // _GROUP, _GROUP)
        scales, biases = _parameters(self.name, grouped)
        step = scales.astype(np.float32)
        flat = step == 0
        if flat.any():
            scales[flat] = 1
            step[flat] = 1
        codes = grouped - biases.astype(np.float32)
        codes /= step
        np.rint(codes, out=codes)
        np.clip(codes, 0, 15, out=codes)
        if flat.any():
            codes *= ~flat
        nibbles = codes.reshape(n, width).astype(np.uint8)
        words, s, b = self.split(out)
        np.left_shift(nibbles[:, 1::2], 4, out=words)
        words |= nibbles[:, ::2]
        s[...] = scales[..., 0].view(np.uint8)
        b[...] = biases[..., 0].view(np.uint8)

    def _decode(self, stored: Bytes, out: Floats) -> None:
        words, s, b = (np.ascontiguousarray(part) for part in self.split(stored))
        n, width = out.shape
        out[:, ::2] = words & 15
        out[:, 1::2] = words >> 4
        grouped = out.reshape(n, width // _GROUP, _GROUP)
        grouped *= s.view("<f2")[..., None]
        grouped += b.view("<f2")[..., None]


def _parameters(name: str, grouped: Floats) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Scale and bias of each group, ``[n, groups, 1]`` f16; refuses an overflow."""
    # Reducing 32 long rows is four times faster than many rows of 32.
    columns = np.ascontiguousarray(grouped.reshape(-1, _GROUP).T)
    low, high = (x.reshape(*grouped.shape[:2], 1) for x in row_range(name, columns, axis=0))
    with np.errstate(over="ignore"):
        scales = ((high - low) / np.float32(15)).astype("<f2")
        biases = low.astype("<f2")
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise CommandError(f"{name}: rows hold a value beyond the range of float16")
    return scales, biases
