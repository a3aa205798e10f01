"""Exact nearest neighbours, and attention over the best keys, in numpy.

D is a key's width, n a number of rows. The search ranks all rows once in float32,
keeps every row that rounding could move into the result, and decides between
those in float64: the answer is that of a full float64 search.

Products of a matrix and a vector are not left to BLAS: its threads wait for each
other, on a busy machine for long, and one thread reads as fast as memory gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: values of one step of the float64 pass.
_STEP_VALUES = 1 << 20


def squared_norms(keys: Floats) -> Floats:
    """``[n, D]`` to ``[n]`` float32; infinite where the square is out of range."""
    with np.errstate(over="ignore", invalid="ignore"):
        norms: Floats = np.einsum("nd,nd->n", keys, keys, dtype=np.float32)
    return norms


def nearest(
    blocks: Sequence[tuple[Floats, Floats]], query: Floats, k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ``min(k, n)`` rows with the smallest L2 distance, and the distances.

    ``blocks`` are ``(keys [n_i, D], their squared norms [n_i])``; row numbers count over
    all of them, ``query`` is ``[D]``. Best first; of equal ones the first stored. A row
    that holds NaN comes last, at an infinite distance.
    """
    candidates = _candidates(blocks, query, k)
    distances = _distances([keys for keys, _ in blocks], candidates, query)
    order = np.argsort(distances, kind="stable")[:k]
    return candidates[order], distances[order]


def _candidates(
    blocks: Sequence[tuple[Floats, Floats]], query: Floats, k: int
) -> NDArray[np.int64]:
    """Ascending numbers of all rows that may be among the ``k`` nearest."""
    count = sum(len(norms) for _, norms in blocks)
    if count <= k:
        return np.arange(count)
    width = len(query)
    with np.errstate(over="ignore", invalid="ignore"):
        square = np.float32(query @ query)
        norms = np.concatenate([norms for _, norms in blocks]) + square
        scores = np.concatenate([np.einsum("nd,d->n", keys, query) for keys, _ in blocks])
        scores *= -2
        scores += norms
        # |rounding| of D products and their sum, of both norms and of the last steps
        error = norms
        error *= np.float32(2 * (width + 8)) * np.finfo(np.float32).eps
        error += np.float32(width * 1e-44)
        lowest, highest = scores - error, scores + error
    lost = ~np.isfinite(highest)
    if lost.any():
        lowest[lost], highest[lost] = -np.inf, np.inf
    limit = np.partition(highest, k - 1)[k - 1]
    return np.flatnonzero(lowest <= limit)


def _distances(
    keys: Sequence[Floats], rows: NDArray[np.int64], query: Floats
) -> NDArray[np.float64]:
    """L2 distances of ascending ``rows``, each summed in float64 and by itself."""
    ends = np.cumsum([len(block) for block in keys])
    exact = query.astype(np.float64)
    step = max(1, _STEP_VALUES // len(query))
    found = [np.empty(0)]
    for block, begin, end in zip(keys, ends - [len(b) for b in keys], ends, strict=True):
        inside = rows[np.searchsorted(rows, begin) : np.searchsorted(rows, end)] - begin
        for at in range(0, len(inside), step):
            with np.errstate(invalid="ignore"):
                difference = block[inside[at : at + step]] - exact
                found.append(np.sqrt(np.square(difference).sum(axis=1)))
    distances = np.concatenate(found)
    distances[np.isnan(distances)] = np.inf
    return distances


def attend_best(q: Floats, k: Floats, v: Floats, top_k: int) -> Floats:
    """Softmax attention of one query a head over its ``top_k`` best keys.

    ``q [H, D]``, ``k`` and ``v`` ``[H, N, D]``, result ``[H, D]``; scores are scaled by
    1/sqrt(D) and everything is float32. With ``top_k >= N`` all keys take part.
    """
    heads, tokens, width = k.shape
    out = np.empty((heads, width), np.float32)
    scale = np.float32(1 / np.sqrt(width))
    with np.errstate(over="ignore", invalid="ignore"):
        for head in range(heads):
            scores = np.einsum("nd,d->n", k[head], q[head]) * scale
            values = v[head]
            if top_k < tokens:
                best = np.sort(np.argpartition(-scores, top_k - 1)[:top_k])
                scores, values = scores[best], values[best]
            weights = np.exp(scores - scores.max())
            out[head] = np.einsum("n,nd->d", weights, values) / weights.sum()
    return out
