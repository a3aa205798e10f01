"""What attention over a prefix is asked for: arrays, shapes, and what every kernel offers.

H_q query heads, H_kv KV heads, N tokens of the prefix, M query tokens, S suffix tokens, D head
dimension.  Arrays are numpy's or mlx's; those of one object are of one kind.  numpy knows no
bfloat16: there a bf16 array is its bit patterns, ``uint16``.

A kernel never sees a request as the caller gave it: ``api`` checks it first and makes a job of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError

Array: TypeAlias = Any
"""A numpy or mlx array; the docstring at hand says its shape and types."""

Selector: TypeAlias = Literal["mean", "quest"]

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256, 512)
MAX_HEADS = 1024  # of Q; KV heads are numbered by a byte
MAX_KV_HEADS = 256

# Statistics of a prefix that are kept: one window and block size in use, and one to change to.
_KEPT_STATISTICS = 4


@dataclass(frozen=True)
class Affine:
    """Groups of integers with a scale and a bias each, as ``mx.quantize`` lays them out.

    ``codes`` u32 ``[..., D * bits / 32]``: value j of a word has its bits ``bits * j`` and up;
    ``scales``, ``biases`` f16, bf16 or f32 ``[..., D / group]``; value = code * scale + bias.
    ``bits`` is 4 or 8, ``group`` 32, 64 or 128 and divides D.  mlx4g32 is bits 4, group 32.
    """

    codes: Array
    scales: Array
    biases: Array
    bits: int = 4
    group: int = 32

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, ``[..., D]``."""
        *outer, words = self.codes.shape
        return (*outer, words * 32 // self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases."""
        return int(self.codes.nbytes + self.scales.nbytes + self.biases.nbytes)


Side: TypeAlias = Any
"""One side of a prefix, K or V: an array of f32, f16 or bf16 values, or an ``Affine``."""


@dataclass(frozen=True)
class Prefix:
    """The K and V rows of one layer; immutable, and so are its arrays.

    Without ``table``: ``keys`` and ``values`` ``[H_kv, >= N, D]``, of which the first
    ``num_tokens`` (N) count.  With a block table (paged): ``[pool, H_kv, page, D]``, and token t is
    row ``t % page`` of block ``table[t // page]``; ``table`` is i32 on the host, of at least
    ceil(N / page) entries, each below the pool's size.  Both sides are alike in shape and type.

    ``statistics`` remembers block statistics of the sparse selectors; it is no part of the value.
    """

    keys: Side
    values: Side
    num_tokens: int
    table: NDArray[np.int32] | None = None
    statistics: dict[tuple[str, int, int], BlockStatistics] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def num_kv_heads(self) -> int:
        """H_kv."""
        return int(self.keys.shape[0 if self.table is None else 1])

    @property
    def head_dim(self) -> int:
        """D."""
        return int(self.keys.shape[-1])

    @property
    def page_tokens(self) -> int:
        """Tokens of a block of a paged prefix; N of any other."""
        return self.num_tokens if self.table is None else int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of K and V as they are held; of the whole pool, where there is one."""
        return int(self.keys.nbytes + self.values.nbytes)

    @property
    def is_host(self) -> bool:
        """Whether the arrays are numpy's."""
        return isinstance(_some_array(self.keys), np.ndarray)

    def remember(self, key: tuple[str, int, int], found: BlockStatistics) -> None:
        """Keep statistics under (selector, block tokens, first token); old ones may go."""
        while len(self.statistics) >= _KEPT_STATISTICS:
            self.statistics.pop(next(iter(self.statistics)), None)
        self.statistics[key] = found


def _some_array(side: Side) -> Array:
    return side.codes if isinstance(side, Affine) else side


@dataclass(frozen=True)
class Suffix:
    """K and V ``[H_kv, S, D]`` of tokens behind the prefix; S may be 0."""

    keys: Array
    values: Array

    @property
    def num_tokens(self) -> int:
        """S."""
        return int(self.keys.shape[1])


@dataclass(frozen=True)
class Selection:
    """Which blocks a sparse query attends to: ``top`` of blocks of ``block_tokens``.

    ``selector``: ``mean`` scores a block by q . mean(K) / sqrt(D); ``quest`` by the upper bound
    sum over d of max(q_d * min_d, q_d * max_d).  Raises CommandError for sizes below 1 and for an
    unknown selector.
    """

    block_tokens: int
    top: int
    selector: Selector = "mean"

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.top < 1:
            raise CommandError("sparse selection: block size and K_top must be at least 1")
        if self.selector not in ("mean", "quest"):
            raise CommandError("sparse selection: the selector must be mean or quest")


@dataclass(frozen=True)
class BlockStatistics:
    """What a selector keeps of full blocks: f32 ``[H_kv, n_blocks, D]``.

    Of ``mean``: ``high`` is the mean, ``low`` None.  Of ``quest``: the largest and least values.
    """

    high: Array
    low: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return int(self.high.nbytes + (0 if self.low is None else self.low.nbytes))


@dataclass(frozen=True)
class Attended:
    """What a kernel returns: ``out`` f32 ``[H_q, M, D]`` and ``lse`` f32 ``[H_q, M]``.

    ``lse`` is the natural log of the sum of exp of the scaled scores; -inf where a query saw no
    token, and then its output is 0.  A caller that gave Q as ``[H_q, D]`` gets ``[H_q, D]`` and
    ``[H_q]``.
    """

    out: Array
    lse: Array


@dataclass(frozen=True)
class DenseJob:
    """Each query sees all prefix tokens from ``start`` on, and a suffix causally.

    ``q`` ``[H_q, M, D]`` f32, f16 or bf16, unscaled, M >= 1; ``head_map`` u8 ``[H_q]`` on the
    host, entries below H_kv; 0 <= ``start`` < N.  ``suffix`` None, or at least one token: query m
    sees its positions ``t <= max(0, S - M) + m``.
    """

    q: Array
    prefix: Prefix
    head_map: NDArray[np.uint8]
    start: int = 0
    suffix: Suffix | None = None


@dataclass(frozen=True)
class SparseJob:
    """Query head h sees the prefix tokens ``indices[h, :counts[h]]``, each as often as named.

    ``q`` ``[H_q, D]``; ``indices`` i32 ``[H_q, K]`` and ``counts`` i32 ``[H_q]`` on the host, all
    counted indices within 0 ... N - 1 and within the window; K may be 0.
    """

    q: Array
    prefix: Prefix
    head_map: NDArray[np.uint8]
    indices: NDArray[np.int32]
    counts: NDArray[np.int32]


@dataclass(frozen=True)
class BlocksJob:
    """Every query head sees the same blocks, the tail behind the last full block, and the suffix.

    ``q`` ``[H_q, D]``; ``blocks`` i32 ``[K_top]`` ascending, of the prefix's kind of array: block b
    holds tokens ``start + b * block_tokens`` and up.  The tail is the last
    ``(N - start) % block_tokens`` tokens.  The suffix (None or at least one token) is seen whole.
    """

    q: Array
    prefix: Prefix
    head_map: NDArray[np.uint8]
    blocks: Array
    block_tokens: int
    start: int = 0
    suffix: Suffix | None = None

    @property
    def tail_start(self) -> int:
        """The first token of the tail; N where there is none."""
        num = self.prefix.num_tokens
        return num - (num - self.start) % self.block_tokens


class Kernels(ABC):
    """One implementation of every kernel; stateless, or safe to use from any thread.

    It gets checked jobs whose arrays are of its kind, and returns arrays of its kind: out and lse
    in float32, accumulated in float32, whatever K and V are.  mlx kernels may return lazy arrays.
    A NaN in a row of Q stays in that row of out and lse.
    """

    name: str
    host: bool  # whether its arrays are numpy's

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this implementation cannot run here, in a few words; None where it can."""

    @abstractmethod
    def attend(self, job: DenseJob) -> Attended:
        """Single query, batched queries, and the fusion with a suffix: one softmax over all."""

    @abstractmethod
    def attend_sparse(self, job: SparseJob) -> Attended:
        """Attention to given tokens; out ``[H_q, 1, D]``, lse ``[H_q, 1]``."""

    @abstractmethod
    def attend_blocks(self, job: BlocksJob) -> Attended:
        """Attention to selected blocks, tail and suffix; out ``[H_q, 1, D]``, lse ``[H_q, 1]``."""

    @abstractmethod
    def block_statistics(
        self, prefix: Prefix, block_tokens: int, start: int, selector: Selector
    ) -> BlockStatistics:
        """Statistics of the ``(N - start) // block_tokens`` full blocks from ``start`` on."""

    @abstractmethod
    def block_scores(
        self, q: Array, statistics: BlockStatistics, head_map: NDArray[np.uint8]
    ) -> Array:
        """Scores f32 ``[n_blocks]``, averaged over the query heads of ``q [H_q, D]``.

        A head whose q is not finite counts 0: it may not decide what the other heads see.
        """

    @abstractmethod
    def top_blocks(self, scores: Array, top: int) -> Array:
        """The ``top`` ids of the greatest scores, ascending, i32; the lower id wins a tie."""
