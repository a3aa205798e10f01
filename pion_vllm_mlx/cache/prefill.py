"""The local prefill of a prefix, cut into chunks as mlx-lm's own ``generate_step`` does."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import mlx.core as mx

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.layers import cache_arrays

DEFAULT_CHUNK_TOKENS = 2048


class Prefilled(NamedTuple):
    """A cache that holds all tokens of a prefix, and the time that took."""

    cache: list[Any]
    elapsed_ms: float


def prefill(
    model: Any, ids: TokenIds, *, chunk_tokens: int | None = None, cache: list[Any] | None = None
) -> Prefilled:
    """Runs ``ids`` through the model and evaluates every layer of its cache.

    A given ``cache`` is extended in place. The logits are never computed: nothing
    evaluates them.
    """
    from mlx_lm.models.cache import make_prompt_cache

    started = time.perf_counter()
    entries: list[Any] = make_prompt_cache(model) if cache is None else cache
    step = chunk_tokens or DEFAULT_CHUNK_TOKENS
    prompt = mx.array(ids)
    for start in range(0, len(ids), step):
        model(prompt[start : start + step][None], cache=entries)
        mx.eval(cache_arrays(entries))
        mx.clear_cache()
    return Prefilled(entries, (time.perf_counter() - started) * 1000)
