"""Cache objects of mlx-lm: handles of one's own, and what can be said about them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, can_trim_prompt_cache

from pion_vllm_mlx.cache.completion import TokenIds


def owned(caches: Sequence[Any]) -> list[Any]:
    """Cache objects over handles of their own: mlx-lm writes into arrays in place.

    Whoever writes through a handle leaves what others hold as it was. No row is copied.
    """
    return [_owned(cache) for cache in caches]


def _owned(cache: Any) -> Any:
    own = copy.copy(cache)
    if isinstance(cache, CacheList):
        own.caches = type(cache.caches)(owned(cache.caches))
        return own
    for name, value in vars(cache).items():
        setattr(own, name, _handle(value))
    return own


def _handle(value: Any) -> Any:
    """A handle of one's own on an array, or on each of a list of them."""
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_handle, value))
    return value


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
