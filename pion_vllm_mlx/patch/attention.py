"""What takes the place of mlx-lm's attention: the same, and that of prefixes elsewhere.

H_q query heads, H_kv KV heads, M query tokens, S suffix tokens, N prefix tokens, D head
dimension; mlx-lm's arrays are ``[1, H, tokens, D]``. Sums are float32; the result has the
type of the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from pion_vllm_mlx.cache.attend_request import Sparse
from pion_vllm_mlx.errors import PionMlxCompatError
from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.prefix import HEAD_DIMS, MAX_HEADS, MAX_KV_HEADS
from pion_vllm_mlx.patch.prefix_cache import HANDED, PionPrefixCache
from pion_vllm_mlx.patch.windows import Limits, Seen, seen

_MOST_FUSED_BYTES = 1 << 20
"""A longer suffix stays here, and its attention is merged with that of the prefix."""


def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that is put in place of ``original``."""

    def scaled_dot_product_attention(  # noqa: PLR0913  (mlx-lm's signature)
        queries: Any,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: Any = None,
    ) -> Any:
        """Attention as mlx-lm computes it, and over the prefix of a PionPrefixCache."""
        owner = HANDED.owner(keys)
        if owner is None and not isinstance(cache, PionPrefixCache):
            return original(queries, keys, values, cache, scale, mask, sinks)
        if owner is None and not cache.whole and cache.is_cast(keys, values):
            owner = cache
        if owner is not None:
            if sinks is not None:
                raise NotImplementedError("attention sinks over a prefix elsewhere")
            _check_owner(owner, cache, values)
            return _elsewhere(owner, (queries, keys, values), scale, mask)
        if not (cache.whole or cache.is_handed(keys, values)):
            raise _changed(cache)
        if queries.shape[0] != 1:
            raise NotImplementedError(f"a prefix of batch size 1, and {queries.shape[0]} queries")
        cache.group.pc.attention.in_process += 1
        more = () if sinks is None else (sinks,)
        return original(queries, keys, values, cache.store, scale, mask, *more)

    return scaled_dot_product_attention


def _check_owner(owner: PionPrefixCache, cache: Any, values: Any) -> None:
    """Raises PionMlxCompatError where the numbers could be those of other rows."""
    if cache is not owner and not owner.group.shares:
        raise PionMlxCompatError(
            f"layer {owner.layer_idx}: the model attends to its K and V from another layer"
        )
    if not owner.has_handed(values):
        raise _changed(owner)


def _changed(cache: PionPrefixCache) -> PionMlxCompatError:
    return PionMlxCompatError(
        f"layer {cache.layer_idx}: the model changes K or V between cache and attention"
    )


Triple = tuple[mx.array, mx.array, mx.array]


def _elsewhere(cache: PionPrefixCache, arrays: Triple, scale: float, mask: Any) -> mx.array:
    """Attention over suffix and prefix; a failure leaves the cache unusable, with a reason."""
    group, finished = cache.group, False
    try:
        q, k, v = arrays
        _check(q, k, v)
        wide = [array[0].astype(mx.float32) for array in (q, k, v)]
        wide[0] = wide[0] * (scale * math.sqrt(q.shape[3]))
        out = _attended(cache, (wide[0], wide[1], wide[2]), mask)
        finished = True
    finally:
        if not finished:
            group.broken = f"layer {cache.layer_idx} of namespace {group.namespace}"
    if group.waiting is cache:
        group.waiting = None
    return out[None].astype(q.dtype)


def _check(q: mx.array, k: mx.array, v: mx.array) -> None:
    """Raises NotImplementedError for shapes that no kernel and no server has."""
    if q.shape[0] != 1:
        raise NotImplementedError(f"a prefix of batch size 1, and {q.shape[0]} queries")
    if k.shape[3] != v.shape[3] or k.shape[3] not in HEAD_DIMS:
        raise NotImplementedError(f"attention elsewhere with heads of {k.shape[3]}, {v.shape[3]}")
    if q.shape[1] > MAX_HEADS or k.shape[1] > MAX_KV_HEADS or q.shape[1] % k.shape[1]:
        raise NotImplementedError(f"attention elsewhere with {q.shape[1]} and {k.shape[1]} heads")


def _attended(cache: PionPrefixCache, arrays: Triple, mask: Any) -> mx.array:
    """``[H_q, M, D]`` float32; q ``[H_q, M, D]`` is scaled so that 1/sqrt(D) is left to do."""
    q, k, v = arrays
    num_queries, num_suffix = q.shape[1], k.shape[1]
    text = isinstance(mask, str)
    if text and mask != "causal":
        raise NotImplementedError(f"the mask {mask!r} over a prefix elsewhere")
    if cache.rows is not None:  # one query, the prefix in this process
        cache.group.pc.attention.in_process += 1
        return _local_sparse(cache, cache.rows, arrays, mask)
    if not text and (mask is not None or num_queries > 1):
        return _masked(cache, arrays, mask)
    limits = cache.limits(mask, num_queries)
    view = seen(limits, max(cache.prefix_len, 0), num_suffix, num_queries)
    if num_queries == 1 and cache.selection is not None and limits == Limits():
        mode = cache.selection
        chosen = Sparse(mode.block_tokens, mode.top, int(mode.selector == "quest"))
        mx.eval(*arrays)
        host = _host(q), _host(k), _host(v)
        return mx.array(cache.group.remote.sparse(cache.layer_idx, *host, chosen))
    small = k.nbytes + v.nbytes <= _MOST_FUSED_BYTES
    if view.mask is None and cache.group.fused and small and (view.prefix == view.prefix[0]).all():
        if view.prefix[0] > 0:
            window = 0 if view.everything else int(view.prefix[0])
            mx.eval(*arrays)
            host = _host(q), _host(k), _host(v)
            return mx.array(cache.group.remote.fused(cache.layer_idx, *host, window))
    sees = causal(num_queries, num_suffix) if view.mask is None else view.mask
    return _merged(cache, arrays, view, mx.array(sees))


