"""Cache objects of mlx-lm over handles of one's own.

An array of MLX does not change, but a Python object that stands for one does: ``keys[...] = rows``
has it stand for another.  Whoever has caches over the same objects would see that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList


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
