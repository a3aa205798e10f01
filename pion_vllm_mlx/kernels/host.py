"""Rows of a prefix as float32 on the host, and the merge of partial results.

A chunk of rows is widened (f16, bf16) or dequantized only while it is attended to, so that what is
read from memory is what is held, and the float32 copy stays in the processor's cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.prefix import arrays_of
from pion_vllm_mlx.kernels.problem import Affine, Attended, Prefix, Side
from pion_vllm_mlx.kernels.quantized import Codes, dequantized
from pion_vllm_mlx.kernels.scratch import SCRATCH
from pion_vllm_mlx.kernels.widening import Floats, widened

Range: TypeAlias = tuple[int, int]
"""Tokens [first, end)."""


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

    @property
    def is_quantized(self) -> bool:
        """Whether the rows are groups of codes."""
        return isinstance(self.side, Affine)

    def codes(self, ranges: Sequence[Range]) -> Codes:
        """The tokens of the ranges as codes, of a quantized side."""
        return Codes.of(self.side.mapped(lambda array: self._joined(array, ranges)), self.name)

    def take(self, kv_heads: NDArray[np.intp], tokens: NDArray[np.intp]) -> Floats:
        """Row (kv_heads[i, j], tokens[i, j]) for all i, j: ``[I, J, D]``; ``heads`` is ignored."""
        if self.table is None:
            return self._converted(lambda array: self._taken(array, kv_heads, tokens))
        page = self.side.shape[2]
        blocks = self.table[tokens // page]
        return self._converted(lambda array: array[blocks, kv_heads, tokens % page])

    def _converted(self, pick: Callable[[NDArray[Any]], NDArray[Any]]) -> Floats:
        if isinstance(self.side, Affine):
            return dequantized(self.side.mapped(pick), self.name)
        return widened(pick(self.side), self.name)

    def _joined(self, array: NDArray[Any], ranges: Sequence[Range]) -> NDArray[Any]:
        pieces = [piece for run in ranges for piece in self._pieces(array, run)]
        if len(pieces) == 1:
            return pieces[0]
        if array is not self.side or array.dtype != np.float32:
            return np.concatenate(
                pieces, axis=1
            )  # not into a buffer: scales and biases live at once
        num = sum(piece.shape[1] for piece in pieces)
        joined = SCRATCH.floats(f"{self.name} joined", (len(pieces[0]), num, array.shape[-1]))
        return np.concatenate(pieces, axis=1, out=joined)

    def _taken(
        self, array: NDArray[Any], kv_heads: NDArray[np.intp], tokens: NDArray[np.intp]
    ) -> NDArray[Any]:
        plain = array is self.side and array.dtype == np.float32
        if not plain or not array.flags.c_contiguous:
            return array[kv_heads, tokens]
        rows = array.reshape(-1, array.shape[-1])
        taken = SCRATCH.floats(f"{self.name} taken", (*tokens.shape, array.shape[-1]))
        # All rows are there: "wrap" only lets numpy write to the buffer at once.
        return np.take(rows, kv_heads * array.shape[1] + tokens, axis=0, out=taken, mode="wrap")

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


@dataclass(frozen=True)
class Sides:
    """Both sides of a prefix, and where its tokens lie in them.

    ``blocks``: of a pool that has the blocks of each head one behind the other, the block table.
    Its sides are read as ``[H_kv, pool * page, D]``, neighbouring blocks without copying them.
    """

    keys: Rows
    values: Rows
    blocks: NDArray[np.int32] | None = None
    page: int = 1

    @classmethod
    def of(cls, prefix: Prefix, heads: NDArray[np.intp] | None = None) -> Sides:
        """Those of the heads that are read, None for all."""
        table, sides = prefix.table, (prefix.keys, prefix.values)
        if table is None or not all(_lies_by_head(side) for side in sides):
            keys, values = sides
            return cls(Rows(keys, table, heads), Rows(values, table, heads, "values"))
        keys, values = (_by_head(side) for side in sides)
        pair = Rows(keys, heads=heads), Rows(values, heads=heads, name="values")
        return cls(*pair, table, prefix.page_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether tokens that lie behind each other are read without copying."""
        return self.keys.is_plain and self.values.is_plain

    def located(self, ranges: Sequence[Range]) -> list[Range]:
        """Ascending ranges of tokens as ranges of rows, to be read in this order."""
        if self.blocks is None:
            return list(ranges)
        return joined_ranges([place for run in ranges for place in self._places(*run)])

    def rows_of(self, tokens: NDArray[np.intp]) -> NDArray[np.intp]:
        """The rows of tokens."""
        if self.blocks is None:
            return tokens
        return self.blocks[tokens // self.page] * self.page + tokens % self.page

    def _places(self, first: int, end: int) -> Iterator[Range]:
        assert self.blocks is not None
        used = self.blocks[first // self.page : -(-end // self.page)]
        cuts = [0, *(np.flatnonzero(np.diff(used) != 1) + 1).tolist(), len(used)]
        skipped, left = first % self.page, end - first
        for one, after in itertools.pairwise(cuts):
            place = int(used[one]) * self.page + skipped
            count = min(left, (after - one) * self.page - skipped)
            yield place, place + count
            skipped, left = 0, left - count


def _lies_by_head(side: Side) -> bool:
    """Whether blocks ``[pool, H_kv, page, X]`` follow each other in memory, head by head."""
    return all(array.strides[0] == array.shape[2] * array.strides[2] for array in arrays_of(side))


def _by_head(side: Side) -> Side:
    """Such blocks as ``[H_kv, pool * page, X]``: a view."""

    def turned(array: NDArray[Any]) -> NDArray[Any]:
        num_blocks, heads, page, width = array.shape
        rows: NDArray[Any] = array.swapaxes(0, 1).reshape(heads, num_blocks * page, width)
        return rows

    return side.mapped(turned) if isinstance(side, Affine) else turned(side)


def joined_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Ranges in their order, neighbours joined."""
    joined: list[Range] = []
    for first, end in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((first, end))
    return joined


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
