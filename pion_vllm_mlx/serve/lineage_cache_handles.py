"""What can be said about cache objects of mlx-lm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, can_trim_prompt_cache

from pion_vllm_mlx.cache.completion import TokenIds


def settled(ids: TokenIds, caches: list[Any]) -> TokenIds:
    """The tokens that all caches hold: speculative decoding leaves some a few short.

    The caches are shortened in place; where they cannot be, all tokens come back.
    """
    if not can_trim_prompt_cache(caches):
        return ids
    lengths = [int(cache.offset) for cache in caches if not isinstance(cache, CacheList)]
    held = min([int(ids.size), *lengths])
    for cache in caches:
        if not isinstance(cache, CacheList) and cache.offset > held:
            cache.trim(cache.offset - held)
    return ids[:held]


def recurrent(caches: Iterable[Any]) -> bool:
    """Whether there is a state among the caches that exists only where it was taken."""
    return any(
        recurrent(cache.caches) if isinstance(cache, CacheList) else isinstance(cache, ArraysCache)
        for cache in caches
    )
