"""Rows of a prefix as float32 on the host, and the merge of partial results.

A chunk of rows is widened (f16, bf16) or dequantized only while it is attended to, so that what is
read from memory is what is held, and the float32 copy stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.problem import Affine, Attended, Side
from pion_vllm_mlx.kernels.scratch import SCRATCH

Floats: TypeAlias = NDArray[np.float32]
Range: TypeAlias = tuple[int, int]
"""Tokens [first, end)."""


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


# Both values of a byte of 4-bit codes, as one eight-byte item.
_PAIRS = np.stack([np.arange(256) & 15, np.arange(256) >> 4], 1).astype(np.float32)
_PAIR_ITEMS = _PAIRS.view(np.uint64)[:, 0]


def dequantized(side: Affine, scratch: str) -> Floats:
    """f32 ``[..., D]`` of groups of codes, in this thread's buffer of the name ``scratch``."""
    codes = np.ascontiguousarray(side.codes).view(np.uint8)
    values = SCRATCH.floats(scratch, side.shape)
    if side.bits == 4:
        np.take(_PAIR_ITEMS, codes, out=values.view(np.uint64), mode="wrap")
    else:
        values[...] = codes
    groups = values.reshape(*values.shape[:-1], -1, side.group)
    groups *= widened(side.scales)[..., None]
    groups += widened(side.biases)[..., None]
    return values


@dataclass(frozen=True)
class Rows:
    """One side of a prefix or suffix, read in pieces as float32.

    What is read is good until this thread reads again from rows of the same ``name``.

    ``side`` ``[H_kv, N, D]``, or ``[pool, H_kv, page, D]`` with a ``table``.  ``heads``: the KV
    heads to read, None for all.
    """

    side: Side
    table: NDArray[np.int32] | None = None
    heads: NDArray[np.intp] | None = None
    name: str = "keys"

    @property
    def is_plain(self) -> bool:
        """Whether a run of tokens is read without copying."""
        plain = not isinstance(self.side, Affine) and self.side.dtype == np.float32
        return plain and self.table is None and self.heads is None

    def read(self, ranges: Sequence[Range]) -> Floats:
        """The tokens of the ranges, ``[U, n, D]``; a view where one plain range is asked for."""
        return self._converted(lambda array: self._joined(array, ranges))

    def take(self, kv_heads: NDArray[np.intp], tokens: NDArray[np.intp]) -> Floats:
        """Row (kv_heads[i, j], tokens[i, j]) for all i, j: ``[I, J, D]``; ``heads`` is ignored."""
        if self.table is None:
            return self._converted(lambda array: array[kv_heads, tokens])
        page = self.side.shape[2]
        blocks = self.table[tokens // page]
        return self._converted(lambda array: array[blocks, kv_heads, tokens % page])

    def _converted(self, pick: Callable[[NDArray[Any]], NDArray[Any]]) -> Floats:
        if isinstance(self.side, Affine):
            return dequantized(self.side.mapped(pick), self.name)
        return widened(pick(self.side), self.name)

    def _joined(self, array: NDArray[Any], ranges: Sequence[Range]) -> NDArray[Any]:
        pieces = [piece for run in ranges for piece in self._pieces(array, run)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    def _pieces(self, array: NDArray[Any], run: Range) -> Iterator[NDArray[Any]]:
        """Views ``[U, n, ...]`` of the tokens of ``run``, cut at pages."""
        heads = slice(None) if self.heads is None else self.heads
        first, end = run
        if self.table is None:
            yield array[heads, first:end]
            return
        page = array.shape[2]
        while first < end:
            at = first % page
            stop = min(page, at + end - first)
            yield array[self.table[first // page]][heads, at:stop]
            first += stop - at


def merged(parts: Sequence[Attended]) -> Attended:
    """The union of disjoint parts on the host: out ``[..., D]``, lse ``[...]``, float32."""
    lses = np.stack([part.lse for part in parts])
    with np.errstate(invalid="ignore", divide="ignore"):
        highest = lses.max(axis=0)
        weights = np.exp(lses - np.where(highest == -np.inf, np.float32(0), highest))
        total = weights.sum(axis=0)
        lse = np.log(total) + highest
        total[total == 0] = 1
        weights /= total
    out = np.zeros_like(parts[0].out)
    for weight, part in zip(weights, parts, strict=True):
        # An empty part has no say, whatever its out holds.
        out += np.where(weight[..., None] == 0, np.float32(0), weight[..., None] * part.out)
    return Attended(out, lse)
