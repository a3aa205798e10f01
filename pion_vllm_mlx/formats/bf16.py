"""bf16: the upper half of a float32, rounded to nearest even."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.formats.base import Bytes, FloatFormat, Floats

_EXPONENT = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_QUIET = np.uint32(0x00400000)


class Bf16(FloatFormat):
    """Wire row: W × bf16. A float32 that is a bf16 keeps all of its bits."""

    name = "bf16"
    item_bytes = 2
    dtype = "BF16"

    def _encode(self, rows: Floats, out: Bytes) -> None:
        bits = np.ascontiguousarray(rows).view(np.uint32)
        out.view("<u2")[...] = to_bf16_bits(bits)

    def _decode(self, stored: Bytes, out: Floats) -> None:
        bits = np.ascontiguousarray(stored).view("<u2").astype(np.uint32)
        out.view(np.uint32)[...] = bits << np.uint32(16)


def to_bf16_bits(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The bf16 bit patterns of float32 bit patterns, in the low 16 bits.

    Rounding must not carry a NaN into infinity or zero: a NaN's payload is cut, and
    made quiet where nothing of it would be left.
    """
    rounded: NDArray[np.uint32] = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    nan = (bits & _MAGNITUDE) > _EXPONENT
    if nan.any():
        cut = bits[nan]
        lost = (cut & np.uint32(0x007F0000)) == 0
        cut[lost] |= _QUIET
        rounded[nan] = cut >> np.uint32(16)
    return rounded
