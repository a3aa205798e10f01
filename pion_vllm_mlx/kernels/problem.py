"""What attention over a prefix is asked for: arrays, shapes, and what every kernel offers.

H_q query heads, H_kv KV heads, N tokens of the prefix, M query tokens, S suffix tokens, D head
dimension.  Arrays are numpy's or mlx's; those of one object are of one kind.  numpy knows no
bfloat16: there a bf16 array is its bit patterns, ``uint16``.

A kernel never sees a request as the caller gave it: ``api`` checks it first and makes a job of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels.prefix import (
    HEAD_DIMS,
    MAX_HEADS,
    MAX_KV_HEADS,
    Affine,
    Array,
    BlockStatistics,
    Prefix,
    Side,
    Suffix,
)

__all__ = [
    "HEAD_DIMS",
    "MAX_HEADS",
    "MAX_KV_HEADS",
    "Affine",
    "Array",
    "Attended",
    "BestBlocksJob",
    "BlockStatistics",
    "BlocksJob",
    "DenseJob",
    "Kernels",
    "Prefix",
    "Repeated",
    "Selection",
    "Selector",
    "Side",
    "SparseJob",
    "Suffix",
]

Selector: TypeAlias = Literal["mean", "quest"]


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
class Attended:
    """What a kernel returns: ``out`` f32 in the shape of Q, ``lse`` f32 in that less its last axis.

    ``lse`` is the natural log of the sum of exp of the scaled scores; -inf where a query saw no
    token, and then its output is 0.
    """

    out: Array
    lse: Array

    def shaped(self, shape: tuple[int, ...]) -> Attended:
        """The same with an output of ``shape``."""
        shape = tuple(shape)
        if tuple(self.out.shape) == shape:
            return self
        return Attended(self.out.reshape(shape), self.lse.reshape(shape[:-1]))


def with_queries(q: Array) -> Array:
    """Q ``[H_q, D]`` or ``[H_q, M, D]`` as ``[H_q, M, D]``."""
    return q if len(q.shape) == 3 else q[:, None, :]


@dataclass(frozen=True)
class DenseJob:
    """Each query sees all prefix tokens from ``start`` on, and a suffix causally.

    ``q`` ``[H_q, M, D]``, or ``[H_q, D]`` (M = 1), f32, f16 or bf16, unscaled, M >= 1;
    ``head_map`` u8 ``[H_q]`` on the host, entries below H_kv; 0 <= ``start`` < N.  ``suffix`` None,
    or at least one token: query m sees its positions ``t <= max(0, S - M) + m``.
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


@dataclass(frozen=True)
class BestBlocksJob:
    """As ``BlocksJob``, but the ``top`` blocks are those of the greatest scores of ``q``.

    ``statistics`` are those of the full blocks of ``block_tokens`` from ``start`` on, of which
    there are more than ``top``.
    """

    q: Array
    prefix: Prefix
    head_map: NDArray[np.uint8]
    statistics: BlockStatistics
    block_tokens: int
    top: int
    start: int = 0
    suffix: Suffix | None = None


Repeated: TypeAlias = "Callable[[Array, Suffix | None], Attended]"
"""Answers queries that differ from a first one in the values of Q and in the suffix alone."""


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

    def attend_each(self, jobs: Sequence[DenseJob]) -> list[Attended]:
        """``attend`` of every job, to the bit; all of one prefix, start and head map."""
        return [self.attend(job) for job in jobs]

    def repeated(self, job: DenseJob) -> Repeated | None:
        """``attend`` of jobs like this one, to the bit, sooner; None where it would not be."""
        return None

    @abstractmethod
    def attend_sparse(self, job: SparseJob) -> Attended:
        """Attention to given tokens."""

    @abstractmethod
    def attend_blocks(self, job: BlocksJob) -> Attended:
        """Attention to given blocks, tail and suffix."""

    def attend_best_blocks(self, job: BestBlocksJob) -> Attended:
        """Attention to the best blocks, tail and suffix: scores, choice, attention."""
        scores = self.block_scores(job.q, job.statistics, job.head_map)
        blocks = self.top_blocks(scores, job.top)
        return self.attend_blocks(
            BlocksJob(
                *(job.q, job.prefix, job.head_map, blocks, job.block_tokens, job.start),
                suffix=job.suffix,
            )
        )

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
