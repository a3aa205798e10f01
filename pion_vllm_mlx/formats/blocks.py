"""What fp8 and the turbo formats share: a row maximum, and blocks of 32 with a scale each.

Wire row: ``[f32 A]`` (the row's absolute maximum), then for every block
``[f16 scale][codes]``. A block's step is A · scale, in float32. A block whose scale or
step is 0 has the code field 0 and the values 0.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats.base import Bytes, Floats, Format, Part

BLOCK = 32
_HEADER = 4
_SCALE = 2


class ScaledBlocks(Format):
    """A format of that row layout. A kind says how a block's values become codes.

    ``code_bytes`` is the size of a block's code field; a scale is the block's absolute
    maximum over A, divided by ``levels``.
    """

    block = BLOCK
    code_bytes: int
    levels: float

    def row_bytes(self, width: int) -> int:
        """Four bytes a row; two and the codes a block."""
        return _HEADER + width // BLOCK * (_SCALE + self.code_bytes) if width else 0

    def width_of(self, row_bytes: int) -> int:
        """32 values a block."""
        return max(row_bytes - _HEADER, 0) // (_SCALE + self.code_bytes) * BLOCK

    def parts(self, width: int) -> tuple[Part, ...]:
        """One U8 tensor: header, scales and codes stay together."""
        n = self.row_bytes(width)
        return (Part("", "U8", n, n),)

    def head_major(self, width: int, heads: int) -> bool:
        """Never: the maximum belongs to the whole row."""
        return False

    def _over_steps(self, values: Floats, steps: Floats) -> Floats:
        """What is rounded to codes, as a new array: ``x / step``."""
        return values / steps

    @abstractmethod
    def _codes(self, ratios: Floats) -> Bytes:
        """Code fields ``[blocks, code_bytes]`` of those; may overwrite its argument."""

    @abstractmethod
    def _ratios(self, codes: Bytes) -> Floats:
        """Inverse of :meth:`_codes`: ``[blocks, 32]`` multiples of a step."""

    def _encode(self, rows: Floats, out: Bytes) -> None:
        n, width = rows.shape
        blocks = width // BLOCK
        # Reducing 32 long rows is several times faster than many rows of 32.
        columns = np.ascontiguousarray(rows.reshape(-1, BLOCK).T)
        largest = np.maximum(columns.max(axis=0), -columns.min(axis=0)).reshape(n, blocks)
        largest += np.float32(0)  # a zero without its sign
        whole = largest.max(axis=1, keepdims=True)
        if not np.isfinite(whole).all():
            raise CommandError(f"{self.name}: rows hold a value that is not finite")
        scales = _scales(largest, whole, self.levels)
        steps = scales.astype(np.float32) * whole
        empty = steps == 0
        any_empty = bool(empty.any())
        if any_empty:
            steps[empty] = 1
        ratios = self._over_steps(rows.reshape(n, blocks, BLOCK), steps[..., None])
        codes = self._codes(ratios.reshape(-1, BLOCK)).reshape(n, blocks, self.code_bytes)
        if any_empty:
            codes[empty] = 0
        out[:, :_HEADER] = np.ascontiguousarray(whole, "<f4").view(np.uint8)
        fields = out[:, _HEADER:].reshape(n, blocks, _SCALE + self.code_bytes)
        fields[..., :_SCALE] = scales.view(np.uint8).reshape(n, blocks, _SCALE)
        fields[..., _SCALE:] = codes

    def _decode(self, stored: Bytes, out: Floats) -> None:
        n, width = out.shape
        blocks = width // BLOCK
        fields = stored[:, _HEADER:].reshape(n, blocks, _SCALE + self.code_bytes)
        whole = np.ascontiguousarray(stored[:, :_HEADER]).view("<f4")
        scales = np.ascontiguousarray(fields[..., :_SCALE]).view("<f2")[..., 0]
        steps = scales.astype(np.float32) * whole
        codes = np.ascontiguousarray(fields[..., _SCALE:]).reshape(-1, self.code_bytes)
        ratios = self._ratios(codes).reshape(n, blocks, BLOCK)
        np.multiply(ratios, steps[..., None], out=out.reshape(n, blocks, BLOCK))
        empty = steps == 0
        if empty.any():  # without the sign that a code below zero would leave
            out.reshape(n, blocks, BLOCK)[empty] = 0


def _scales(largest: Floats, whole: Floats, levels: float) -> NDArray[np.float16]:
    """``f16(largest / A / levels)``; 0 where A is 0."""
    ratios = np.divide(largest, whole, out=np.zeros_like(largest), where=whole > 0)
    if levels != 1:
        ratios /= np.float32(levels)
    return ratios.astype("<f2")
