"""vllm-mlx with this package's store behind its scheduler.

    from pion_vllm_mlx.cache import install_vllm_mlx_backend
    install_vllm_mlx_backend(budget_gb=8)   # before vllm-mlx builds its engine
    ...                                     # vllm_mlx.cli.serve_command(args), or EngineCore

vllm-mlx has no hook for caches: its scheduler's names are replaced, after each was checked to
be what is known here.  Only continuous batching uses a prefix cache (``--continuous-batching``).
``--use-paged-cache``, ``--no-memory-aware-cache`` and ``--disable-prefix-cache`` choose other
caches, past this one.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pion_vllm_mlx.cache.lineage import LineageOptions
from pion_vllm_mlx.cache.store_url import parse_url
from pion_vllm_mlx.cache.vllm_mlx_backend_anchor import AnchorTexts, patch_chat_template
from pion_vllm_mlx.cache.vllm_mlx_backend_cache import BackendSettings, PionPrefixCache
from pion_vllm_mlx.cache.vllm_mlx_backend_prefill import patch_scheduler
from pion_vllm_mlx.cache.vllm_mlx_backend_seams import (
    ADD_TO_MLLM,
    CONSULTED,
    MLLM_PREFIX_CACHE,
    PREFIX_CACHE,
    REPLACED,
    Replacements,
    check,
    has_mllm,
)
from pion_vllm_mlx.cache.vllm_mlx_backend_steps import patch_start, patch_steps
from pion_vllm_mlx.cache.vllm_mlx_backend_usage import (
    UsageLayer,
    patch_engine,
    patch_image_models,
)
from pion_vllm_mlx.config import GIGABYTE
from pion_vllm_mlx.errors import ConfigError, PionMlxCompatError

__all__ = [
    "BackendSettings",
    "PionPrefixCache",
    "install_vllm_mlx_backend",
    "installed_caches",
    "uninstall_vllm_mlx_backend",
]


@dataclass
class _Installed:
    """What is installed in this process; at most one."""

    replacements: Replacements
    caches: weakref.WeakSet[PionPrefixCache]
    layer: Any


_MOST_GIGABYTES = 1e9
_CURRENT: list[_Installed] = []


def install_vllm_mlx_backend(
    budget_gb: float = 8.0,
    url: str = "embedded:",
    *,
    settings: BackendSettings | None = None,
) -> None:
    """Have every engine that vllm-mlx builds from now on keep its prefixes in the store.

    ``budget_gb`` caps what is stored, ``url`` says where (default: the embedded server of the
    user's data folder); ``settings`` says all of it instead of both.  The in-process tier's
    budget is vllm-mlx's own (``--cache-memory-mb``, ``--cache-memory-percent``); when vllm-mlx's
    server starts, the conversations used last are read into it, half of its budget at the most.

    Raises PionMlxCompatError, and changes nothing, where vllm-mlx is missing or a name that
    would be replaced is not what is known here (the message says which and how), or where the
    backend is installed already; ConfigError, a ValueError, for an argument that is none.
    """
    _check_arguments(budget_gb, url, settings)
    if _CURRENT:
        raise PionMlxCompatError("the backend is installed already: uninstall it first")
    seams = [*REPLACED, *CONSULTED, *([MLLM_PREFIX_CACHE, ADD_TO_MLLM] if has_mllm() else [])]
    check(seams)
    if settings is None:
        budget_bytes = int(budget_gb * GIGABYTE)
        settings = BackendSettings(
            LineageOptions(url=url, budget_bytes=budget_bytes, preload_bytes=sys.maxsize)
        )
    anchors, caches = AnchorTexts(), weakref.WeakSet[PionPrefixCache]()
    cache_class = _cache_class(settings, anchors, caches)
    replacements = Replacements()
    replacements.replace(PREFIX_CACHE, cache_class)
    if has_mllm():
        replacements.replace(MLLM_PREFIX_CACHE, _for_image_models(cache_class))
        patch_image_models(replacements)
    patch_scheduler(replacements, anchors)
    patch_steps(replacements)
    patch_start(replacements)
    patch_chat_template(replacements, anchors)
    patch_engine(replacements)
    _CURRENT.append(_Installed(replacements, caches, _add_layer()))


def _check_arguments(budget_gb: object, url: object, settings: object) -> None:
    """Raises ConfigError that names the argument."""
    if isinstance(budget_gb, bool) or not isinstance(budget_gb, int | float):
        raise ConfigError(f"budget_gb must be a number, not {budget_gb!r}")
    if not 0 <= budget_gb <= _MOST_GIGABYTES:  # false for nan, too
        raise ConfigError(f"budget_gb must be from 0 to {_MOST_GIGABYTES:g}, not {budget_gb!r}")
    if not isinstance(url, str):
        raise ConfigError(f"url must be a string, not {url!r}")
    parse_url(url)
    if settings is not None and not isinstance(settings, BackendSettings):
        raise ConfigError(f"settings must be BackendSettings, not {settings!r}")


def uninstall_vllm_mlx_backend() -> None:
    """Put vllm-mlx's own objects back, write what waits, let the store go.

    Engines built meanwhile keep their cache objects, without a store.  What requests in flight
    were about to keep is written where this is called on the thread that generates; else a
    warning says that it is lost.  Does nothing where nothing is installed.  Raises
    PionMlxCompatError where somebody else has replaced one of our names; the rest is put back
    all the same.
    """
    if not _CURRENT:
        return
    installed = _CURRENT.pop()
    _remove_layer(installed.layer)
    for cache in installed.caches:
        cache.close()
    installed.replacements.undo()


def installed_caches() -> list[PionPrefixCache]:
    """The cache objects of the engines of this process."""
    return list(_CURRENT[0].caches) if _CURRENT else []


def _cache_class(
    settings: BackendSettings, anchors: AnchorTexts, caches: weakref.WeakSet[PionPrefixCache]
) -> Callable[[Any, Any], PionPrefixCache]:
    class InstalledPrefixCache(PionPrefixCache):
        """The cache of an engine: built as vllm-mlx builds its own."""

        def __init__(self, model: Any, config: Any) -> None:
            super().__init__(model, config, settings)
            anchors.wanted = anchors.wanted or self.wants_anchors
            self.ahead = anchors.ahead
            caches.add(self)

    return InstalledPrefixCache


def _for_image_models(ours: Callable[[Any, Any], PionPrefixCache]) -> Callable[..., Any]:
    """What builds the cache of an image model's text requests.

    vllm-mlx itself keeps the last logits of a recurrent one, for an exact repeat; no cut can
    be made there, so those models keep vllm-mlx's own cache.  So do those whose caches are
    classes of mlx_vlm, of which none is known here.
    """
    stock = vars(MLLM_PREFIX_CACHE.owner())[MLLM_PREFIX_CACHE.name]

    def build(model: Any, config: Any) -> Any:
        cache = ours(model, config)
        if cache.settings.keeps_nothing or (cache.known and not cache.recurrent):
            return cache
        built = stock(model=model, config=config)
        built.pion_beside = cache  # it knows the model
        cache.stand_back("an image model of this kind keeps vllm-mlx's own cache, in this process")
        return built

    return build


def _add_layer() -> Any:
    """Put the usage layer around vllm-mlx's application; what was added."""
    from starlette.middleware import Middleware

    app = importlib.import_module("vllm_mlx.server").app
    layer = Middleware(UsageLayer)
    app.user_middleware.insert(0, layer)
    app.middleware_stack = None
    return layer


def _remove_layer(layer: Any) -> None:
    app = importlib.import_module("vllm_mlx.server").app
    if layer in app.user_middleware:
        app.user_middleware.remove(layer)
    app.middleware_stack = None
