"""Which classes of caches a model builds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

MLX_LM_CACHES = "mlx_lm.models.cache"


def cache_kinds(model: Any) -> set[str]:
    """The names of the classes of its caches, those in a CacheList too."""
    return {kind.__name__ for kind in _classes(model)}


def are_known(model: Any) -> bool:
    """Whether all of them are mlx-lm's; image models have mlx_vlm's, of the same names."""
    return {kind.__module__ for kind in _classes(model)} <= {MLX_LM_CACHES}


def _classes(model: Any) -> set[type]:
    from mlx_lm.models.cache import CacheList, make_prompt_cache

    def classes(caches: Iterable[Any]) -> Iterator[type]:
        for cache in caches:
            if isinstance(cache, CacheList):
                yield from classes(cache.caches)
            else:
                yield type(cache)

    return set(classes(make_prompt_cache(model)))
