"""Recurrent models whose prompts must not be padded to the length of others.

mlx-lm prefills several prompts as one batch, the shorter ones padded, and hands a mask to the
model. One that does not ask for it computes the padding into its recurrent state, with or
without a cache of ours: mamba and rwkv7 do. One prompt at a time is right.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any


def pads_wrongly(model: Any) -> bool:
    """Whether a recurrent model ignores the mask that mlx-lm gives it for padded prompts."""
    from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

    def recurrent(cache: Any) -> bool:
        if isinstance(cache, CacheList):
            return any(recurrent(child) for child in cache.caches)
        return isinstance(cache, ArraysCache)

    if not any(recurrent(cache) for cache in make_prompt_cache(model)):
        return False
    modules = {type(part).__module__ for part in model.modules()}
    sources = [
        inspect.getsource(sys.modules[name]) for name in modules if name.startswith("mlx_lm.")
    ]
    return not any("create_ssm_mask" in source for source in sources)
