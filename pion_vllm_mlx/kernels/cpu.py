"""The kernels on the processor: BLAS products over chunks of tokens, split over threads.

The tokens that a request sees are cut into chunks, see ``chunks``.  A short query over plain rows
is not cut at tokens; its heads are dealt to threads.  Several queries over one prefix go through
its chunks together, each with products and sums of its own: equal requests give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.chunks import (
    LEAST_TOKENS,
    Chunk,
    attend_chunks,
    chunks_of,
    cost_of,
    in_strips,
    suffix_chunks,
    tokens_of_chunk,
)
from pion_vllm_mlx.kernels.heads import HeadGroups, head_groups
from pion_vllm_mlx.kernels.host import Range, Sides, joined_ranges
from pion_vllm_mlx.kernels.problem import (
    Array,
    Attended,
    BlocksJob,
    BlockStatistics,
    DenseJob,
    Kernels,
    Prefix,
    Repeated,
    Selector,
    SparseJob,
    Suffix,
    with_queries,
)
from pion_vllm_mlx.kernels.reference import top_blocks
from pion_vllm_mlx.kernels.threads import cores, in_threads
from pion_vllm_mlx.kernels.weighing import Running, weigh, weigh_pieces
from pion_vllm_mlx.kernels.widening import Floats, widened

# Of gathered rows: threads that take turns at short pieces wait for the interpreter's lock.
_TAKEN_BYTES = 2 * 1024 * 1024
# Products with a vector are not cut at tokens below this, and a thread takes heads for this much.
_INLINE_VECTOR_COST = 4 * 1024 * 1024
_THREAD_VECTOR_COST = 1024 * 1024
_MOST_PIECES = 16


class Grouped:
    """The query rows of each KV head, scaled: ``rows [U, G * M, D]``, and the way back."""

    def __init__(self, q: Array, groups: HeadGroups) -> None:
        self.groups = groups
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
        return _attended([_laid_out(job, _sides_of(job), ranges)])[0]

    def attend_each(self, jobs: Sequence[DenseJob]) -> list[Attended]:
        """Those that are cut alike go through the chunks of the prefix side by side."""
        first = jobs[0]
        ranges = [(first.start, first.prefix.num_tokens)]
        sides = _sides_of(first)
        layouts = [_laid_out(job, sides, ranges) for job in jobs]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, one in enumerate(layouts):
            key = (one.grouped.rows.shape, len(one.chunks))
            alike.setdefault(key, []).append(number)
        found: dict[int, Attended] = {}
        for numbers in alike.values():
            results = _attended([layouts[number] for number in numbers])
            found.update(zip(numbers, results, strict=True))
        return [found[number] for number in range(len(jobs))]

    def repeated(self, job: DenseJob) -> Repeated:
        """With groups of heads, pieces and chunks as they are."""
        ranges = [(job.start, job.prefix.num_tokens)]
        before = _laid_out(replace(job, suffix=None), _sides_of(job), ranges)
        groups = before.grouped.groups

        def attend(q: Array, suffix: Suffix | None) -> Attended:
            if suffix is not None and before.pieces and not _is_plain(suffix):
                return self.attend(replace(job, q=q, suffix=suffix))
            grouped = Grouped(q, groups)
            if suffix is None:
                return _attended([replace(before, grouped=grouped)])[0]
            return _attended([before.beside(grouped, suffix)])[0]

        return attend

    def attend_blocks(self, job: BlocksJob) -> Attended:
        """The selected blocks and the tail, gathered into chunks, and the suffix."""
        size = job.block_tokens
        starts = (job.start + block * size for block in job.blocks.tolist())
        ranges = joined_ranges([*((at, at + size) for at in starts), *_tail(job)])
        return _attended([_laid_out(job, _sides_of(job), ranges)])[0]

    def attend_sparse(self, job: SparseJob) -> Attended:
        """Tokens gathered a head, in chunks of columns of the index."""
        num_heads, dim = job.q.shape
        width = job.indices.shape[1]
        if width == 0:
            zeros = np.zeros((num_heads, dim), np.float32)
            return Attended(zeros, np.full(num_heads, -np.inf, np.float32))
        q = (widened(job.q) * np.float32(1 / math.sqrt(dim)))[:, None]
        kv_heads = job.head_map.astype(np.intp)[:, None]
        sides = Sides.of(job.prefix)

        def work(columns: Range) -> list[Running]:
            first, end = columns
            tokens = job.indices[:, first:end].astype(np.intp)
            unused = np.arange(first, end) >= job.counts[:, None]
            tokens[unused] = 0
            rows = sides.rows_of(tokens)
            found_keys, found_values = (
                side.take(kv_heads, rows) for side in (sides.keys, sides.values)
            )
            hidden = unused[:, None] if unused.any() else None
            return [weigh(q, found_keys, found_values, hidden)]

        step = max(LEAST_TOKENS, _TAKEN_BYTES // (4 * num_heads * dim))
        columns = [(at, min(width, at + step)) for at in range(0, width, step)]
        (running,) = in_strips(columns, work, cost_of(width, q.shape))
        with np.errstate(all="ignore"):
            return Attended(*running.finished()).shaped(job.q.shape)

    def block_statistics(
        self, prefix: Prefix, block_tokens: int, start: int, selector: Selector
    ) -> BlockStatistics:
        """Blocks reduced in runs that fit the cache."""
        num_heads, dim = prefix.num_kv_heads, prefix.head_dim
        end = start + (prefix.num_tokens - start) // block_tokens * block_tokens
        sides = Sides.of(prefix)
        rows = sides.keys
        step = max(1, tokens_of_chunk(rows, (num_heads, 1, dim)) // block_tokens) * block_tokens
        reductions = [np.mean] if selector == "mean" else [np.max, np.min]

        def work(first: int) -> list[Floats]:
            read = rows.read(sides.located([(first, min(end, first + step))]))
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


@dataclass(frozen=True)
class _Layout:
    """A query and what it sees: a few pieces of K and V that are not cut, else chunks."""

    grouped: Grouped
    pieces: Sequence[tuple[Floats, Floats]]
    chunks: Sequence[Chunk]

    def beside(self, grouped: Grouped, suffix: Suffix) -> _Layout:
        """The same of a query of the same shape, and a suffix."""
        if self.pieces:
            return _Layout(grouped, [*self.pieces, (suffix.keys, suffix.values)], ())
        more = suffix_chunks(suffix, grouped.groups, grouped.rows.shape, grouped.num_queries)
        return _Layout(grouped, (), [*self.chunks, *more])


def _sides_of(job: DenseJob | BlocksJob) -> Sides:
    """Both sides of the prefix, of the heads that are used."""
    return Sides.of(job.prefix, head_groups(job.head_map, job.prefix.num_kv_heads).used)


def _laid_out(job: DenseJob | BlocksJob, sides: Sides, ranges: Sequence[Range]) -> _Layout:
    """The query and its chunks: those of ``ranges`` of the prefix, and of the suffix."""
    grouped = Grouped(job.q, head_groups(job.head_map, job.prefix.num_kv_heads))
    shape, places = grouped.rows.shape, sides.located(ranges)
    pieces = _inline_pieces(sides, places, job.suffix, shape)
    chunks = () if pieces else chunks_of((sides.keys, sides.values), places, shape)
    found = _Layout(grouped, pieces, chunks)
    return found if job.suffix is None else found.beside(grouped, job.suffix)


def _attended(layouts: Sequence[_Layout]) -> list[Attended]:
    """The results of queries of one shape, with equally many chunks."""
    if layouts[0].pieces:
        return [one.grouped.returned(_weigh_heads(one.grouped.rows, one.pieces)) for one in layouts]
    queries = [one.grouped.rows for one in layouts]
    side_by_side = list(zip(*(one.chunks for one in layouts), strict=True))
    num_tokens = sum(end - first for one in layouts[0].chunks for first, end in one.ranges)
    running = in_strips(
        side_by_side,
        lambda chunks: attend_chunks(queries, chunks),
        len(layouts) * cost_of(num_tokens, queries[0].shape),
    )
    return [one.grouped.returned(each) for one, each in zip(layouts, running, strict=True)]


def _inline_pieces(
    sides: Sides, ranges: Sequence[Range], suffix: Suffix | None, shape: tuple[int, ...]
) -> list[tuple[Floats, Floats]]:
    """K and V of one query row a KV head over few tokens that lie as they are used; else none."""
    plain = suffix is None or _is_plain(suffix)
    num_tokens = sum(end - first for first, end in ranges)
    if shape[1] > 1 or not (plain and sides.is_plain):
        return []
    if len(ranges) > _MOST_PIECES or cost_of(num_tokens, shape) > _INLINE_VECTOR_COST:
        return []
    return [(sides.keys.read([one]), sides.values.read([one])) for one in ranges]


def _is_plain(suffix: Suffix) -> bool:
    return bool(suffix.keys.dtype == suffix.values.dtype == np.float32)


def _weigh_heads(q: Floats, pieces: Sequence[tuple[Floats, Floats]]) -> Running:
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
