"""Externalized attention as a torch module. Importing this needs torch.

A wrapped module stays as it is until keys and values of its layer are stored: then
decode steps attend to them at the server, and to the local cache here.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.externalized import (
    ExternalizedAttentionConfig,
    ExternalizedAttentionManager,
    Partial,
    local_attention,
    merge,
)
from pion_vllm_mlx.errors import StoreUnavailable

torch: Any = importlib.import_module("torch")

#: how an attention module is named below its layer.
_ATTENTION_NAMES = ("self_attn", "attn", "attention")


class ExternalizedAttentionLayer(torch.nn.Module):  # type: ignore[misc]
    """The attention of one layer, external if the configuration says so."""

    def __init__(
        self,
        layer_id: int,
        config: ExternalizedAttentionConfig,
        manager: ExternalizedAttentionManager,
        original_module: Any = None,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.config = config
        self.manager = manager
        self.original_module = original_module

    @property
    def is_external(self) -> bool:
        """Whether this layer's prefix may live at the server."""
        return self.layer_id in self.config.external_layers

    def store_kv(self, keys: Any, values: Any) -> bool:
        """Append keys ``[n, key_dim]`` and values ``[n, value_dim]``; whether they are there."""
        if not self.is_external:
            return False
        return self.manager.store_prefill_kv(self.layer_id, _floats(keys), _floats(values))

    def forward(
        self,
        query: Any,
        key_value_cache: Any = None,
        attention_mask: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Attention of ``query [..., H_q * D]`` over the stored prefix and the local cache.

        ``key_value_cache`` is ``(keys [n, key_dim], values [n, value_dim])`` or None,
        ``attention_mask [n]`` is added to the local scores. Returns ``[..., H_q * Dv]`` in the
        query's dtype. Without a stored prefix the original module answers. Raises
        StoreUnavailable when the server has no answer and nothing local may stand in.
        """
        stored = self.is_external and self.manager.get_layer_token_count(self.layer_id) > 0
        if not stored and self.original_module is not None:
            return self.original_module(query, key_value_cache, attention_mask, *more, **options)
        config = self.config
        flat = _floats(query).reshape(-1, config.num_heads, config.head_key_dim)
        outputs = [self._attend(one, key_value_cache, attention_mask) for one in flat]
        if any(output is None for output in outputs):
            if config.fallback_to_local and self.original_module is not None:
                return self.original_module(
                    query, key_value_cache, attention_mask, *more, **options
                )
            raise StoreUnavailable(f"layer {self.layer_id}: no attention over the stored prefix")
        width = config.num_heads * config.head_value_dim
        result = torch.from_numpy(np.stack([o.out for o in outputs if o is not None]))
        return result.reshape(*query.shape[:-1], width).to(query.dtype).to(query.device)

    def _attend(self, query: Any, cache: Any, mask: Any) -> Partial | None:
        """Both parts of one query's attention, merged; None without the server's part."""
        config = self.config
        parts: list[Partial] = []
        if self.manager.get_layer_token_count(self.layer_id):
            stored = self.manager.query(self.layer_id, query)
            if stored is None:
                return None
            parts.append(stored)
        if cache is not None:
            keys = _floats(cache[0]).reshape(-1, config.num_kv_heads, config.head_key_dim)
            values = _floats(cache[1]).reshape(-1, config.num_kv_heads, config.head_value_dim)
            bias = None if mask is None else _floats(mask).reshape(-1)
            parts.append(local_attention(query, keys, values, config.score_scale, bias))
        return merge(parts) if parts else None


def patch_model_for_externalized_attention(
    model: Any, config: ExternalizedAttentionConfig
) -> ExternalizedAttentionManager:
    """Wrap the attention of the external layers; ``model._pion_attention_manager`` serves them.

    Raises ValueError when the model has no list of layers with an attention module.
    """
    manager = ExternalizedAttentionManager(config)
    layers = _layers(model)
    for layer_id in config.external_layers:
        layer = layers[layer_id]
        for name in _ATTENTION_NAMES:
            original = layer._modules.get(name)
            if original is not None:
                wrapped = ExternalizedAttentionLayer(layer_id, config, manager, original)
                setattr(layer, name, wrapped)
                break
        else:
            raise ValueError(f"layer {layer_id} has no module {' or '.join(_ATTENTION_NAMES)}")
    model._pion_attention_manager = manager
    return manager


def _layers(model: Any) -> Any:
    """The list of a model's layers."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("layers", "h") and isinstance(module, torch.nn.ModuleList):
            return module
    raise ValueError("the model has no list of layers")


def _floats(tensor: Any) -> Any:
    """A tensor or array as float32 in numpy."""
    if isinstance(tensor, torch.Tensor):
        return tensor.detach().to(torch.float32).cpu().numpy()
    return np.asarray(tensor, np.float32)
