"""Attention on a GPU: jobs become launches of the kernels, the same for Metal and CUDA.

``device_plan`` says which kernel and how the keys are cut, ``device_source`` what a launch is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.device_plan import (
    MOST_CHOSEN,
    Inputs,
    Parts,
    Query,
    Way,
    parts_of,
    row_tiles,
    sharing_of,
    way_of,
)
from pion_vllm_mlx.kernels.device_source import Kind, Launch, Runner
from pion_vllm_mlx.kernels.problem import (
    Affine,
    Array,
    Attended,
    BestBlocksJob,
    BlocksJob,
    BlockStatistics,
    DenseJob,
    Kernels,
    Prefix,
    Selector,
    Side,
    SparseJob,
)

_SIMD = 32
_SCORED = 8  # blocks that a threadgroup scores at once: kScored of the texts
_MIN_TABLE = 8  # a shorter table would lie in another address space

Outputs = tuple[tuple[str, tuple[int, ...], Kind], ...]


def _side_inputs(name: str, side: Side) -> Inputs:
    if isinstance(side, Affine):
        return (
            (f"{name}_codes", side.codes),
            (f"{name}_scales", side.scales),
            (f"{name}_biases", side.biases),
        )
    return ((f"{name}s", side),)


def _side_macro(name: str, side: Side) -> tuple[str, str]:
    macro = f"{name.upper()}S"
    if isinstance(side, Affine):
        arguments = f"{name}_codes, {name}_scales, {name}_biases"
        return macro, f"affine<D, {side.bits}, {side.group}>({arguments})"
    return macro, f"plain<D>({name}s)"


@dataclass(frozen=True)
class TokenLists:
    """i32 ``[H_q, 1 + K]``: how many tokens a head sees, then their numbers; the longest's many."""

    lists: Array
    longest: int


