"""fp8: E4M3FN codes in blocks of 32.

Row layout as ``blocks`` has it, scale = f16(absmax of the block / A). The code is
x · 448 / step in E4M3FN (bias 7, largest finite 448, no infinity), rounded half to
even, saturating; value = code · step / 448.
"""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.formats.base import Bytes, Floats
from pion_vllm_mlx.formats.blocks import BLOCK, ScaledBlocks

_LARGEST = np.float32(448)
_OVERFLOWS, _SHRINK = 1e35, np.float32(2.0**-20)
_SMALLEST_NORMAL = np.uint32(0x3C800000)  # 2**-6
# Added to a value below 2**-6 this leaves the count of 2**-9 in the lowest bits.
_ROUNDS_TO_SUBNORMAL = np.float32(1 << 14)
_BIAS = np.uint32((127 - 7) << 3)


def _values() -> Floats:
    """The value of every code; the two NaN codes count as 0: no encoder writes them."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    normal = (8 + fractions) * 2.0 ** (exponents - 10)
    values = np.where(exponents > 0, normal, fractions * 2.0**-9)
    values[[0x7F, 0xFF]] = 0
    return np.where(codes < 128, values, -values).astype(np.float32)


class Fp8(ScaledBlocks):
    """One byte a value, two a block and four a row."""

    name = "fp8"
    code_bytes = BLOCK
    levels = 1

    def __init__(self) -> None:
        self._table = _values() / _LARGEST

    def _over_steps(self, values: Floats, steps: Floats) -> Floats:
        # In this order a value in the middle between two codes stays there.
        large = steps > _OVERFLOWS
        if large.any():
            factors = np.where(large, _SHRINK, np.float32(1))
            values, steps = values * factors, steps * factors
        ratios: Floats = values * _LARGEST
        ratios /= steps
        return ratios

    def _codes(self, ratios: Floats) -> Bytes:
        np.clip(ratios, -_LARGEST, _LARGEST, out=ratios)
        bits = ratios.view(np.uint32)
        signs = (bits >> np.uint32(24)).astype(np.uint8)
        signs &= 0x80
        magnitudes = np.abs(ratios, out=ratios).view(np.uint32)
        small = magnitudes < _SMALLEST_NORMAL
        subnormal = (ratios + _ROUNDS_TO_SUBNORMAL).view(np.uint32)
        odd = magnitudes >> np.uint32(20)
        odd &= np.uint32(1)
        odd += np.uint32(0x7FFFF)
        magnitudes += odd
        magnitudes >>= np.uint32(20)
        magnitudes -= _BIAS
        np.copyto(magnitudes, subnormal, where=small)
        codes = magnitudes.astype(np.uint8)
        codes |= signs
        return codes

    def _ratios(self, codes: Bytes) -> Floats:
        return np.take(self._table, codes)
