"""Groups of codes on the host: as values, or attended to as they are.

value = code * scale + bias, scale and bias being those of the value's group.  So a product with a
row of values is a product with codes a group, times the scale, plus the bias times what the other
side adds up to in that group: for a few queries that spares most of the work of dequantizing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.prefix import Affine
from pion_vllm_mlx.kernels.scratch import SCRATCH
from pion_vllm_mlx.kernels.widening import Floats, widened

# Both values of a byte of 4-bit codes, as one eight-byte item.
_PAIRS = np.stack([np.arange(256) & 15, np.arange(256) >> 4], 1).astype(np.float32)
_PAIR_ITEMS = _PAIRS.view(np.uint64)[:, 0]


def unpacked(side: Affine, scratch: str) -> Floats:
    """The codes as f32 ``[..., D]``, in this thread's buffer of the name ``scratch``."""
    codes: NDArray[Any] = np.ascontiguousarray(side.codes).view(np.uint8)
    values = SCRATCH.floats(scratch, side.shape)
    if side.bits == 4:
        np.take(_PAIR_ITEMS, codes, out=values.view(np.uint64), mode="wrap")
    else:
        values[...] = codes
    return values


def dequantized(side: Affine, scratch: str) -> Floats:
    """The values f32 ``[..., D]``, in this thread's buffer of the name ``scratch``."""
    values = unpacked(side, scratch)
    groups = values.reshape(*values.shape[:-1], -1, side.group)
    groups *= widened(side.scales)[..., None]
    groups += widened(side.biases)[..., None]
    return values


@dataclass(frozen=True)
class Codes:
    """A chunk of rows taken apart, groups first.

    ``codes`` f32 ``[U, G, n, D / G]``; ``scales`` and ``biases`` f32 ``[U, G, n]``.
    """

    codes: Floats
    scales: Floats
    biases: Floats

    @classmethod
    def of(cls, side: Affine, scratch: str) -> Codes:
        """The codes of a side ``[U, n, D]``; good as long as the buffer ``scratch`` is."""
        codes = unpacked(side, scratch)
        grouped = codes.reshape(*codes.shape[:-1], -1, side.group).transpose(0, 2, 1, 3)
        scales, biases = (widened(part).transpose(0, 2, 1) for part in (side.scales, side.biases))
        return cls(grouped, scales, biases)

    def scores(self, q: Floats) -> Floats:
        """``q [U, R, D]`` by every row: ``[U, R, n]``."""
        num_groups, num_rows, _ = q.shape
        by_group = q.reshape(num_groups, num_rows, self.scales.shape[1], -1).transpose(0, 2, 1, 3)
        parts = np.matmul(by_group, self.codes.swapaxes(-1, -2))  # [U, G, R, n]
        parts *= self.scales[:, :, None]
        scores: Floats = parts.sum(axis=1)
        scores += np.matmul(by_group.sum(axis=-1).swapaxes(1, 2), self.biases)
        return scores

    def weighted(self, weights: Floats) -> Floats:
        """``weights [U, R, n]`` by the rows: ``[U, R, D]``."""
        parts = np.matmul(weights[:, None] * self.scales[:, :, None], self.codes)
        parts += np.matmul(weights, self.biases.swapaxes(1, 2)).swapaxes(1, 2)[..., None]
        num_groups, _, num_rows, _ = parts.shape
        out: Floats = parts.transpose(0, 2, 1, 3).reshape(num_groups, num_rows, -1)
        return out
