"""The specification: every kernel in numpy, float64, and nothing but what it means.

Each other implementation has to agree with this one within the rounding of its types.  It reads
a prefix by its definition and shares no code with the fast paths.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

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
    with_queries,
)

Doubles = NDArray[np.float64]


def values_of(array: Array) -> Doubles:
    """The values of a host array: f32, f16, or the bit patterns of bf16."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, np.float64)


def side_values(side: Side) -> Doubles:
    """``[..., D]`` of a side; an ``Affine`` is value = code * scale + bias."""
    if not isinstance(side, Affine):
        return values_of(side)
    shifts = np.arange(0, 32, side.bits, dtype=np.uint32)
    codes = (side.codes[..., None] >> shifts) & np.uint32(2**side.bits - 1)
    codes = codes.reshape(side.shape).astype(np.float64)
    scales = np.repeat(values_of(side.scales), side.group, axis=-1)
    biases = np.repeat(values_of(side.biases), side.group, axis=-1)
    values: Doubles = codes * scales + biases
    return values


def prefix_values(prefix: Prefix) -> tuple[Doubles, Doubles]:
    """K and V ``[H_kv, N, D]`` of a prefix, paged or not."""
    both = []
    for side in (prefix.keys, prefix.values):
        values = side_values(side)
        if prefix.table is not None:
            pages = values[prefix.table]  # [pages, H_kv, page, D]
            values = pages.transpose(1, 0, 2, 3).reshape(pages.shape[1], -1, pages.shape[3])
        both.append(values[:, : prefix.num_tokens])
    return both[0], both[1]


