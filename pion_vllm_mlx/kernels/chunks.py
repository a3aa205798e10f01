"""Tokens cut into chunks, and the softmax of queries over chunk after chunk.

The chunks are dealt to a fixed number of strips. A strip runs through its chunks with a running
maximum, sum and output, as flash attention does; the strips' results are added up in order. The
cut depends on the shapes alone, never on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.heads import HeadGroups
from pion_vllm_mlx.kernels.host import Range, Rows
from pion_vllm_mlx.kernels.problem import Suffix
from pion_vllm_mlx.kernels.threads import in_threads
from pion_vllm_mlx.kernels.weighing import Running, weigh, weigh_codes
from pion_vllm_mlx.kernels.widening import Floats

# Bytes of float32 keys in a chunk: widened ones have to stay in a core's cache, views need not.
_WIDENED_BYTES = 512 * 1024
_PLAIN_BYTES = 4 * 1024 * 1024
_SCORE_VALUES = 512 * 1024
LEAST_TOKENS = 128  # a multiple of every tile
_STRIPS = 16
# Up to so many query rows of a KV head quantized rows are attended to as codes.
_CODES_ROWS = 4
# Below this a thread costs more than it saves: about a tenth of a millisecond.
_INLINE_COST = 512 * 1024

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

    @property
    def hidden(self) -> NDArray[np.bool_] | None:
        """What query rows do not see of it, ``[1, R, n]``; None where they see all."""
        if self.last_seen is None:
            return None
        ((first, end),) = self.ranges
        if end - 1 <= self.last_seen.min():
            return None
        return (np.arange(first, end) > self.last_seen[:, None])[None]


def attend_chunks(queries: Sequence[Floats], chunks: Sequence[Chunk]) -> list[Running]:
    """Each ``q [U, R, D]`` (scaled), of one shape, over its chunk; rows shared are read once."""
    found: list[Running] = []
    before: Chunk | None = None
    for q, chunk in zip(queries, chunks, strict=True):
        coded = chunk.keys.is_quantized and q.shape[1] <= _CODES_ROWS
        if before is None or chunk.keys is not before.keys or chunk.ranges != before.ranges:
            if coded:
                codes = chunk.keys.codes(chunk.ranges), chunk.values.codes(chunk.ranges)
            else:
                rows = chunk.keys.read(chunk.ranges), chunk.values.read(chunk.ranges)
            before = chunk
        found.append(weigh_codes(q, *codes) if coded else weigh(q, *rows, chunk.hidden))
    return found


def in_strips(
    items: Sequence[Item], work: Callable[[Item], list[Running]], cost: float
) -> list[Running]:
    """The sums of ``work`` over ``items``, in threads where the ``cost`` is worth it."""
    each = -(-len(items) // _STRIPS)
    strips = [items[at : at + each] for at in range(0, len(items), each)]

    def run(strip: Sequence[Item]) -> list[Running]:
        with np.errstate(all="ignore"):
            found = work(strip[0])
            for item in strip[1:]:
                _add(found, work(item))
            return found

    results = [run(one) for one in strips] if cost < _INLINE_COST else in_threads(strips, run)
    with np.errstate(all="ignore"):
        for other in results[1:]:
            _add(results[0], other)
    return results[0]


def _add(sums: list[Running], others: list[Running]) -> None:
    for mine, other in zip(sums, others, strict=True):
        mine.add(other)


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
    return left // LEAST_TOKENS * LEAST_TOKENS or left


def tokens_of_chunk(rows: Rows, shape: tuple[int, ...]) -> int:
    """How many tokens fit a chunk for queries of ``shape`` (U, R, D)."""
    num_groups, num_rows, dim = shape
    row_bytes = 4 * num_groups * dim
    by_bytes = (_PLAIN_BYTES if rows.is_plain else _WIDENED_BYTES) // row_bytes
    by_scores = _SCORE_VALUES // (num_groups * num_rows)
    return max(LEAST_TOKENS, min(by_bytes, by_scores) // LEAST_TOKENS * LEAST_TOKENS)


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