def _local_sparse(
    cache: PionPrefixCache, rows: api.Prefix, arrays: Triple, mask: Any
) -> mx.array:
    q, k, v = arrays
    assert cache.selection is not None
    if q.shape[1] != 1 or not (mask is None or isinstance(mask, str)):
        raise NotImplementedError("sparse attention under a mask")
    heads = np.frombuffer(_head_map(q, k), np.uint8)
    suffix = api.Suffix(k, v)
    found = api.attend_sparse_auto_fused(q[:, 0], rows, suffix, cache.selection, heads)
    out: mx.array = found.out[:, None]
    return out


def _masked(cache: PionPrefixCache, arrays: Triple, mask: Any) -> mx.array:
    """Under a mask of the caller's own, which must show the whole prefix; None shows all."""
    q, k, _ = arrays
    num = cache.prefix_len
    if cache.ring is not None:
        raise NotImplementedError("a mask over a window that is elsewhere")
    if mask is None:
        mask = mx.ones((q.shape[1], k.shape[1]), mx.bool_)
    if mask.shape[-1] == num + k.shape[1]:
        over = mask[..., :num]
        shown = over if mask.dtype == mx.bool_ else over == 0
        if not mx.all(shown).item():
            raise NotImplementedError("a mask that hides a part of a prefix elsewhere")
        mask = mask[..., num:]
    view = Seen(np.full(q.shape[1], num), None, num)
    return _merged(cache, arrays, view, mask)


def _merged(cache: PionPrefixCache, arrays: Triple, view: Seen, mask: mx.array) -> mx.array:
    """The prefix's attention, asked for by window, merged with that of the suffix."""
    q, k, v = arrays
    here = suffix_attention(q, k, v, mask)
    there = _prefix_attention(cache, q, k.shape[0], view)
    out: mx.array = here.out if there is None else api.merge([there, here]).out
    return out


def _prefix_attention(
    cache: PionPrefixCache, q: mx.array, kv_heads: int, view: Seen
) -> api.Attended | None:
    """Out and LSE of the prefix for each query, from one question a window; None if none sees."""
    if not view.num_tokens:
        return None
    heads, num_queries, dim = q.shape
    group = heads // kv_heads
    host = _host(q)
    run = view.run()
    spans = [(0, run, 0)] if run else []
    spans += [(m, m + 1, int(view.prefix[m])) for m in range(run, num_queries) if view.prefix[m]]
    if not spans:
        return None
    # The queries of the heads that share K and V are rows of one head.
    folded = host.reshape(kv_heads, group, num_queries, dim)
    asked = [
        (np.ascontiguousarray(folded[:, :, a:b]).reshape(kv_heads, -1, dim), window)
        for a, b, window in spans
    ]
    out = np.zeros((kv_heads, group, num_queries, dim), np.float32)
    lse = np.full((kv_heads, group, num_queries), -np.inf, np.float32)
    found = cache.group.remote.prefixes(cache.layer_idx, asked)
    for (a, b, _), (part, weight) in zip(spans, found, strict=True):
        out[:, :, a:b] = part.reshape(kv_heads, group, b - a, dim)
        lse[:, :, a:b] = weight.reshape(kv_heads, group, b - a)
    return api.Attended(
        mx.array(out.reshape(q.shape)), mx.array(lse.reshape(heads, num_queries))
    )


def suffix_attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> api.Attended:
    """Out ``[H_q, M, D]`` and LSE ``[H_q, M]`` of the suffix under a mask ``[…, M, S]``."""
    heads, num_queries, dim = q.shape
    kv_heads = k.shape[0]
    grouped = q.reshape(kv_heads, heads // kv_heads, num_queries, dim)
    scores = (grouped @ k[:, None].swapaxes(-1, -2)) * dim**-0.5
    scores = scores.reshape(heads, num_queries, -1)
    while mask.ndim > 3:
        mask = mask[0]
    if mask.dtype == mx.bool_:
        scores = mx.where(mask, scores, -math.inf)
    else:
        scores = scores + mask
    lse = mx.logsumexp(scores, axis=-1)
    weights = mx.where(scores == -math.inf, 0, mx.exp(scores - lse[..., None]))
    weights = weights.reshape(kv_heads, heads // kv_heads, num_queries, -1)
    return api.Attended((weights @ v[:, None]).reshape(q.shape), lse)


def causal(num_queries: int, num_suffix: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of S tokens each of the last M sees: itself and those before it."""
    at = np.arange(num_suffix - num_queries, num_suffix)
    return np.asarray(np.arange(num_suffix) <= at[:, None])


def _head_map(q: mx.array, k: mx.array) -> bytes:
    return bytes(head * k.shape[0] // q.shape[0] for head in range(q.shape[0]))


def _host(array: mx.array) -> Any:
    """A contiguous float32 array of numpy's; evaluates."""
    return np.ascontiguousarray(np.array(array, copy=None))