class DeviceKernels(Kernels):
    """Every kernel, on the device of a runner."""

    host = False

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.name = runner.dialect.name
        self._tiles = lru_cache(maxsize=32)(self._make_tiles)
        self._numbers = lru_cache(maxsize=1024)(self._make_numbers)
        self._members = lru_cache(maxsize=64)(self._make_members)

    def unavailable(self) -> str | None:
        """None: a runner that exists runs."""
        return None

    def attend(self, job: DenseJob) -> Attended:
        """Every row sees the prefix from ``start`` on, and the suffix causally."""
        visible = job.prefix.num_tokens - job.start
        suffix = None if job.suffix is None else (job.suffix.keys, job.suffix.values)
        return self._attend(Query(job.q, job.prefix, job.head_map, job.start, visible, suffix))

    def attend_sparse(self, job: SparseJob) -> Attended:
        """Each head sees its listed tokens."""
        lists = self.token_lists(job.indices, job.counts)
        return self.attend_listed(job.q, job.prefix, job.head_map, lists)

    def token_lists(self, indices: NDArray[np.int32], counts: NDArray[np.int32]) -> TokenLists:
        """The lists of a ``SparseJob`` where the kernels read them."""
        num_heads, width = (int(n) for n in indices.shape)
        lists = np.zeros((num_heads, max(_MIN_TABLE, 1 + width)), dtype=np.int32)
        lists[:, 0] = counts
        lists[:, 1 : 1 + width] = indices
        return TokenLists(self.runner.given(lists), int(counts.max(initial=0)))

    def attend_listed(
        self, q: Array, prefix: Prefix, head_map: NDArray[np.uint8], lists: TokenLists
    ) -> Attended:
        """Each head sees the tokens of its list."""
        return self._attend(
            Query(
                *(q, prefix, head_map, 0, lists.longest),
                tokens=1,
                extra=(("lists", lists.lists),),
                list_width=int(lists.lists.shape[1]),
            )
        )

    def attend_blocks(self, job: BlocksJob) -> Attended:
        """All heads see the blocks, the tail and the suffix."""
        top = int(job.blocks.shape[0])
        if top == 0:  # nothing but the tail, which is a run
            return self.attend(
                DenseJob(job.q, job.prefix, job.head_map, job.tail_start, job.suffix)
            )
        return self._attend_blocks(job, top, tokens=2, extra=(("blocks", job.blocks),))

    def attend_best_blocks(self, job: BestBlocksJob) -> Attended:
        """Two launches: scores, and attention whose threadgroups choose the blocks themselves."""
        if not 0 < job.top <= min(MOST_CHOSEN, int(job.statistics.high.shape[1])):
            return super().attend_best_blocks(job)
        return self.attend_scored(job, self.block_scores(job.q, job.statistics, job.head_map))

    def attend_scored(self, job: BestBlocksJob, scores: Array) -> Attended:
        """Attention to the blocks of the greatest ``scores`` f32 ``[n_blocks]``.

        At most ``MOST_CHOSEN`` of them; the lower id wins a tie, what is not a number comes last.
        """
        num_blocks = int(scores.shape[0])
        return self._attend_blocks(
            job, job.top, tokens=3, extra=(("scores", scores),), num_blocks=num_blocks
        )

    def _attend_blocks(self, job: BlocksJob | BestBlocksJob, top: int, **how: Any) -> Attended:
        tail = (job.prefix.num_tokens - job.start) % job.block_tokens
        return self._attend(
            Query(
                *(job.q, job.prefix, job.head_map, job.start),
                top * job.block_tokens + tail,
                None if job.suffix is None else (job.suffix.keys, job.suffix.values),
                block_tokens=job.block_tokens,
                top=top,
                **how,
            )
        )

    def block_statistics(
        self, prefix: Prefix, block_tokens: int, start: int, selector: Selector
    ) -> BlockStatistics:
        """Means, or largest and least values, of the full blocks from ``start`` on."""
        heads, dim = prefix.num_kv_heads, prefix.head_dim
        num_blocks = (prefix.num_tokens - start) // block_tokens
        quest = selector == "quest"
        shape = (heads, num_blocks, dim)
        outputs: Outputs = (("high", shape, "f32"), ("low", shape, "f32"))
        found = self.runner.run(
            Launch(
                "block_statistics",
                (
                    _side_macro("key", prefix.keys),
                    ("PAGED", str(int(prefix.table is not None))),
                    ("QUEST", str(int(quest))),
                ),
                (("D", dim),),
                (
                    (
                        "params",
                        self._params(prefix, start, (1, 1, 0), (0, 1, 0, block_tokens, num_blocks)),
                    ),
                    *_side_inputs("key", prefix.keys),
                    *self._table(prefix),
                ),
                outputs if quest else outputs[:1],
                (num_blocks, heads, 1),
                _SIMD,
            )
        )
        self.runner.settle(found)  # they are kept: not the keys for their sake
        return BlockStatistics(found[0], found[1] if quest else None)

    def block_scores(
        self, q: Array, statistics: BlockStatistics, head_map: NDArray[np.uint8]
    ) -> Array:
        """Scores of the blocks, averaged over the query heads."""
        heads, num_blocks, dim = (int(n) for n in statistics.high.shape)
        low = statistics.low
        packed = head_map.tobytes()
        each = sharing_of(packed, heads)
        numbers = self._numbers(
            0, 0, 0, heads, 1, 1, 0, 0, len(head_map), 0, 1, num_blocks, 0, each
        )
        return self.runner.run(
            Launch(
                "block_scores",
                (("QUEST", str(int(low is not None))), ("GROUPED", str(int(each > 0)))),
                (("D", dim),),
                (
                    ("params", numbers),
                    *(() if each else (("members", self._members(packed, heads)),)),
                    ("queries", q),
                    ("high", statistics.high),
                    *(() if low is None else (("low", low),)),
                ),
                (("scores", (num_blocks,), "f32"),),
                (-(-num_blocks // _SCORED), 1, 1),
                _SCORED * _SIMD,
            )
        )[0]

    def top_blocks(self, scores: Array, top: int) -> Array:
        """The ids of the greatest scores, ascending."""
        num_blocks = int(scores.shape[0])
        top = min(top, num_blocks)
        params = self._numbers(0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, num_blocks, top)
        groups = (-(-num_blocks // 4), 1, 1)
        ranks = self.runner.run(
            Launch(
                *("block_ranks", (), ()),
                (("params", params), ("scores", scores)),
                (("ranks", (num_blocks,), "i32"),),
                groups,
                4 * _SIMD,
            )
        )[0]
        return self.runner.run(
            Launch(
                *("block_choice", (), ()),
                (("params", params), ("ranks", ranks)),
                (("chosen", (top,), "i32"),),
                groups,
                4 * _SIMD,
            )
        )[0]

    def _attend(self, query: Query) -> Attended:
        way = way_of(self.runner.dialect, query)
        grouped = query.sharing > 0 and not way.named_tiles
        if grouped:
            num_tiles = query.prefix.num_kv_heads * -(-query.sharing // way.rows)
            tiles: Inputs = ()
        else:
            table, num_tiles = self._tiles(query.head_map.tobytes(), query.num_queries, way.rows)
            tiles = (("tiles", table),)
        parts = parts_of(self.runner.dialect, num_tiles, query, way)
        inputs = (("params", self._query_params(query, parts)), *tiles, *self._query_inputs(query))
        shape, dim = tuple(query.q.shape), query.prefix.head_dim
        merge = way.merges and parts.total > 1
        scratch: Outputs = ()
        if merge:
            scratch = (("parts", (math.prod(shape[:-1]), parts.total, dim + 4), "f32"),)
            inputs += (("counters", self.runner.counters(num_tiles)),)
        split = shape if merge or parts.total == 1 else (*shape[:-1], parts.total, dim)
        names = ("out", "lse") if way.merges else ("part_out", "part_lse")
        out, lse, *_ = self.runner.run(
            Launch(
                way.kernel,
                self._query_macros(query, way, grouped, merge),
                way.template,
                inputs,
                ((names[0], split, "f32"), (names[1], split[:-1], "f32"), *scratch),
                (num_tiles, parts.total, 1),
                way.simdgroups * _SIMD,
                ("counters", "parts") if merge else (),
            )
        )
        return Attended(out, lse) if split == shape else self._merge(out, lse, shape)

    def _query_macros(
        self, query: Query, way: Way, grouped: bool, merge: bool
    ) -> tuple[tuple[str, str], ...]:
        prefix = query.prefix
        return (
            _side_macro("key", prefix.keys),
            _side_macro("value", prefix.values),
            ("PAGED", str(int(prefix.table is not None))),
            ("SUFFIX", str(int(query.suffix is not None))),
            ("TOKENS", str(query.tokens)),
            ("GROUPED", str(int(grouped))),
            ("WHOLE", str(int(way.whole))),
            *((("MERGE", str(int(merge))),) if way.merges else ()),
        )

    def _query_inputs(self, query: Query) -> Inputs:
        prefix, suffix = query.prefix, query.suffix
        return (
            ("queries", query.q),
            *_side_inputs("key", prefix.keys),
            *_side_inputs("value", prefix.values),
            *self._table(prefix),
            *((("suffix_keys", suffix[0]), ("suffix_values", suffix[1])) if suffix else ()),
            *query.extra,
        )

    def _merge(self, part_out: Array, part_lse: Array, shape: tuple[int, ...]) -> Attended:
        params = self._numbers(0, 0, 0, 0, int(part_lse.shape[-1]))
        out, lse = self.runner.run(
            Launch(
                *("merge", (), (("D", shape[-1]),)),
                (("params", params), ("part_out", part_out), ("part_lse", part_lse)),
                (("out", shape, "f32"), ("lse", shape[:-1], "f32")),
                (math.prod(shape[:-1]), 1, 1),
                shape[-1],
            )
        )
        return Attended(out, lse)

    def _query_params(self, query: Query, parts: Parts) -> Array:
        return self._params(
            query.prefix,
            query.start,
            (parts.total, parts.prefix, parts.chunk),
            (
                *(query.suffix_tokens, query.num_queries, query.list_width),
                *(query.block_tokens, query.num_blocks, query.top, query.sharing),
            ),
        )

    def _params(
        self, prefix: Prefix, start: int, parts: Sequence[int], rest: Sequence[int]
    ) -> Array:
        paged = prefix.table is not None
        stride = prefix.page_tokens if paged else int(prefix.keys.shape[1])
        return self._numbers(prefix.num_tokens, start, stride, prefix.num_kv_heads, *parts, *rest)

    def _table(self, prefix: Prefix) -> Inputs:
        if prefix.table is None:
            return ()
        table = np.zeros(max(_MIN_TABLE, len(prefix.table)), dtype=np.int32)
        table[: len(prefix.table)] = prefix.table
        return (("table", self.runner.given(table)),)

    def _make_numbers(self, *numbers: int) -> Array:
        packed = np.zeros(16, dtype=np.int32)
        packed[: len(numbers)] = numbers
        return self.runner.constant(packed)

    def _make_tiles(self, head_map: bytes, num_queries: int, rows: int) -> tuple[Array, int]:
        tiles = row_tiles(np.frombuffer(head_map, dtype=np.uint8), num_queries, rows)
        return self.runner.constant(tiles), len(tiles)

    def _make_members(self, head_map: bytes, num_kv_heads: int) -> Array:
        heads = np.frombuffer(head_map, dtype=np.uint8)
        ends = np.cumsum(np.bincount(heads, minlength=num_kv_heads))
        offsets = np.concatenate([[0], ends]) + num_kv_heads + 1
        return self.runner.constant(
            np.concatenate([offsets, np.argsort(heads, kind="stable")]).astype(np.int32)
        )
