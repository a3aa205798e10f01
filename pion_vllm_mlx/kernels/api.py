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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels import host, transfer
from pion_vllm_mlx.kernels.checks import (
    check_query,
    check_suffix,
    checked_head_map,
    checked_indices,
    first_token,
)
from pion_vllm_mlx.kernels.choice import Request, choose
from pion_vllm_mlx.kernels.problem import (
    Affine,
    Array,
    Attended,
    BestBlocksJob,
    BlockStatistics,
    DenseJob,
    Kernels,
    Prefix,
    Repeated,
    Selection,
    SparseJob,
    Suffix,
)

__all__ = [
    "Affine",
    "Attended",
    "BlockStatistics",
    "Prefix",
    "Repeated",
    "Selection",
    "Suffix",
    "attend",
    "attend_each",
    "attend_fused",
    "attend_sparse",
    "attend_sparse_auto",
    "attend_sparse_auto_fused",
    "dense_prefix",
    "device_prefix",
    "merge",
    "repeated",
    "select_blocks",
]


def dense_prefix(keys: Array, values: Array, dtype: str | None = None) -> Prefix:
    """A prefix from K and V ``[H_kv, N, D]``, converted to ``fp32``, ``fp16`` or ``bf16`` if asked.

    The arrays are kept, not copied, where nothing is to convert: the caller must not write to
    them again.  Raises CommandError for other shapes and types.
    """
    prefix = Prefix(keys, values, int(keys.shape[1]) if len(keys.shape) == 3 else 0)
    if dtype is None:
        return prefix
    to = transfer.converter(keys, dtype)
    return Prefix(to(keys), to(values), prefix.num_tokens)


def device_prefix(prefix: Prefix) -> Prefix:
    """The same prefix in mlx arrays, for kernels of mlx's device; itself where it is already.

    The memory is mlx's own then: the numpy arrays may go.  Needs mlx.
    """
    return transfer.device_prefix(prefix)


def attend(q: Array, prefix: Prefix, head_map: Array | None = None, window: int = 0) -> Attended:
    """Attention of one query token or of M over the prefix; no causal mask.

    ``out`` has the shape of ``q``, ``lse`` that less its last axis.
    """
    return attend_fused(q, prefix, None, head_map, window)


def attend_fused(
    q: Array, prefix: Prefix, suffix: Suffix | None, head_map: Array | None = None, window: int = 0
) -> Attended:
    """One softmax over prefix and suffix.

    Query m sees the suffix positions ``t <= max(0, S - M) + m``.  With S = 0, or without a suffix,
    this is ``attend``.
    """
    kernels, job = _dense_job(q, prefix, suffix, head_map, window)
    return _returned(q, kernels.attend(job))


def attend_each(
    asked: Sequence[tuple[Array, Suffix | None]],
    prefix: Prefix,
    head_map: Array | None = None,
    window: int = 0,
) -> list[Attended]:
    """``attend_fused`` of each query and its suffix over one prefix, equal to it to the bit.

    What they read of the prefix is read once, as far as that changes nothing.
    """
    jobs = [_dense_job(q, prefix, suffix, head_map, window) for q, suffix in asked]
    kernels = jobs[0][0]
    if any(other is not kernels for other, _ in jobs):
        return [attend_fused(q, prefix, suffix, head_map, window) for q, suffix in asked]
    found = kernels.attend_each([job for _, job in jobs])
    transfer.settle([array for one in found for array in (one.out, one.lse)])
    return [_returned(q, one) for (q, _), one in zip(asked, found, strict=True)]


def repeated(
    q: Array, prefix: Prefix, head_map: Array | None = None, window: int = 0
) -> Repeated | None:
    """What answers further queries of the shape of ``q``, each with a suffix or None.

    Equal to ``attend_fused`` to the bit, without checking and finding out again what does not
    change: Q must have the shape and the type of ``q``, a suffix at least one token. For a suffix
    that does not fit what comes back raises CommandError. None where nothing would be gained.
    """
    asked = _asked(q, prefix, head_map, window)
    kernels = _kernels("attend", asked)
    alike = kernels is _kernels("fused", asked) and prefix.is_host
    if not alike or not kernels.host or not isinstance(q, np.ndarray):
        return None
    check_query(q, prefix, batched=True)
    answer = kernels.repeated(DenseJob(q, prefix, asked.head_map, asked.start))
    if answer is None:
        return None
    found: Repeated = answer

    def checked(q: Array, suffix: Suffix | None) -> Attended:
        if suffix is not None:
            check_suffix(suffix, prefix)
        return found(q, suffix)

    return checked


def _dense_job(
    q: Array, prefix: Prefix, suffix: Suffix | None, head_map: Array | None, window: int
) -> tuple[Kernels, DenseJob]:
    """The kernels for a dense query, and what they are given."""
    check_query(q, prefix, batched=True)
    suffix = _checked_suffix(suffix, prefix)
    asked = _asked(q, prefix, head_map, window)
    kernels = _kernels("attend" if suffix is None else "fused", asked)
    job = DenseJob(
        transfer.array_for(kernels, q),
        transfer.prefix_for(kernels, prefix),
        asked.head_map,
        asked.start,
        transfer.suffix_for(kernels, suffix),
    )
    return kernels, job


