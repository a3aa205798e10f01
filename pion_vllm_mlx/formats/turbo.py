"""turbo4, turbo3, turbo2: symmetric integers of 4, 3 and 2 bits in blocks of 32.

Row layout as ``blocks`` has it, scale = f16(absmax of the block / A / L). Value j of a
block has the bits j·b … of its code field, a little-endian bit stream.

========  ====  ==========================================  =====================
format    L     code                                        value
========  ====  ==========================================  =====================
turbo4    7     clip(round(x / step), −7, 7) + 8            (code − 8) · step
turbo3    3     clip(round(x / step), −3, 3) + 4            (code − 4) · step
turbo2    1.5   clip(floor(x / step) + 2, 0, 3)             (code − 1.5) · step
========  ====  ==========================================  =====================
"""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.formats.base import Bytes, Floats
from pion_vllm_mlx.formats.blocks import BLOCK, ScaledBlocks


class Turbo(ScaledBlocks):
    """Integers of ``bits`` bits. ``_table`` holds the values of every packed unit."""

    bits: int

    def __init__(self) -> None:
        self.name = f"turbo{self.bits}"
        self.code_bytes = BLOCK * self.bits // 8
        # turbo3 packs four values into 12 bits, the others some into a byte.
        unit_bits = 12 if self.bits == 3 else 8
        units = np.arange(1 << unit_bits)[:, None]
        codes = units >> (self.bits * np.arange(unit_bits // self.bits)) & ((1 << self.bits) - 1)
        zero = 1.5 if self.bits == 2 else 1 << (self.bits - 1)
        self._table = (codes - zero).astype(np.float32)

    def _codes(self, ratios: Floats) -> Bytes:
        np.rint(ratios, out=ratios)
        ratios += 1 << (self.bits - 1)
        np.clip(ratios, 1, (1 << self.bits) - 1, out=ratios)
        return self._packed(ratios.astype(np.uint8))

    def _ratios(self, codes: Bytes) -> Floats:
        return np.take(self._table, codes, axis=0)

    def _packed(self, codes: Bytes) -> Bytes:
        """Codes ``[blocks, 32]``, one a byte, as code fields."""
        raise NotImplementedError


class Turbo4(Turbo):
    """Half a byte a value, 15 levels."""

    bits = 4
    levels = 7

    def _packed(self, codes: Bytes) -> Bytes:
        fields = np.left_shift(codes[:, 1::2], 4)
        fields |= codes[:, ::2]
        return fields


class Turbo3(Turbo):
    """Three bits a value, 7 levels."""

    bits = 3
    levels = 3

    def _packed(self, codes: Bytes) -> Bytes:
        sixes = np.left_shift(codes[:, 1::2], 3)
        sixes |= codes[:, ::2]
        twelves = np.left_shift(sixes[:, 1::2], 6, dtype=np.uint16)
        twelves |= sixes[:, ::2]
        words = np.left_shift(twelves[:, 1::2], 12, dtype="<u4")
        words |= twelves[:, ::2]
        return words.view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1, self.code_bytes)

    def _ratios(self, codes: Bytes) -> Floats:
        words = np.zeros((codes.size // 3, 4), np.uint8)
        words[:, :3] = codes.reshape(-1, 3)
        words32 = words.view("<u4")
        twelves = np.concatenate((words32 & 0xFFF, words32 >> 12), axis=1)
        return np.take(self._table, twelves, axis=0)


class Turbo2(Turbo):
    """Two bits a value, 4 levels at ±1/3 and ±1 of the block's maximum."""

    bits = 2
    levels = 1.5

    def _codes(self, ratios: Floats) -> Bytes:
        np.floor(ratios, out=ratios)
        ratios += 2
        np.clip(ratios, 0, 3, out=ratios)
        return self._packed(ratios.astype(np.uint8))

    def _packed(self, codes: Bytes) -> Bytes:
        fours = np.left_shift(codes[:, 1::2], 2)
        fours |= codes[:, ::2]
        fields = np.left_shift(fours[:, 1::2], 4)
        fields |= fours[:, ::2]
        return fields
