"""The client's side. Adapters for other projects load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pion_vllm_mlx.cache.attention_client import PionAttentionClient
    from pion_vllm_mlx.cache.externalized import (
        ExternalizedAttentionConfig,
        ExternalizedAttentionManager,
    )
    from pion_vllm_mlx.cache.externalized_torch import (
        ExternalizedAttentionLayer,
        patch_model_for_externalized_attention,
    )
    from pion_vllm_mlx.cache.kv_client import PionKVClient, PionLayerClient
    from pion_vllm_mlx.cache.lmcache import LMCacheRemoteBackend
    from pion_vllm_mlx.cache.pion_store import PionStore
    from pion_vllm_mlx.cache.vllm_mlx_backend import (
        install_vllm_mlx_backend,
        uninstall_vllm_mlx_backend,
    )

__all__ = [
    "ExternalizedAttentionConfig",
    "ExternalizedAttentionLayer",
    "ExternalizedAttentionManager",
    "LMCacheRemoteBackend",
    "PionAttentionClient",
    "PionKVClient",
    "PionLayerClient",
    "PionStore",
    "install_vllm_mlx_backend",
    "patch_model_for_externalized_attention",
    "uninstall_vllm_mlx_backend",
]

_HOME = {
    "ExternalizedAttentionConfig": "externalized",
    "ExternalizedAttentionLayer": "externalized_torch",
    "ExternalizedAttentionManager": "externalized",
    "LMCacheRemoteBackend": "lmcache",
    "PionAttentionClient": "attention_client",
    "PionKVClient": "kv_client",
    "PionLayerClient": "kv_client",
    "PionStore": "pion_store",
    "install_vllm_mlx_backend": "vllm_mlx_backend",
    "patch_model_for_externalized_attention": "externalized_torch",
    "uninstall_vllm_mlx_backend": "vllm_mlx_backend",
}


def __getattr__(name: str) -> object:
    """Load an adapter from its module on first use; those for torch need torch."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
