"""Recurrent models whose prompts must not be padded to the length of others.

mlx-lm prefills several prompts as one batch, the shorter ones padded, and has a mask for the
model. One that does not ask for it computes the padding into its recurrent state, with or
without a cache of ours: mamba and rwkv7 do. In mlx-lm 0.31 every recurrent model does, since
the mask of empty caches that were merged masks nothing; those of ``models/ssm.py`` (mamba2,
falcon_h1, nemotron_h …) forget it, besides, where the state decays. One prompt at a time is
right. Where the source looks like neither way, one at a time is taken.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any


def pads_wrongly(model: Any) -> bool:
    """Whether a recurrent model ignores the mask that mlx-lm has for padded prompts."""
    from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

    def recurrent(cache: Any) -> bool:
        if isinstance(cache, CacheList):
            return any(recurrent(child) for child in cache.caches)
        return isinstance(cache, ArraysCache)

    if not any(recurrent(cache) for cache in make_prompt_cache(model)):
        return False
    if not _padding_is_masked():
        return True
    modules = {type(part).__module__ for part in model.modules()}
    sources = [
        inspect.getsource(sys.modules[name]) for name in modules if name.startswith("mlx_lm.")
    ]
    if not any("create_ssm_mask" in source for source in sources):
        return True
    return any("from .ssm import" in source for source in sources) and not _decay_is_masked()


def _padding_is_masked() -> bool:
    """Whether the mask of two new prompts of different lengths leaves the padding out."""
    from mlx_lm.models.cache import ArraysCache

    kind: Any = ArraysCache
    merged = kind.merge([kind(1), kind(1)])
    merged.prepare(lengths=[2, 1])
    mask = merged.make_mask(2)
    return mask is not None and mask.tolist() == [[True, True], [True, False]]


def _decay_is_masked() -> bool:
    ssm = importlib.import_module("mlx_lm.models.ssm")
    return "dtA * mask" in inspect.getsource(ssm)
