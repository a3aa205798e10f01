"""Tiny random-weight models, one a family; the same seed gives the same weights.

``tiny_model(name, dtype)`` works in every supported mlx-lm. The sizes are chosen so
that windows are short (16 tokens) and head widths suit 8- and 4-bit quantization.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

VOCABULARY = 128
WINDOW = 16

_ATTENTION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_LATENT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "first_k_dense_replace": 8,
    "max_position_embeddings": 4096,
}
_TEXT = {**_ATTENTION, **_LINEAR, "num_hidden_layers": 4, "model_type": "qwen3_5"}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _ATTENTION,
    "gemma3_text": {
        **_ATTENTION,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
    },
    "qwen3_next": {
        **_ATTENTION,
        **_LINEAR,
        "num_hidden_layers": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "mlp_only_layers": [],
        "moe_intermediate_size": 0,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5": {"text_config": _TEXT},
    "mamba": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "rwkv7": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "norm_eps": 1e-5,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "falcon_h1": {
        **_ATTENTION,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 2,
        "mamba_chunk_size": 16,
    },
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "index_head_dim": 32, "index_n_heads": 2, "index_topk": 8},
}
NAMES = tuple(CONFIGS)


def tiny_model(name: str, dtype: mx.Dtype = mx.float32, **changes: Any) -> Any:
    """A model of family ``name`` with seeded weights of ``dtype``, evaluated.

    ``changes`` replace settings of its configuration.
    """
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {**CONFIGS[name], "model_type": name, **changes}
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda a: _weight(a).astype(dtype), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _weight(like: mx.array) -> mx.array:
    """Random where mlx-lm starts from zeros or ones too, so that every weight matters."""
    if like.ndim < 2:
        return like + 0.05 * mx.random.normal(like.shape)
    weight: mx.array = mx.random.normal(like.shape) * float(like.shape[-1]) ** -0.5
    return weight


def token_ids(count: int, seed: int = 3) -> list[int]:
    """``count`` token ids, a longer list beginning with the shorter one."""
    state, ids = seed, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        ids.append((state >> 8) % VOCABULARY)
    return ids
