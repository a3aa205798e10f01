"""Tiny models of every family of mlx-lm that one wide configuration can describe."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from tests.models import CONFIGS, VOCABULARY, WINDOW

LAYERS = 4
_MOST_BYTES = 32 << 20

#: settings by the names that families give them; each takes those that it has.
_WIDE: dict[str, Any] = {
    "hidden_size": 64, "hidden_dim": 64, "d_model": 64, "n_embd": 64, "dim": 64,
    "intermediate_size": 64, "ffn_hidden_size": 64, "mlp_hidden_size": 64,
    "shared_intermediate_size": 64, "intermediate_size_mlp": 64, "hidden_dim_scale_factor": 1.0,
    "moe_intermediate_size": 32, "num_hidden_layers": LAYERS, "n_layers": LAYERS,
    "n_layer": LAYERS, "num_layers": LAYERS, "num_attention_heads": 2, "n_heads": 2,
    "n_head": 2, "num_heads": 2, "num_key_value_heads": 1, "num_kv_heads": 1, "n_kv_heads": 1,
    "num_attention_groups": 1, "head_dim": 32, "global_head_dim": 32,
    "num_global_key_value_heads": 1, "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5,
    "norm_epsilon": 1e-5, "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8, "rope_theta": 10000.0, "rope_local_base_freq": 10000.0,
    "max_position_embeddings": 4096, "n_positions": 4096, "n_ctx": 4096, "max_seq_len": 4096,
    "rotary_dim": 16, "partial_rotary_factor": 0.5, "rope_pct": 0.5, "rotary_pct": 0.5,
    "rotary_base": 10000, "rotary_emb_base": 10000, "tie_word_embeddings": True,
    "attention_bias": False, "mlp_bias": False, "qkv_bias": False, "use_qk_norm": True,
    "use_bias": False, "bias": False, "use_qkv_bias": False, "no_bias": True,
    "query_pre_attn_scalar": 32, "sliding_window": WINDOW, "sliding_window_size": WINDOW,
    "window_size": WINDOW, "sliding_window_pattern": 2, "attention_window_size": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "num_kv_shared_layers": 2, "num_kv_reuse_layers": 2,
    "activation_sparsity_pattern": [0.0] * LAYERS, "altup_num_inputs": 2,
    "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
    "altup_lr_multiplier": 1.0, "laurel_rank": 8, "final_logit_softcapping": 30.0,
    "logit_scale": 0.5, "logits_scaling": 1.0, "attention_multiplier": 0.1,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "scale_depth": 1.4,
    "dim_model_base": 64, "scale_emb": 1.0, "attn_logit_softcapping": 0.0, "num_experts": 0,
    "kv_channels": 32, "loop_num": 2, "loop_window_size": WINDOW, "no_rope_layer_interval": 2,
    "multi_query_group_num": 1, "multi_query_attention": True, "padded_vocab_size": VOCABULARY,
    "add_bias_linear": False, "add_qkv_bias": True, "rope_ratio": 1, "emb_dropout_prob": 0.0,
    "attn_dropout_prob": 0.0, "resid_dropout_prob": 0.0, "conv_window": 2,
    "num_swa_attention_heads": 2, "num_swa_key_value_heads": 1, "sliding_window_layers": [0, 2],
    "use_parallel_residual": True, "hidden_act": "silu", "activation": "silu",
    "mlp_type": "swiglu", "attention_chunk_size": WINDOW,
}  # fmt: skip


def names() -> list[str]:
    """The models of the installed mlx-lm."""
    package = importlib.import_module("mlx_lm.models")
    return [found.name for found in pkgutil.iter_modules(package.__path__)]


def build(name: str, **changes: Any) -> Any:
    """A model of a family with seeded float32 weights, or None where it needs more settings.

    ``changes`` replace settings.
    """
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
        config = {**_WIDE, **CONFIGS.get(name, {}), "model_type": name, **changes}
        known = inspect.signature(module.ModelArgs).parameters
        mx.random.seed(7)
        model = module.Model(module.ModelArgs(**{k: v for k, v in config.items() if k in known}))
        if sum(array.nbytes for _, array in tree_flatten(model.parameters())) > _MOST_BYTES:
            return None
        model.update(tree_map(_weight, model.parameters()))
        model.eval()
        model(mx.array([[1, 2, 3]]))
    except (Exception, SystemExit):  # noqa: BLE001  (whatever a family asks for, or lacks)
        return None
    return model


def _weight(like: mx.array) -> mx.array:
    if like.ndim < 2:
        return like + 0.05 * mx.random.normal(like.shape)
    weight: mx.array = mx.random.normal(like.shape) * float(like.shape[-1]) ** -0.5
    return weight
