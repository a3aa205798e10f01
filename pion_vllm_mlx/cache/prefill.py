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


def check_vocabulary(model: Any, ids: TokenIds) -> None:
    """Raises ValueError for an id the model has no embedding of: MLX would read outside of it."""
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)
    sizes = [getattr(args, "vocab_size", None)]
    sizes.append(text.get("vocab_size") if isinstance(text, dict) else None)
    known = [size for size in sizes if isinstance(size, int)]
    if known and int(ids.max()) >= max(known):
        raise ValueError(f"token id {int(ids.max())} is beyond the vocabulary of {max(known)}")


def prefill(
    model: Any, ids: TokenIds, *, chunk_tokens: int | None = None, cache: list[Any] | None = None
) -> Prefilled:
    """Runs ``ids`` through the model and evaluates every layer of its cache.

    A given ``cache`` is extended in place. The logits are never computed: nothing
    evaluates them. Raises ValueError for ids beyond the model's vocabulary.
    """
    from mlx_lm.models.cache import make_prompt_cache

    check_vocabulary(model, ids)
    started = time.perf_counter()
    entries: list[Any] = make_prompt_cache(model) if cache is None else cache
    step = chunk_tokens or DEFAULT_CHUNK_TOKENS
    prompt = mx.array(ids)
    for start in range(0, len(ids), step):
        model(prompt[start : start + step][None], cache=entries)
        mx.eval(cache_arrays(entries))
        mx.clear_cache()
    return Prefilled(entries, (time.perf_counter() - started) * 1000)