def attend_sparse(
    q: Array,
    prefix: Prefix,
    indices: Array,
    counts: Array,
    head_map: Array | None = None,
    window: int = 0,
) -> Attended:
    """Attention of head h to the tokens ``indices[h, :counts[h]]`` of the prefix.

    ``q`` ``[H_q, D]``, ``indices`` i32 ``[H_q, K]``, ``counts`` u32 ``[H_q]``, each at most K.
    Order does not matter; a token named twice counts twice.  Tokens before the window are ignored;
    a head with none left gets zeros and an lse of -inf.  Raises CommandError for a counted index
    outside the prefix.
    """
    check_query(q, prefix, batched=False)
    asked = _asked(q, prefix, head_map, window)
    tokens, many = checked_indices(indices, counts, q.shape[0], prefix, asked.start)
    kernels = _kernels("sparse", asked)
    job = SparseJob(
        transfer.array_for(kernels, q),
        transfer.prefix_for(kernels, prefix),
        asked.head_map,
        tokens,
        many,
    )
    return _returned(q, kernels.attend_sparse(job))


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
    check_query(q, prefix, batched=False)
    asked = _asked(q, prefix, head_map, window)
    kernels = _kernels("select", asked)
    if _sees_all(asked, selection):
        every = np.arange(asked.num_seen // selection.block_tokens, dtype=np.int32)
        return transfer.like(q, every)
    scores = kernels.block_scores(
        transfer.array_for(kernels, q), _statistics(kernels, asked, selection), asked.head_map
    )
    return transfer.like(q, kernels.top_blocks(scores, selection.top))


def attend_sparse_auto(
    q: Array,
    prefix: Prefix,
    selection: Selection,
    head_map: Array | None = None,
    window: int = 0,
) -> Attended:
    """Attention of ``q [H_q, D]`` to the selected blocks and the tail."""
    return attend_sparse_auto_fused(q, prefix, None, selection, head_map, window)


def attend_sparse_auto_fused(
    q: Array,
    prefix: Prefix,
    suffix: Suffix | None,
    selection: Selection,
    head_map: Array | None = None,
    window: int = 0,
) -> Attended:
    """One softmax over the selected blocks, the tail and the whole suffix; ``q [H_q, D]``."""
    check_query(q, prefix, batched=False)
    asked = _asked(q, prefix, head_map, window)
    if _sees_all(asked, selection):
        return attend_fused(q, prefix, suffix, head_map, window)
    suffix = _checked_suffix(suffix, prefix)
    kernels = _kernels("blocks", asked)
    job = BestBlocksJob(
        transfer.array_for(kernels, q),
        transfer.prefix_for(kernels, prefix),
        asked.head_map,
        _statistics(kernels, asked, selection),
        selection.block_tokens,
        selection.top,
        asked.start,
        transfer.suffix_for(kernels, suffix),
    )
    return _returned(q, kernels.attend_best_blocks(job))


def merge(parts: Sequence[Attended]) -> Attended:
    """The attention over the union of disjoint parts of the keys.

    All parts are of one shape and kind; a part with an lse of -inf adds nothing.  Raises
    CommandError for no part or shapes that differ.
    """
    if not parts:
        raise CommandError("merge: no part is given")
    shape = tuple(parts[0].out.shape)
    for part in parts:
        if tuple(part.out.shape) != shape or tuple(part.lse.shape) != shape[:-1]:
            raise CommandError("shape mismatch: the parts of a merge differ")
    if isinstance(parts[0].out, np.ndarray):
        return host.merged(parts)
    from pion_vllm_mlx.kernels import mlx_expression

    return mlx_expression.merged(parts)


@dataclass(frozen=True)
class _Asked:
    """A checked query: its map on the host, the first token it sees."""

    q: Array
    prefix: Prefix
    head_map: NDArray[np.uint8]
    start: int

    @property
    def num_seen(self) -> int:
        """Tokens of the windowed prefix."""
        return self.prefix.num_tokens - self.start


def _asked(q: Array, prefix: Prefix, head_map: Array | None, window: int) -> _Asked:
    start = first_token(window, prefix.num_tokens)
    return _Asked(q, prefix, checked_head_map(head_map, q.shape[0], prefix), start)


def _checked_suffix(suffix: Suffix | None, prefix: Prefix) -> Suffix | None:
    """The suffix, None where it has no token."""
    if suffix is None:
        return None
    check_suffix(suffix, prefix)
    return suffix if suffix.num_tokens else None


def _kernels(operation: str, asked: _Asked) -> Kernels:
    shape, prefix = asked.q.shape, asked.prefix
    side, quantized = prefix.keys, isinstance(prefix.keys, Affine)
    return choose(
        Request(
            operation,
            prefix.is_host,
            prefix.num_tokens,
            shape[0] * (shape[1] if len(shape) == 3 else 1),
            prefix.num_kv_heads,
            prefix.head_dim,
            transfer.dtype_name(side.scales if quantized else side),
            quantized,
        )
    )


def _sees_all(asked: _Asked, selection: Selection) -> bool:
    return asked.num_seen <= selection.block_tokens * selection.top


def _statistics(kernels: Kernels, asked: _Asked, selection: Selection) -> BlockStatistics:
    """Statistics of the blocks, which the prefix remembers."""
    key = (f"{kernels.name} {selection.selector}", selection.block_tokens, asked.start)
    found = asked.prefix.statistics.get(key)
    if found is None:
        found = kernels.block_statistics(
            transfer.prefix_for(kernels, asked.prefix),
            selection.block_tokens,
            asked.start,
            selection.selector,
        )
        asked.prefix.remember(key, found)
    return found


def _returned(q: Array, found: Attended) -> Attended:
    """The result in the kind of ``q``."""
    return Attended(transfer.like(q, found.out), transfer.like(q, found.lse))
