"""The kernels on the processor: BLAS products over chunks of tokens, split over threads.

The tokens a request sees are cut into chunks, the chunks dealt to a fixed number of strips.  A
strip runs through its chunks with a running maximum, sum and output, as flash attention does; the
strips' results are added up in order.  The cut depends on the shapes alone, never on the number of
threads: equal requests give equal bytes.  A short query over plain rows is not cut at tokens; its
heads are dealt to threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.heads import HeadGroups, head_groups
from pion_vllm_mlx.kernels.host import Range, Rows
from pion_vllm_mlx.kernels.problem import (
    Array,
    Attended,
    BlocksJob,
    BlockStatistics,
    DenseJob,
    Kernels,
    Prefix,
    Selector,
    SparseJob,
    Suffix,
    with_queries,
)
from pion_vllm_mlx.kernels.reference import top_blocks
from pion_vllm_mlx.kernels.threads import cores, in_threads
from pion_vllm_mlx.kernels.weighing import Running, weigh, weigh_codes, weigh_pieces
from pion_vllm_mlx.kernels.widening import Floats, widened

# Bytes of float32 keys in a chunk: widened ones have to stay in a core's cache, views need not.
_WIDENED_BYTES = 512 * 1024
_PLAIN_BYTES = 4 * 1024 * 1024
# Of gathered rows: threads that take turns at short pieces wait for the interpreter's lock.
_TAKEN_BYTES = 2 * 1024 * 1024
_SCORE_VALUES = 512 * 1024
_LEAST_TOKENS = 128  # a multiple of every tile
_STRIPS = 16
# Up to so many query rows of a KV head quantized rows are attended to as codes.
_CODES_ROWS = 4
# Below this a thread costs more than it saves: about a tenth of a millisecond.
_INLINE_COST = 512 * 1024
# Products with a vector are not cut at tokens below this, and a thread takes heads for this much.
_INLINE_VECTOR_COST = 4 * 1024 * 1024
_THREAD_VECTOR_COST = 1024 * 1024
_MOST_PIECES = 16

Item = TypeVar("Item")


@dataclass(frozen=True)
class Chunk:
    """Rows to attend to at once: ``ranges`` of one source.

    ``last_seen`` i64 ``[R]``: the last position each query row sees, None where it sees all.
    """

    keys: Rows
    values: Rows
    ranges: Sequence[Range]
    last_seen: NDArray[np.int64] | None = None


def attend_chunk(q: Floats, chunk: Chunk) -> Running:
    """``q [U, R, D]`` (scaled) over one chunk."""
    hidden = None
    if chunk.last_seen is not None:
        ((first, end),) = chunk.ranges
        if end - 1 > chunk.last_seen.min():
            hidden = (np.arange(first, end) > chunk.last_seen[:, None])[None]
    if chunk.keys.is_quantized and q.shape[1] <= _CODES_ROWS:
        return weigh_codes(q, chunk.keys.codes(chunk.ranges), chunk.values.codes(chunk.ranges))
    return weigh(q, chunk.keys.read(chunk.ranges), chunk.values.read(chunk.ranges), hidden)


def in_strips(items: Sequence[Item], work: Callable[[Item], Running], cost: float) -> Running:
    """The sum of ``work`` over ``items``, in threads where the ``cost`` is worth it."""
    each = -(-len(items) // _STRIPS)
    strips = [items[at : at + each] for at in range(0, len(items), each)]

    def run(strip: Sequence[Item]) -> Running:
        with np.errstate(all="ignore"):
            found = work(strip[0])
            for item in strip[1:]:
                found.add(work(item))
            return found

    results = [run(one) for one in strips] if cost < _INLINE_COST else in_threads(strips, run)
    with np.errstate(all="ignore"):
        for other in results[1:]:
            results[0].add(other)
    return results[0]


def cost_of(num_tokens: int, shape: tuple[int, ...]) -> float:
    """How much work it is to let queries of ``shape`` (U, R, D) see ``num_tokens`` each.

    In values of K read; every further row of queries costs an eighth of reading them.
    """
    num_groups, num_rows, dim = shape
    return num_tokens * num_groups * dim * (1 + num_rows / 8)


def chunks_of(
    rows: tuple[Rows, Rows], ranges: Sequence[Range], shape: tuple[int, ...]
) -> list[Chunk]:
    """Cut the tokens of ``ranges`` for queries of ``shape`` (U, R, D).

    All chunks but the last are full, and that one is cut so that less than a tile is left over.
    """
    full = tokens_of_chunk(rows[0], shape)
    left = sum(end - first for first, end in ranges)
    chunks: list[Chunk] = []
    pending: list[Range] = []
    room = _chunk_size(left, full)
    for first, end in ranges:
        while first < end:
            stop = min(end, first + room)
            pending.append((first, stop))
            room -= stop - first
            left -= stop - first
            first = stop
            if room == 0:
                chunks.append(Chunk(*rows, pending))
                pending, room = [], _chunk_size(left, full)
    return chunks


def _chunk_size(left: int, full: int) -> int:
    """Tokens of the next chunk where ``left`` are left to cut."""
    if left >= full:
        return full
    return left // _LEAST_TOKENS * _LEAST_TOKENS or left


def tokens_of_chunk(rows: Rows, shape: tuple[int, ...]) -> int:
    """How many tokens fit a chunk for queries of ``shape`` (U, R, D)."""
    num_groups, num_rows, dim = shape
    row_bytes = 4 * num_groups * dim
    by_bytes = (_PLAIN_BYTES if rows.is_plain else _WIDENED_BYTES) // row_bytes
    by_scores = _SCORE_VALUES // (num_groups * num_rows)
    return max(_LEAST_TOKENS, min(by_bytes, by_scores) // _LEAST_TOKENS * _LEAST_TOKENS)


def suffix_chunks(
    suffix: Suffix, groups: HeadGroups, shape: tuple[int, ...], num_queries: int
) -> list[Chunk]:
    """The chunks of a suffix, of which query m sees ``t <= max(0, S - M) + m``."""
    rows = (
        Rows(suffix.keys, heads=groups.used),
        Rows(suffix.values, heads=groups.used, name="values"),
    )
    chunks = chunks_of(rows, [(0, suffix.num_tokens)], shape)
    if num_queries == 1:
        return chunks
    last_seen = max(0, suffix.num_tokens - num_queries) + np.arange(num_queries)
    last_seen = np.tile(last_seen, shape[1] // num_queries)
    return [Chunk(one.keys, one.values, one.ranges, last_seen) for one in chunks]


class Grouped:
    """The query rows of each KV head, scaled: ``rows [U, G * M, D]``, and the way back."""

    def __init__(self, q: Array, head_map: NDArray[np.uint8], num_kv_heads: int) -> None:
        self.groups = head_groups(head_map, num_kv_heads)
        self._shape = q.shape
        q = widened(with_queries(q))
        self.num_queries, dim = q.shape[1:]
        if not self.groups.in_order:
            q = q[self.groups.slots.reshape(-1)]
        num_groups = len(self.groups.slots)
        self.rows: Floats = (q * np.float32(1 / math.sqrt(dim))).reshape(num_groups, -1, dim)

    def returned(self, running: Running) -> Attended:
        """Out in the shape of Q, and lse."""
        with np.errstate(all="ignore"):
            found = Attended(*running.finished())
        if self.groups.in_order:
            return found.shaped(self._shape)
        out = found.out.reshape(-1, self.num_queries, found.out.shape[-1])
        lse = found.lse.reshape(-1, self.num_queries)
        return Attended(out[self.groups.rows], lse[self.groups.rows]).shaped(self._shape)


class CpuKernels(Kernels):
    """numpy, its BLAS, and a thread a core."""

    name = "cpu"
    host = True

    def unavailable(self) -> str | None:
        """Runs everywhere."""
        return None

    def attend(self, job: DenseJob) -> Attended:
        """Chunks of prefix and suffix under one softmax."""
        ranges = [(job.start, job.prefix.num_tokens)]
        return self._attend_ranges(job, ranges)

    def attend_blocks(self, job: BlocksJob) -> Attended:
        """The selected blocks and the tail, gathered into chunks, and the suffix."""
        size = job.block_tokens
        starts = (job.start + block * size for block in job.blocks.tolist())
        ranges = _joined_ranges([*((at, at + size) for at in starts), *_tail(job)])
        return self._attend_ranges(job, ranges)

    def _attend_ranges(self, job: DenseJob | BlocksJob, ranges: Sequence[Range]) -> Attended:
        prefix = job.prefix
        grouped = Grouped(job.q, job.head_map, prefix.num_kv_heads)
        used = grouped.groups.used
        shape = grouped.rows.shape
        rows = (
            Rows(prefix.keys, prefix.table, used),
            Rows(prefix.values, prefix.table, used, "values"),
        )
        pieces = _inline_pieces(rows, ranges, job.suffix, shape)
        if pieces:
            return grouped.returned(_weigh_heads(grouped.rows, pieces))
        chunks = chunks_of(rows, ranges, shape)
        if job.suffix is not None:
            chunks += suffix_chunks(job.suffix, grouped.groups, shape, grouped.num_queries)
        num_tokens = sum(end - first for one in chunks for first, end in one.ranges)
        cost = cost_of(num_tokens, shape)
        return grouped.returned(
            in_strips(chunks, lambda chunk: attend_chunk(grouped.rows, chunk), cost)
        )

    def attend_sparse(self, job: SparseJob) -> Attended:
        """Tokens gathered a head, in chunks of columns of the index."""
        num_heads, dim = job.q.shape
        width = job.indices.shape[1]
        if width == 0:
            zeros = np.zeros((num_heads, dim), np.float32)
            return Attended(zeros, np.full(num_heads, -np.inf, np.float32))
        q = (widened(job.q) * np.float32(1 / math.sqrt(dim)))[:, None]
        kv_heads = job.head_map.astype(np.intp)[:, None]
        keys = Rows(job.prefix.keys, job.prefix.table)
        values = Rows(job.prefix.values, job.prefix.table, name="values")

        def work(columns: Range) -> Running:
            first, end = columns
            tokens = job.indices[:, first:end].astype(np.intp)
            unused = np.arange(first, end) >= job.counts[:, None]
            tokens[unused] = 0
            found_keys, found_values = (rows.take(kv_heads, tokens) for rows in (keys, values))
            return weigh(q, found_keys, found_values, unused[:, None] if unused.any() else None)

        step = max(_LEAST_TOKENS, _TAKEN_BYTES // (4 * num_heads * dim))
        columns = [(at, min(width, at + step)) for at in range(0, width, step)]
        running = in_strips(columns, work, cost_of(width, q.shape))
        with np.errstate(all="ignore"):
            return Attended(*running.finished()).shaped(job.q.shape)

    def block_statistics(
        self, prefix: Prefix, block_tokens: int, start: int, selector: Selector
    ) -> BlockStatistics:
        """Blocks reduced in runs that fit the cache."""
        num_heads, dim = prefix.num_kv_heads, prefix.head_dim
        end = start + (prefix.num_tokens - start) // block_tokens * block_tokens
        rows = Rows(prefix.keys, prefix.table)
        step = max(1, tokens_of_chunk(rows, (num_heads, 1, dim)) // block_tokens) * block_tokens
        reductions = [np.mean] if selector == "mean" else [np.max, np.min]

        def work(first: int) -> list[Floats]:
            read = rows.read([(first, min(end, first + step))])
            blocks = read.reshape(num_heads, -1, block_tokens, dim)
            with np.errstate(all="ignore"):
                return [reduce(blocks, axis=2) for reduce in reductions]

        found = in_threads(range(start, end, step), work)
        return BlockStatistics(*(np.concatenate(side, axis=1) for side in zip(*found, strict=True)))

    def block_scores(
        self, q: Array, statistics: BlockStatistics, head_map: NDArray[np.uint8]
    ) -> Array:
        """Query heads of one KV head are added up first: the mean over heads is linear in them."""
        rows = widened(q)
        rows = np.where(np.isfinite(rows).all(axis=-1, keepdims=True), rows, np.float32(0))
        num_heads, dim = rows.shape
        belongs = (np.arange(statistics.high.shape[0])[:, None] == head_map).astype(np.float32)
        with np.errstate(all="ignore"):
            if statistics.low is None:
                scores = _summed(statistics.high, belongs @ rows)
                return scores / np.float32(num_heads * math.sqrt(dim))
            high = _summed(statistics.high, belongs @ np.maximum(rows, 0))
            return (high + _summed(statistics.low, belongs @ np.minimum(rows, 0))) / num_heads

    def top_blocks(self, scores: Array, top: int) -> Array:
        """As specified: a stable sort of a few thousand scores."""
        return top_blocks(scores, top)


def _inline_pieces(
    rows: tuple[Rows, Rows], ranges: Sequence[Range], suffix: Suffix | None, shape: tuple[int, ...]
) -> list[tuple[Floats, Floats]]:
    """K and V of one query row a KV head over few tokens that lie as they are used; else none."""
    plain = suffix is None or suffix.keys.dtype == suffix.values.dtype == np.float32
    num_tokens = sum(end - first for first, end in ranges)
    if shape[1] > 1 or not (plain and rows[0].is_plain and rows[1].is_plain):
        return []
    if len(ranges) > _MOST_PIECES or cost_of(num_tokens, shape) > _INLINE_VECTOR_COST:
        return []
    pieces = [(rows[0].read([one]), rows[1].read([one])) for one in ranges]
    return pieces if suffix is None else [*pieces, (suffix.keys, suffix.values)]


def _weigh_heads(q: Floats, pieces: list[tuple[Floats, Floats]]) -> Running:
    """``q [U, 1, D]`` over K and V ``[U, n, D]``, heads dealt to threads where that pays.

    Heads know nothing of each other: the bytes are the same, however many threads there are.
    """
    num_tokens = sum(keys.shape[1] for keys, _ in pieces)
    num_parts = min(cores(), len(q), int(cost_of(num_tokens, q.shape) / _THREAD_VECTOR_COST))

    def work(heads: slice) -> Running:
        with np.errstate(all="ignore"):
            return weigh_pieces(q[heads], [(keys[heads], values[heads]) for keys, values in pieces])

    if num_parts < 2:
        return work(slice(None))
    each = -(-len(q) // num_parts)
    return Running.of(in_threads([slice(at, at + each) for at in range(0, len(q), each)], work))


def _summed(statistics: Floats, q: Floats) -> Floats:
    """``[H_kv, n_blocks, D]`` times ``[H_kv, D]``, summed over heads: ``[n_blocks]``."""
    products: Floats = np.matmul(statistics, q[:, :, None])[..., 0].sum(axis=0)
    return products


def _tail(job: BlocksJob) -> list[Range]:
    num_tokens = job.prefix.num_tokens
    return [(job.tail_start, num_tokens)] if job.tail_start < num_tokens else []


def _joined_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Ascending ranges, neighbours joined."""
    joined: list[Range] = []
    for first, end in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((first, end))
    return joined
