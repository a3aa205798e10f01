"""16-bit floats as float32 on the host, at a small part of numpy's own price."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.scratch import SCRATCH

Floats: TypeAlias = NDArray[np.float32]


def widened(array: NDArray[Any], scratch: str = "") -> Floats:
    """f32 of f32, f16 or bf16 bits; the same array where it is f32.

    With ``scratch`` a new array is this thread's buffer of that name.
    """
    if array.dtype == np.float32:
        return array
    out = SCRATCH.floats(scratch, array.shape) if scratch else np.empty(array.shape, np.float32)
    if array.dtype == np.uint16:
        bits = out.view(np.uint32)
        bits[...] = array
        bits <<= np.uint32(16)
    elif _any_infinite(array):
        out[...] = array
    else:
        _widen_finite(array, out)
    return out


def _any_infinite(halves: NDArray[Any]) -> bool:
    """Whether an f16 array holds an infinity or a NaN."""
    magnitudes = np.bitwise_and(halves.view(np.uint16), np.uint16(0x7FFF))
    return bool(magnitudes.max(initial=0) >= 0x7C00)


def _widen_finite(halves: NDArray[Any], out: Floats) -> None:
    """Write finite f16 values as f32: numpy's own conversion takes five times as long.

    The bits move to where float32 has sign, exponent and mantissa; the product corrects the
    exponent's bias, and is exact for subnormal halves too.
    """
    bits = out.view(np.int32)
    bits[...] = halves.view(np.int16)  # the sign fills the upper half
    bits <<= np.int32(13)
    bits &= np.int32(-0x70002000)  # of its copies, the one in front stays
    out *= np.float32(2.0**112)
