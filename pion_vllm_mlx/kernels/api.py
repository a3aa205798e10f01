"""Attention over a prefix: check the request, choose a kernel, run it.

Shapes: Q ``[H_q, D]`` (one query token) or ``[H_q, M, D]``; K and V of a prefix ``[H_kv, N, D]``
(or paged, see :class:`Prefix`), of a suffix ``[H_kv, S, D]``.  The scale is 1/sqrt(D), always.

``head_map`` u8 ``[H_q]`` names the KV head of each query head; None is the identity and needs
H_q = H_kv.  ``window`` W > 0 shows the queries the last W tokens of the prefix only; 0, or W >= N,
all of it; a suffix is never cut.

Arrays are numpy's or mlx's.  The prefix decides where the kernel runs, Q's kind is what comes
back; all results are float32.  Every function raises CommandError for shapes, head maps, windows
and indices that do not fit, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pion_vllm_mlx.kernels.problem import (
    Affine,
    Array,
    Attended,
    BlockStatistics,
    Prefix,
    Selection,
    Suffix,
)

__all__ = [
    "Affine",
    "Attended",
    "BlockStatistics",
    "Prefix",
    "Selection",
    "Suffix",
    "attend",
    "attend_fused",
    "attend_sparse",
    "attend_sparse_auto",
    "attend_sparse_auto_fused",
    "dense_prefix",
    "merge",
    "select_blocks",
]


def dense_prefix(keys: Array, values: Array, dtype: str | None = None) -> Prefix:
    """A prefix from K and V ``[H_kv, N, D]``, converted to ``fp32``, ``fp16`` or ``bf16`` if asked.

    The arrays are kept, not copied, where nothing is to convert: the caller must not write to
    them again.  Raises CommandError for other shapes and types.
    """
    raise NotImplementedError


def attend(q: Array, prefix: Prefix, head_map: Array | None = None, window: int = 0) -> Attended:
    """Attention of one query token or of M over the prefix; no causal mask.

    ``out`` has the shape of ``q``, ``lse`` that less its last axis.
    """
    raise NotImplementedError


def attend_fused(
    q: Array, prefix: Prefix, suffix: Suffix, head_map: Array | None = None, window: int = 0
) -> Attended:
    """One softmax over prefix and suffix.

    Query m sees the suffix positions ``t <= max(0, S - M) + m``.  With S = 0 this is ``attend``.
    """
    raise NotImplementedError


def attend_sparse(  # noqa: PLR0913
    q: Array,
    prefix: Prefix,
    indices: Array,
    counts: Array,
    head_map: Array | None = None,
    window: int = 0,
) -> Attended:
    """Attention of head h to the tokens ``indices[h, :counts[h]]`` of the prefix.

    ``q`` ``[H_q, D]``, ``indices`` i32 ``[H_q, K]``, ``counts`` u32 ``[H_q]``, each at most K.  Their
    order does not matter; a token named twice counts twice.  Tokens before the window are ignored;
    a head with none left gets zeros and an lse of -inf.  Raises CommandError for a counted index
    outside the prefix.
    """
    raise NotImplementedError


def select_blocks(
    q: Array,
    prefix: Prefix,
    selection: Selection,
    head_map: Array | None = None,
    window: int = 0,
) -> Array:
    """The blocks a sparse query sees, ids i32 ascending, counted from the window's first token.

    ``q`` ``[H_q, D]``.  All full blocks where the windowed prefix has at most
    ``block_tokens * top`` tokens; else the ``top`` best by the mean score over all query heads.
    The tail behind the last full block is seen always and has no id.
    """
    raise NotImplementedError


def attend_sparse_auto(
    q: Array,
    prefix: Prefix,
    selection: Selection,
    head_map: Array | None = None,
    window: int = 0,
) -> Attended:
    """Attention of ``q [H_q, D]`` to the selected blocks and the tail."""
    raise NotImplementedError


def attend_sparse_auto_fused(  # noqa: PLR0913
    q: Array,
    prefix: Prefix,
    suffix: Suffix,
    selection: Selection,
    head_map: Array | None = None,
    window: int = 0,
) -> Attended:
    """One softmax over the selected blocks, the tail and the whole suffix; ``q [H_q, D]``."""
    raise NotImplementedError


def merge(parts: Sequence[Attended]) -> Attended:
    """The attention over the union of disjoint parts of the keys.

    All parts are of one shape and kind; a part with an lse of -inf adds nothing.  Raises
    CommandError for no part or shapes that differ.
    """
    raise NotImplementedError
