"""The kernels as mlx expressions: they run on any device that mlx runs on, lazily.

Scores, softmax and outputs are float32 whatever K and V are, so 16-bit rows are widened, all of
them at once: on a GPU the Metal and CUDA kernels do without.  Quantized rows stay so: both products
are ``mx.quantized_matmul``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.heads import HeadGroups, head_groups
from pion_vllm_mlx.kernels.problem import (
    Affine,
    Array,
    Attended,
    BlocksJob,
    BlockStatistics,
    DenseJob,
    Kernels,
    Prefix,
    Selector,
    Side,
    SparseJob,
    Suffix,
    with_queries,
)


def merged(parts: Sequence[Attended]) -> Attended:
    """The union of disjoint parts: out ``[..., D]``, lse ``[...]``, float32."""
    lses = mx.stack([part.lse for part in parts])
    highest = lses.max(axis=0)
    weights = mx.exp(lses - mx.where(highest == -math.inf, 0, highest))
    total = weights.sum(axis=0)
    weights = weights / mx.where(total == 0, 1, total)
    outs = mx.stack([part.out for part in parts])
    # An empty part has no say, whatever its out holds.
    outs = mx.where(weights[..., None] == 0, 0, weights[..., None] * outs)
    return Attended(outs.sum(axis=0), mx.log(total) + highest)


def wide(array: Array) -> Array:
    """The array as float32."""
    return array.astype(mx.float32)


def scores_of(q: Array, keys: Side) -> Array:
    """``q [U, R, D]`` by ``keys [U, n, D]``: f32 ``[U, R, n]``."""
    if isinstance(keys, Affine):
        return _quantized(q, keys, transpose=True)
    return q @ wide(keys).swapaxes(-1, -2)


def weighted(weights: Array, values: Side) -> Array:
    """``weights [U, R, n]`` by ``values [U, n, D]``: f32 ``[U, R, D]``."""
    if isinstance(values, Affine):
        return _quantized(weights, values, transpose=False)
    return weights @ wide(values)


def _quantized(left: Array, side: Affine, *, transpose: bool) -> Array:
    scales, biases = wide(side.scales), wide(side.biases)
    return mx.quantized_matmul(
        left,
        side.codes,
        scales,
        biases,
        transpose=transpose,
        group_size=side.group,
        bits=side.bits,
    )


def mapped(side: Side, pick: Callable[[Array], Array]) -> Side:
    """``pick`` of the array, or of each of the three of quantized groups."""
    return side.mapped(pick) if isinstance(side, Affine) else pick(side)


def tokens_from(prefix: Prefix, start: int) -> tuple[Side, Side]:
    """Both sides ``[H_kv, N - start, D]``; blocks of a paged prefix are joined."""
    num_tokens, table = prefix.num_tokens, prefix.table

    def pick(array: Array) -> Array:
        if table is None:
            return array[:, start:num_tokens]
        page = array.shape[2]
        first = start // page
        used = mx.array(table[first : -(-num_tokens // page)])
        joined = array[used].swapaxes(0, 1).flatten(1, 2)
        return joined[:, start - first * page : num_tokens - first * page]

    return mapped(prefix.keys, pick), mapped(prefix.values, pick)


def tokens_at(prefix: Prefix, tokens: Array) -> tuple[Side, Side]:
    """Both sides of the tokens i32 ``[P]``, for every head: ``[H_kv, P, D]``."""
    table = None if prefix.table is None else mx.array(prefix.table)

    def pick(array: Array) -> Array:
        if table is None:
            return mx.take(array, tokens, axis=1)
        page = array.shape[2]
        # Whole rows of a token, [P, H_kv, ...], then heads first.
        heads = mx.arange(array.shape[1])[:, None]
        return array[table[tokens // page][None], heads, (tokens % page)[None]]

    return mapped(prefix.keys, pick), mapped(prefix.values, pick)


def rows_at(prefix: Prefix, kv_heads: Array, tokens: Array) -> tuple[Side, Side]:
    """Both sides of row (kv_heads[h, 0], tokens[h, k]): ``[H_q, K, D]``."""
    table = None if prefix.table is None else mx.array(prefix.table)

    def pick(array: Array) -> Array:
        if table is None:
            return array[kv_heads, tokens]
        page = array.shape[2]
        return array[table[tokens // page], kv_heads, tokens % page]

    return mapped(prefix.keys, pick), mapped(prefix.values, pick)


@dataclass(frozen=True)
class Part:
    """Keys and values ``[U, n, D]``; ``hidden`` bool ``[R, n]`` or ``[U, R, n]``, or None."""

    keys: Side
    values: Side
    hidden: Array | None = None


def softmax_over(q: Array, parts: Sequence[Part]) -> Attended:
    """One softmax of ``q [U, R, D]`` (scaled, f32) over all parts: out ``[U, R, D]``, lse."""
    all_scores = []
    for part in parts:
        scores = scores_of(q, part.keys)
        if part.hidden is not None:
            scores = mx.where(part.hidden, -math.inf, scores)
        all_scores.append(scores)
    joined = all_scores[0] if len(parts) == 1 else mx.concatenate(all_scores, axis=-1)
    lse = mx.logsumexp(joined, axis=-1)
    shift = mx.where(lse == -math.inf, 0, lse)[..., None]
    weights = mx.exp(joined - shift)
    out, at = None, 0
    for part, scores in zip(parts, all_scores, strict=True):
        count = scores.shape[-1]
        share = weighted(weights[..., at : at + count], part.values)
        out = share if out is None else out + share
        at += count
    return Attended(out, lse)


class Grouped:
    """The query rows of each KV head, scaled f32 ``rows [U, G * M, D]``, and the way back."""

    def __init__(self, q: Array, head_map: NDArray[np.uint8], num_kv_heads: int) -> None:
        self.groups: HeadGroups = head_groups(head_map, num_kv_heads)
        self._shape = tuple(q.shape)
        q = with_queries(q)
        num_heads, self._num_queries, dim = q.shape
        if not self.groups.in_order:
            q = q[mx.array(self.groups.slots.reshape(-1).astype(np.int32))]
        self.rows = (wide(q) * (1 / math.sqrt(dim))).reshape(len(self.groups.slots), -1, dim)

    def part(self, keys: Side, values: Side, hidden: Array | None = None) -> Part:
        """A part of the KV heads in use."""
        if self.groups.used is not None:
            used = mx.array(self.groups.used.astype(np.int32))
            keys, values = (mapped(side, lambda array: array[used]) for side in (keys, values))
        return Part(keys, values, hidden)

    def suffix(self, suffix: Suffix) -> Part:
        """A suffix, of which query m sees ``t <= max(0, S - M) + m``."""
        num, num_queries = suffix.num_tokens, self._num_queries
        hidden = None
        if num_queries > 1:
            last_seen = max(0, num - num_queries) + mx.arange(num_queries)
            hidden = mx.arange(num) > last_seen[:, None]
            hidden = mx.tile(hidden, (self.rows.shape[1] // num_queries, 1))
        return self.part(suffix.keys, suffix.values, hidden)

    def returned(self, found: Attended) -> Attended:
        """Out in the shape of Q, and lse."""
        if self.groups.in_order:
            return found.shaped(self._shape)
        out = found.out.reshape(-1, self._num_queries, found.out.shape[-1])
        lse = found.lse.reshape(-1, self._num_queries)
        rows = mx.array(self.groups.rows.astype(np.int32))
        return Attended(out[rows], lse[rows]).shaped(self._shape)


class MlxKernels(Kernels):
    """mlx, on its default device."""

    name = "mlx"
    host = False

    def unavailable(self) -> str | None:
        """Runs wherever mlx does."""
        return None

    def attend(self, job: DenseJob) -> Attended:
        """Products over the prefix as it lies, and over the suffix, under one softmax."""
        grouped = Grouped(job.q, job.head_map, job.prefix.num_kv_heads)
        parts = [grouped.part(*tokens_from(job.prefix, job.start))]
        if job.suffix is not None:
            parts.append(grouped.suffix(job.suffix))
        return grouped.returned(softmax_over(grouped.rows, parts))

    def attend_sparse(self, job: SparseJob) -> Attended:
        """Rows gathered a head."""
        num_heads, dim = job.q.shape
        width = job.indices.shape[1]
        if width == 0:
            return Attended(mx.zeros((num_heads, dim)), mx.full((num_heads,), -math.inf))
        unused = np.arange(width) >= job.counts[:, None]
        tokens = mx.array(np.where(unused, 0, job.indices))
        kv_heads = mx.array(job.head_map.astype(np.int32))[:, None]
        q = (wide(job.q) * (1 / math.sqrt(dim)))[:, None]
        part = Part(*rows_at(job.prefix, kv_heads, tokens), mx.array(unused)[:, None])
        return softmax_over(q, [part]).shaped(job.q.shape)

    def attend_blocks(self, job: BlocksJob) -> Attended:
        """Rows gathered once for all heads, and the suffix."""
        grouped = Grouped(job.q, job.head_map, job.prefix.num_kv_heads)
        starts = job.start + job.blocks * job.block_tokens
        tokens = (starts[:, None] + mx.arange(job.block_tokens)).flatten()
        tail = mx.arange(job.tail_start, job.prefix.num_tokens)
        tokens = mx.concatenate([tokens, tail]).astype(mx.int32)
        parts = [grouped.part(*tokens_at(job.prefix, tokens))]
        if job.suffix is not None:
            parts.append(grouped.suffix(job.suffix))
        return grouped.returned(softmax_over(grouped.rows, parts))

    def block_statistics(
        self, prefix: Prefix, block_tokens: int, start: int, selector: Selector
    ) -> BlockStatistics:
        """Reductions of the keys as they lie; evaluated, for they are kept."""
        keys = tokens_from(prefix, start)[0]
        if isinstance(keys, Affine):
            keys = mx.dequantize(
                keys.codes,
                wide(keys.scales),
                wide(keys.biases),
                group_size=keys.group,
                bits=keys.bits,
            )
        num_blocks = keys.shape[1] // block_tokens
        blocks = mx.unflatten(keys[:, : num_blocks * block_tokens], 1, (num_blocks, block_tokens))
        if selector == "mean":
            found = BlockStatistics(wide(blocks).mean(axis=2))
        else:
            found = BlockStatistics(wide(blocks.max(axis=2)), wide(blocks.min(axis=2)))
        mx.eval(*(array for array in (found.high, found.low) if array is not None))
        return found

    def block_scores(
        self, q: Array, statistics: BlockStatistics, head_map: NDArray[np.uint8]
    ) -> Array:
        """Query heads of one KV head are added up first: the mean over heads is linear in them."""
        rows = wide(q)
        finite = mx.isfinite(rows).all(axis=-1, keepdims=True)
        rows = mx.where(finite, rows, 0)
        num_heads, dim = rows.shape
        belongs = np.arange(statistics.high.shape[0])[:, None] == head_map
        # Adding up by a product would round to TF32 where the device does that.
        of_head = mx.array(belongs)[..., None]

        def summed(array: Array, side: Array) -> Array:
            by_kv = mx.where(of_head, side[None], 0).sum(axis=1)
            return (array @ by_kv[:, :, None])[..., 0].sum(axis=0)

        if statistics.low is None:
            return summed(statistics.high, rows) / (num_heads * math.sqrt(dim))
        high = summed(statistics.high, mx.maximum(rows, 0))
        return (high + summed(statistics.low, mx.minimum(rows, 0))) / num_heads

    def top_blocks(self, scores: Array, top: int) -> Array:
        """By values alone: the result does not depend on how a device's sort treats ties."""
        scores = mx.where(mx.isnan(scores), -math.inf, scores)
        num_blocks = scores.shape[0]
        least = mx.sort(scores)[num_blocks - top]
        above, equal = scores > least, scores == least
        room = top - above.sum()
        taken = above | (equal & (mx.cumsum(equal.astype(mx.int32)) <= room))
        ids = mx.where(taken, mx.arange(num_blocks), num_blocks)
        return mx.sort(ids)[:top].astype(mx.int32)
