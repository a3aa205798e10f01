"""What a request must be before a kernel sees it: shapes, types, head maps, windows, indices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels.prefix import (
    MAX_HEADS,
    Array,
    Prefix,
    Suffix,
    check_values,
    shape_text,
)


def check_query(q: Array, prefix: Prefix, *, batched: bool) -> None:
    """Raise CommandError unless Q is ``[H_q, D]``, or ``[H_q, M, D]`` where ``batched``."""
    axes = len(q.shape)
    if axes != 2 and not (batched and axes == 3):
        raise CommandError(f"shape mismatch: Q {shape_text(q.shape)}")
    check_values("Q", q)
    if axes == 3 and q.shape[1] < 1:
        raise CommandError("Q must hold at least one query (M=0)")
    if q.shape[-1] != prefix.head_dim:
        raise CommandError(f"shape mismatch: Q has D={q.shape[-1]}, the prefix {prefix.head_dim}")
    if not 1 <= q.shape[0] <= MAX_HEADS:
        raise CommandError(f"H_q must be 1 to {MAX_HEADS}, not {q.shape[0]}")


def check_suffix(suffix: Suffix, prefix: Prefix) -> None:
    """Raise CommandError unless K and V are ``[H_kv, S, D]`` with the prefix's H_kv and D."""
    keys, values = suffix.keys, suffix.values
    fits = tuple(keys.shape) == tuple(values.shape) and len(keys.shape) == 3
    if not fits or (keys.shape[0], keys.shape[2]) != (prefix.num_kv_heads, prefix.head_dim):
        raise CommandError(
            f"shape mismatch: suffix K {shape_text(keys.shape)}, V {shape_text(values.shape)},"
            f" the prefix has H_kv={prefix.num_kv_heads}, D={prefix.head_dim}"
        )
    check_values("suffix K", keys)
    check_values("suffix V", values)


def checked_head_map(head_map: Array | None, num_heads: int, prefix: Prefix) -> NDArray[np.uint8]:
    """The map as u8 ``[H_q]`` on the host; the identity for None.

    Raises CommandError for another length, an entry not below H_kv, or H_q != H_kv without a map.
    """
    num_kv_heads = prefix.num_kv_heads
    if head_map is None:
        if num_heads != num_kv_heads:
            raise CommandError(
                f"shape mismatch: H_q={num_heads}, H_kv={num_kv_heads}: a head_map is needed"
            )
        return np.arange(num_heads, dtype=np.uint8)
    given = np.asarray(head_map)
    if given.shape != (num_heads,):
        raise CommandError(f"head_map must have H_q={num_heads} entries, not {given.size}")
    if given.dtype.kind not in "ui":
        raise CommandError(f"head_map must hold integers, not {given.dtype}")
    if given.min() < 0 or given.max() >= num_kv_heads:
        raise CommandError(f"head_map: an entry is out of range, H_kv={num_kv_heads}")
    return given.astype(np.uint8)


def first_token(window: int, num_tokens: int) -> int:
    """The first prefix token that queries see; raises CommandError for a negative window."""
    if window < 0:
        raise CommandError(f"window must be 0 or more, not {window}")
    return num_tokens - window if 0 < window < num_tokens else 0


def checked_indices(
    indices: Array, counts: Array, num_heads: int, prefix: Prefix, start: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Indices ``[H_q, K]`` and counts ``[H_q]`` of what is left from ``start`` on, on the host.

    Raises CommandError for shapes that differ, a count above K, an index outside the prefix.
    """
    rows, many = np.asarray(indices), np.asarray(counts)
    if rows.ndim != 2 or rows.shape[0] != num_heads or many.shape != (num_heads,):
        raise CommandError(f"shape mismatch: indices {rows.shape}, counts {many.shape}")
    if rows.dtype.kind not in "ui" or many.dtype.kind not in "ui":
        raise CommandError("indices and counts must be integers")
    width = rows.shape[1]
    if many.min() < 0 or many.max() > width:
        raise CommandError(f"a count is outside 0 to {width}")
    counted = np.arange(width) < many[:, None]
    outside = ((rows < 0) | (rows >= prefix.num_tokens)) & counted
    if outside.any():
        index = rows[outside][0]
        raise CommandError(f"index {index} is outside the prefix of {prefix.num_tokens} tokens")
    left = counted & (rows >= start)
    if not left.all():
        # What is left moves to the front of its row; the rest may be anything and becomes 0.
        order = np.argsort(~left, axis=1, kind="stable")
        rows = np.where(np.take_along_axis(left, order, 1), np.take_along_axis(rows, order, 1), 0)
    num_left = left.sum(axis=1)
    widest = int(num_left.max())
    return np.ascontiguousarray(rows[:, :widest], np.int32), num_left.astype(np.int32)
