"""The softmax over one chunk of tokens, and how results over several chunks add up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.quantized import Codes
from pion_vllm_mlx.kernels.scratch import SCRATCH
from pion_vllm_mlx.kernels.widening import Floats

# Of the tiles of a product: values of its keys, and rows of queries. Up to these OpenBLAS neither
# packs its operands nor starts threads.
_TILE_VALUES = 8192
_TILE_TOKENS = 128
_LEAST_TILE = 16
_TILE_ROWS = 16


@dataclass
class Running:
    """A softmax under way: highest score, sum of weights ``[U, R, 1]`` and output ``[U, R, D]``."""

    highest: Floats
    total: Floats
    out: Floats

    @classmethod
    def of(cls, parts: Sequence[Running]) -> Running:
        """Results of heads that follow each other."""
        fields = zip(*((one.highest, one.total, one.out) for one in parts), strict=True)
        return cls(*(np.concatenate(field) for field in fields))

    def add(self, other: Running) -> None:
        """Take in the result over other tokens."""
        highest = np.maximum(self.highest, other.highest)
        shift = _finite(highest)
        mine, theirs = np.exp(self.highest - shift), np.exp(other.highest - shift)
        self.out *= mine
        self.out += other.out * theirs
        self.total = self.total * mine + other.total * theirs
        self.highest = highest

    def finished(self) -> tuple[Floats, Floats]:
        """Output ``[U, R, D]`` and natural-log LSE ``[U, R]``."""
        lse = np.log(self.total) + self.highest
        self.total[self.total == 0] = 1
        self.out /= self.total
        return self.out, lse[..., 0]


def _finite(highest: Floats) -> Floats:
    """What to subtract from scores: 0 for a row that saw no token, whose highest is -inf."""
    return np.where(highest == -np.inf, np.float32(0), highest)


def weigh(q: Floats, keys: Floats, values: Floats, hidden: NDArray[np.bool_] | None) -> Running:
    """``q [U, R, D]`` (scaled) over ``keys``, ``values`` ``[U, n, D]``, less what is ``hidden``.

    ``hidden`` ``[U or 1, R, n]``.

    The products are cut into tiles that a BLAS computes without packing and without threads of its
    own: axes (U, tile of tokens, tile of rows, row, token or value).
    """
    if q.shape[1] == 1 and hidden is None:
        return _weigh_one(q, keys, values)
    num_groups, num_rows, dim = q.shape
    num = keys.shape[1]
    tile = _tile_tokens(num, dim)
    by_tile = (num_groups, num // tile, 1, tile, dim)
    q_tiles = _row_tiles(q)
    shape = (num_groups, num // tile, *q_tiles.shape[2:4])
    scores = SCRATCH.floats("scores", (*shape, tile))
    np.matmul(q_tiles, keys.reshape(by_tile).swapaxes(-1, -2), out=scores)
    if hidden is not None:
        spread = _row_tiles(hidden)[:, 0]
        spread = spread.reshape(*spread.shape[:3], -1, tile)
        np.copyto(scores, np.float32(-np.inf), where=np.moveaxis(spread, 3, 1))
    # Over the tiles first: numpy is quick where it goes along rows, and slow within short ones.
    highest = scores.max(axis=1).max(axis=-1)
    scores -= (highest if hidden is None else _finite(highest))[:, None, :, :, None]
    np.exp(scores, out=scores)
    total = scores.sum(axis=1).sum(axis=-1)
    outs = SCRATCH.floats("outs", (*shape, dim))
    out = np.matmul(scores, values.reshape(by_tile), out=outs).sum(axis=1)
    flat = (num_groups, -1)
    return Running(
        highest.reshape(*flat, 1)[:, :num_rows],
        total.reshape(*flat, 1)[:, :num_rows],
        out.reshape(*flat, dim)[:, :num_rows],
    )


def _weigh_one(q: Floats, keys: Floats, values: Floats) -> Running:
    """One row of queries: products with a vector, which no tile makes faster."""
    return weigh_pieces(q, [(keys, values)])


def weigh_pieces(q: Floats, pieces: Sequence[tuple[Floats, Floats]]) -> Running:
    """``q [U, 1, D]`` (scaled) over K and V ``[U, n, D]`` of all pieces under one softmax."""
    ends = list(itertools.accumulate(keys.shape[1] for keys, _ in pieces))
    scores = SCRATCH.floats("scores", (q.shape[0], ends[-1]))
    columns = [slice(end - keys.shape[1], end) for end, (keys, _) in zip(ends, pieces, strict=True)]
    vectors = q.swapaxes(-1, -2)
    for column, (keys, _) in zip(columns, pieces, strict=True):
        np.matmul(keys, vectors, out=scores[:, column, None])
    highest = scores.max(axis=-1, keepdims=True)
    scores -= highest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    out = np.matmul(scores[:, None, columns[0]], pieces[0][1])
    for column, (_, values) in zip(columns[1:], pieces[1:], strict=True):
        out += np.matmul(scores[:, None, column], values)
    return Running(highest[:, None], total[:, None], out)


def weigh_codes(q: Floats, keys: Codes, values: Codes) -> Running:
    """``q [U, R, D]`` (scaled), of few rows, over quantized rows ``[U, n, D]``."""
    scores = keys.scores(q)
    highest = scores.max(axis=-1, keepdims=True)
    scores -= highest
    np.exp(scores, out=scores)
    return Running(highest, scores.sum(axis=-1, keepdims=True), values.weighted(scores))


def _tile_tokens(num_tokens: int, dim: int) -> int:
    """Tokens of a tile: a power of two that divides ``num_tokens``, or all of few."""
    tile = _TILE_TOKENS
    while tile > _LEAST_TILE and tile * dim > _TILE_VALUES:
        tile //= 2
    return tile if num_tokens % tile == 0 else num_tokens


def _row_tiles(rows: NDArray[Any]) -> NDArray[Any]:
    """``[U, R, X]`` as ``[U, 1, tiles, rows, X]``; the last tile is filled up with zeros."""
    num_groups, num_rows, width = rows.shape
    num_tiles = -(-num_rows // _TILE_ROWS)
    each = -(-num_rows // num_tiles)
    if num_tiles * each != num_rows:
        filled = np.zeros((num_groups, num_tiles * each, width), rows.dtype)
        filled[:, :num_rows] = rows
        rows = filled
    return rows.reshape(num_groups, 1, num_tiles, each, width)
