"""What attention is, in float64 and in the plainest words: the judge of every answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def softmax_over(
    q: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32]
) -> tuple[Doubles, float]:
    """One query ``[D]`` over keys and values ``[n, D]``: output and log-sum-exp."""
    if not len(keys):
        return np.zeros(values.shape[1]), -np.inf
    scores = keys.astype("f8") @ q.astype("f8") / np.sqrt(len(q))
    top = scores.max()
    weights = np.exp(scores - top)
    return weights @ values.astype("f8") / weights.sum(), float(np.log(weights.sum()) + top)


def dense(
    q: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    head_map: list[int] | None = None,
    window: int = 0,
) -> tuple[Doubles, Doubles]:
    """Q ``[H_q, M, D]`` over K and V ``[H_kv, N, D]``: outputs and log-sum-exps ``[H_q, M]``."""
    heads, rows, dim = q.shape
    out, lse = np.empty((heads, rows, dim)), np.empty((heads, rows))
    first = max(0, keys.shape[1] - window) if window else 0
    for h in range(heads):
        kv = h if head_map is None else head_map[h]
        for m in range(rows):
            out[h, m], lse[h, m] = softmax_over(q[h, m], keys[kv, first:], values[kv, first:])
    return out, lse


def fused(  # noqa: PLR0913 - all there is
    q: NDArray[np.float32],
    prefix: tuple[NDArray[np.float32], NDArray[np.float32]],
    suffix: tuple[NDArray[np.float32], NDArray[np.float32]],
    head_map: list[int] | None = None,
    window: int = 0,
) -> Doubles:
    """One softmax over prefix and suffix; query m sees ``t <= max(0, S - M) + m``."""
    heads, rows, dim = q.shape
    (keys, values), (suffix_keys, suffix_values) = prefix, suffix
    first = max(0, keys.shape[1] - window) if window else 0
    out = np.empty((heads, rows, dim))
    for h in range(heads):
        kv = h if head_map is None else head_map[h]
        for m in range(rows):
            seen = max(0, suffix_keys.shape[1] - rows) + m + 1
            out[h, m], _ = softmax_over(
                q[h, m],
                np.concatenate([keys[kv, first:], suffix_keys[kv, :seen]]),
                np.concatenate([values[kv, first:], suffix_values[kv, :seen]]),
            )
    return out


def chosen_tokens(  # noqa: PLR0913 - all there is
    q: NDArray[np.float32],
    keys: NDArray[np.float32],
    block: int,
    top: int,
    *,
    quest: bool = False,
    head_map: list[int] | None = None,
    first: int = 0,
) -> list[int]:
    """The tokens that one query ``[H_q, D]`` sees of K ``[H_kv, N, D]``, block by block."""
    tokens = keys.shape[1]
    if tokens - first <= block * top:
        return list(range(first, tokens))
    count = (tokens - first) // block
    scores = np.zeros(count)
    for h in range(q.shape[0]):
        kv = h if head_map is None else head_map[h]
        for b in range(count):
            rows = keys[kv, first + b * block : first + (b + 1) * block].astype("f8")
            one = q[h].astype("f8")
            if quest:
                bound = np.maximum(one * rows.min(axis=0), one * rows.max(axis=0)).sum()
            else:
                bound = one @ rows.mean(axis=0)
            scores[b] += bound / np.sqrt(q.shape[1]) / q.shape[0]
    best = sorted(range(count), key=lambda b: (-scores[b], b))[:top]
    seen = [first + b * block + t for b in sorted(best) for t in range(block)]
    return seen + list(range(first + count * block, tokens))
