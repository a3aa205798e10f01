"""How a device attends: which kernel, in tiles of how many rows, keys cut into how many parts.

The keys of a query are cut into parts so that a launch fills the device; a second launch merges
the parts, unless the threadgroup that ends last does.  Few query rows of a KV head split the keys
among the threads (``few_rows``; ``group_rows`` on CUDA's tensor cores), many share tiles of keys in
threadgroup memory (``many_rows``; ``tensor_rows`` on CUDA's tensor cores).  Few rows over few keys
(what sparse attention sees) are one launch: a second one takes longer than what it would save.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.device_source import Dialect, kind_of
from pion_vllm_mlx.kernels.problem import Affine, Array, Prefix, Side

MANY_ROWS = 16  # query rows of a tile of many_rows
TENSOR_ROWS = 64  # and of tensor_rows
GROUP_ROWS = 8  # and of group_rows, at most
MOST_CHOSEN = 32  # blocks that few_rows chooses by itself: kMostChosen of the texts
_GROUP_STEP = 16  # keys that a warp of group_rows takes at once
_STEP = 64  # parts begin at multiples of this many keys
_WHOLE_VALUES = 6144  # f32 values of partial results in threadgroup memory, 24 KB

Inputs = tuple[tuple[str, Array], ...]


@dataclass(frozen=True)
class Parts:
    """How keys are cut: ``prefix`` parts of ``chunk`` keys, then ``suffix`` parts."""

    prefix: int
    suffix: int
    chunk: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.prefix + self.suffix


@dataclass(frozen=True)
class Query:
    """What the kernels of one job have in common.

    ``visible``: keys of the prefix that a query row visits; ``tokens`` says which: 0 a run, 1 a
    list a head, 2 blocks, 3 the ``top`` best of ``num_blocks`` blocks by given scores.
    """

    q: Array
    prefix: Prefix
    head_map: NDArray[np.uint8]
    start: int
    visible: int
    suffix: tuple[Array, Array] | None = None
    tokens: int = 0
    extra: Inputs = ()
    list_width: int = 0
    block_tokens: int = 1
    num_blocks: int = 0
    top: int = 0

    @property
    def sharing(self) -> int:
        """Query rows of each KV head, neighbours; 0 where the head map is no such map."""
        return sharing_of(self.head_map.tobytes(), self.prefix.num_kv_heads) * self.num_queries

    @property
    def num_queries(self) -> int:
        """M."""
        return 1 if len(self.q.shape) == 2 else int(self.q.shape[1])

    @property
    def suffix_tokens(self) -> int:
        """S; 0 without a suffix."""
        return 0 if self.suffix is None else int(self.suffix[0].shape[1])


@dataclass(frozen=True)
class Way:
    """A kernel of attention, the query rows of its tile, and its template.

    ``whole``: all keys are one part; ``merges``: the kernel merges its parts itself.
    """

    kernel: str
    rows: int
    template: tuple[tuple[str, int], ...]
    simdgroups: int
    whole: bool = False
    merges: bool = False

    @property
    def named_tiles(self) -> bool:
        """Whether the rows of a tile must come from a table: elsewhere it costs fewer registers."""
        return self.kernel != "group_rows" and not self.whole


def fits_tensors(query: Query) -> bool:
    """Whether tensor cores multiply these rows without losing more than float32 does.

    Two bf16 parts hold a wider q; two fp16 parts would overflow where q does not.
    """
    arrays = (query.prefix.keys, *(query.suffix or ())[:1])
    if any(isinstance(array, Affine) for array in arrays):
        return False
    q = kind_of(query.q)
    return all(kind_of(array) in ("bf16", q) and kind_of(array) != "f32" for array in arrays)


def row_tiles(head_map: NDArray[np.uint8], num_queries: int, rows: int) -> NDArray[np.int32]:
    """i32 ``[tiles, 1 + rows]``: a KV head and the rows ``h * M + m`` that read it, -1 for none."""
    heads = np.repeat(head_map.astype(np.int64), num_queries)
    order = np.argsort(heads, kind="stable")
    counts = np.bincount(heads)
    tiles_of = -(-counts // rows)
    first_tile = np.cumsum(tiles_of) - tiles_of
    place = np.arange(len(heads)) - np.repeat(np.cumsum(counts) - counts, counts)
    tile = first_tile[heads[order]] + place // rows
    tiles = np.full((int(tiles_of.sum()), 1 + rows), -1, dtype=np.int32)
    tiles[tile, 0] = heads[order]
    tiles[tile, 1 + place % rows] = order
    return tiles


def lanes_of_key(head_dim: int, thread_values: int) -> int:
    """Threads that share a key in few_rows: the fewest that hold ``thread_values`` each at most."""
    possible = [lanes for lanes in (8, 16, 32) if head_dim % (4 * lanes) == 0]
    enough = [lanes for lanes in possible if head_dim // lanes <= thread_values]
    return enough[0] if enough else possible[-1]


def way_of(dialect: Dialect, query: Query) -> Way:
    """The kernel for a query, and its tile."""
    dim = query.prefix.head_dim
    if query.tokens == 0 and _sharing_rows(query) > dialect.few_rows:
        if dim <= dialect.tensor_dim and fits_tensors(query):
            return Way("tensor_rows", TENSOR_ROWS, (("D", dim),), 4)
        slices = ("SLICE", 64 if dim % 64 == 0 else 32)
        return Way("many_rows", MANY_ROWS, (("D", dim), slices), 4)
    if dialect.merges and dim <= dialect.tensor_dim and fits_tensors(query):
        rows = min(GROUP_ROWS, _sharing_rows(query))
        template = (("D", dim), ("R", rows), ("SIMDGROUPS", dialect.group_warps))
        return Way("group_rows", rows, template, dialect.group_warps, merges=True)
    if query.visible + query.suffix_tokens <= dialect.whole_keys:
        return _whole_way(dialect, query)
    lanes = lanes_of_key(dim, dialect.thread_values)
    rows = _few_rows(dialect, dim // (4 * lanes), _sharing_rows(query))
    return _few_way(dialect, query, rows, dialect.simdgroups, 4)


def _whole_way(dialect: Dialect, query: Query) -> Way:
    """All keys in one part: more threads for them, and fewer rows where threadgroups are few."""
    dim = query.prefix.head_dim
    quads = dim // (4 * lanes_of_key(dim, dialect.thread_values))
    most, rows = _few_rows(dialect, quads, _sharing_rows(query)), 1
    while rows < most and len(query.head_map) * query.num_queries > rows * dialect.whole_tiles:
        rows *= 2
    simdgroups = dialect.whole_simdgroups
    while simdgroups > 1 and simdgroups * rows * dim > _WHOLE_VALUES:
        simdgroups //= 2
    unroll = min(dialect.whole_unroll, max(1, 2 * dialect.whole_unroll // quads))
    return replace(_few_way(dialect, query, rows, simdgroups, unroll), whole=True)


def _few_way(dialect: Dialect, query: Query, rows: int, simdgroups: int, most: int) -> Way:
    """few_rows with tiles of ``rows``, at most ``most`` keys of a thread under way."""
    dim = query.prefix.head_dim
    lanes = lanes_of_key(dim, dialect.thread_values)
    template = (
        *(("D", dim), ("R", rows), ("LANES", lanes)),
        ("SIMDGROUPS", simdgroups),
        ("UNROLL", min(most, _unroll(dialect, rows, query.prefix.keys))),
    )
    return Way("few_rows", rows, template, simdgroups, merges=dialect.merges)


def parts_of(dialect: Dialect, num_tiles: int, query: Query, way: Way) -> Parts:
    """Parts that fill the device and are not too short; a suffix has parts of its own."""
    if way.whole:
        return Parts(1, 0, max(query.visible, query.suffix_tokens))
    groups = way.kernel == "group_rows"
    least = dialect.group_keys if groups else dialect.part_keys
    wanted = max(1, (dialect.group_blocks if groups else dialect.threadgroups) // num_tiles)
    wanted = min(wanted, -(-query.visible // least))
    step = min(least, _GROUP_STEP * dialect.group_warps) if groups else _STEP
    chunk = -(-query.visible // max(1, wanted))
    if way.merges:  # weights of all parts lie where the values of the warps did
        most = way.simdgroups * query.prefix.head_dim - 2
        chunk = max(chunk, -(-(query.visible + query.suffix_tokens) // most))
    chunk = max(step, -(-chunk // step) * step)
    return Parts(max(1, -(-query.visible // chunk)), -(-query.suffix_tokens // chunk), chunk)


def _sharing_rows(query: Query) -> int:
    """Query rows that can share a key: lists of tokens share none."""
    return 1 if query.tokens == 1 else _most_sharing(query.head_map.tobytes()) * query.num_queries


@lru_cache(maxsize=64)
def _most_sharing(head_map: bytes) -> int:
    """Query heads of the KV head that has most."""
    return int(np.bincount(np.frombuffer(head_map, dtype=np.uint8)).max())


@lru_cache(maxsize=64)
def sharing_of(head_map: bytes, num_kv_heads: int) -> int:
    """Query heads of each KV head where all have as many, one's behind another's; else 0."""
    heads = np.frombuffer(head_map, dtype=np.uint8)
    each, left = divmod(len(heads), num_kv_heads)
    if left or not np.array_equal(heads, np.repeat(np.arange(num_kv_heads), each)):
        return 0
    return each


def _few_rows(dialect: Dialect, quads: int, per_head: int) -> int:
    """Rows of a tile of few_rows: at most 4, and as many as the registers hold."""
    rows = 1
    while rows < min(per_head, 4) and 2 * rows * quads <= dialect.row_quads:
        rows *= 2
    return rows


def _unroll(dialect: Dialect, rows: int, side: Side) -> int:
    """Keys of a thread under way at once: fewer, the more registers the rows take."""
    width = 2 if not isinstance(side, Affine) and kind_of(side) == "f32" else 1
    return max(1, dialect.unroll // (rows * width))