def softmax_attention(q: Doubles, keys: Doubles, values: Doubles, visible: Array) -> Attended:
    """``q [H, M, D]`` over ``keys``, ``values`` ``[H, T, D]`` where ``visible [H or 1, M, T]``."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = np.einsum("hmd,htd->hmt", q, keys) / math.sqrt(q.shape[-1])
        scores = np.where(visible, scores, -np.inf)
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        highest[highest == -np.inf] = 0  # no token seen: every weight is exp(-inf) = 0
        weights = np.exp(scores - highest)
        total = weights.sum(axis=-1, keepdims=True)
        seen = np.where(total == 0, 1, total)
        out = np.einsum("hmt,htd->hmd", weights, values) / seen
        return Attended(out, (np.log(total) + highest)[..., 0])


def attend(job: DenseJob) -> Attended:
    """Dense attention over prefix and suffix, out and lse in float64."""
    q = values_of(with_queries(job.q))
    num_queries = q.shape[1]
    keys, values = (side[:, job.start :] for side in prefix_values(job.prefix))
    visible = np.ones((1, num_queries, keys.shape[1]), bool)
    if job.suffix is not None:
        num = job.suffix.num_tokens
        last_seen = max(0, num - num_queries) + np.arange(num_queries)
        visible_suffix = np.arange(num) <= last_seen[:, None]
        keys = np.concatenate([keys, values_of(job.suffix.keys)], axis=1)
        values = np.concatenate([values, values_of(job.suffix.values)], axis=1)
        visible = np.concatenate([visible, visible_suffix[None]], axis=2)
    found = softmax_attention(q, keys[job.head_map], values[job.head_map], visible)
    return found.shaped(job.q.shape)


def attend_sparse(job: SparseJob) -> Attended:
    """Attention of each head to its own tokens, out ``[H_q, D]`` and lse in float64."""
    q = values_of(job.q)[:, None]
    keys, values = prefix_values(job.prefix)
    outs, lses = [], []
    for head, kv_head in enumerate(job.head_map):
        tokens = job.indices[head, : job.counts[head]]
        found = softmax_attention(
            q[head : head + 1],
            keys[kv_head, tokens][None],
            values[kv_head, tokens][None],
            np.ones((1, 1, len(tokens)), bool),
        )
        outs.append(found.out)
        lses.append(found.lse)
    return Attended(np.concatenate(outs), np.concatenate(lses)).shaped(job.q.shape)


def attend_blocks(job: BlocksJob) -> Attended:
    """Attention to selected blocks, the tail and the suffix, in float64."""
    q = values_of(job.q)[:, None]
    keys, values = prefix_values(job.prefix)
    starts = job.start + np.asarray(job.blocks, np.int64) * job.block_tokens
    tokens = (starts[:, None] + np.arange(job.block_tokens)).reshape(-1)
    tokens = np.concatenate([tokens, np.arange(job.tail_start, job.prefix.num_tokens)])
    keys, values = keys[:, tokens], values[:, tokens]
    if job.suffix is not None:
        keys = np.concatenate([keys, values_of(job.suffix.keys)], axis=1)
        values = np.concatenate([values, values_of(job.suffix.values)], axis=1)
    visible = np.ones((1, 1, keys.shape[1]), bool)
    found = softmax_attention(q, keys[job.head_map], values[job.head_map], visible)
    return found.shaped(job.q.shape)


def block_statistics(
    prefix: Prefix, block_tokens: int, start: int, selector: Selector
) -> BlockStatistics:
    """Mean, or largest and least keys, of the full blocks from ``start`` on, in float64."""
    keys = prefix_values(prefix)[0][:, start:]
    num_heads, num, dim = keys.shape
    num_blocks = num // block_tokens
    blocks = keys[:, : num_blocks * block_tokens].reshape(num_heads, num_blocks, block_tokens, dim)
    if selector == "mean":
        return BlockStatistics(blocks.mean(axis=2))
    return BlockStatistics(blocks.max(axis=2), blocks.min(axis=2))


def block_scores(q: Array, statistics: BlockStatistics, head_map: NDArray[np.uint8]) -> Doubles:
    """Scores ``[n_blocks]``, averaged over the query heads, in float64."""
    rows = values_of(q)
    finite = np.isfinite(rows).all(axis=-1, keepdims=True)
    rows = np.where(finite, rows, 0)[:, None]  # [H_q, 1, D]
    high = np.asarray(statistics.high, np.float64)[head_map]  # [H_q, n_blocks, D]
    if statistics.low is None:
        scores = (rows * high).sum(axis=-1) / math.sqrt(rows.shape[-1])
    else:
        low = np.asarray(statistics.low, np.float64)[head_map]
        scores = np.maximum(rows * low, rows * high).sum(axis=-1)
    mean: Doubles = scores.mean(axis=0)
    return mean


def top_blocks(scores: Array, top: int) -> NDArray[np.int32]:
    """The ids of the ``top`` greatest scores, ascending; the lower id wins a tie."""
    order = np.argsort(-np.asarray(scores), kind="stable")
    return np.sort(order[:top]).astype(np.int32)


def _single(found: Attended) -> Attended:
    return Attended(found.out.astype(np.float32), found.lse.astype(np.float32))


class ReferenceKernels(Kernels):
    """The specification as an implementation: exact, slow, results rounded to float32."""

    name = "reference"
    host = True

    def unavailable(self) -> str | None:
        """Runs everywhere."""
        return None

    def attend(self, job: DenseJob) -> Attended:
        """See :func:`attend`."""
        return _single(attend(job))

    def attend_sparse(self, job: SparseJob) -> Attended:
        """See :func:`attend_sparse`."""
        return _single(attend_sparse(job))

    def attend_blocks(self, job: BlocksJob) -> Attended:
        """See :func:`attend_blocks`."""
        return _single(attend_blocks(job))

    def block_statistics(
        self, prefix: Prefix, block_tokens: int, start: int, selector: Selector
    ) -> BlockStatistics:
        """See :func:`block_statistics`."""
        return block_statistics(prefix, block_tokens, start, selector)

    def block_scores(
        self, q: Array, statistics: BlockStatistics, head_map: NDArray[np.uint8]
    ) -> Array:
        """See :func:`block_scores`."""
        return block_scores(q, statistics, head_map)

    def top_blocks(self, scores: Array, top: int) -> Array:
        """See :func:`top_blocks`."""
        return top_blocks(scores, top)
