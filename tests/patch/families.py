"""Tiny models of the families of mlx-lm: one wide configuration, and what some want beside it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import types
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
    "dim_model_base": 64, "scale_emb": 1.0, "attn_logit_softcapping": 0.0,
    "kv_channels": 32, "loop_num": 2, "loop_window_size": WINDOW, "no_rope_layer_interval": 2,
    "multi_query_group_num": 1, "multi_query_attention": True, "padded_vocab_size": VOCABULARY,
    "add_bias_linear": False, "add_qkv_bias": True, "rope_ratio": 1, "emb_dropout_prob": 0.0,
    "attn_dropout_prob": 0.0, "resid_dropout_prob": 0.0, "conv_window": 2,
    "num_swa_attention_heads": 2, "num_swa_key_value_heads": 1, "sliding_window_layers": [0, 2],
    "use_parallel_residual": True, "hidden_act": "silu", "activation": "silu",
    "mlp_type": "swiglu", "attention_chunk_size": WINDOW,
}  # fmt: skip


#: the same of experts: few, of which two see a token.
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2,
    "moe_router_topk": 2, "n_shared_experts": 1, "num_shared_experts": 1, "num_shared_expert": 1,
    "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "score_function": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "norm_expert_weight": True, "use_expert_bias": False,
    "moe_router_enable_expert_bias": False, "router_aux_loss_coef": 0.0,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "moe_layer_interval": 1, "moe_layer_start_index": 0,
    "interleave_moe_layer_step": 2, "num_hidden_dense_layers": 1, "num_nextn_predict_layers": 0,
    "moe_intermediate": 32, "expert_ffn_hidden_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "ff_intermediate_size": 64, "n_inner": 64,
    "zero_expert_type": "identity", "zero_expert_num": 1, "use_mixed_mlp_moe": True,
}  # fmt: skip

#: latent attention, and other kinds that some families describe with words of their own.
_KINDS: dict[str, Any] = {
    "attention_method": "MLA", "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "linear_bias": False, "post_norm": False, "qk_norm": True,
    "clip_qkv": None, "parametric_layers": [], "head_wise": False, "use_gemma_rms_norm": False,
    "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "use_cla": True,
    "cla_share_factor": 2, "gegelu_limit": 20.0, "dense_attention_every_n_layers": 2,
    "blocksparse_block_size": 64, "blocksparse_num_local_blocks": 4, "blocksparse_vert_stride": 4,
    "hybrid_layer_pattern": [1, 0, 1, 0], "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1, "swa_head_dim": 32, "swa_v_head_dim": 32,
    "swa_rope_theta": 10000.0, "add_swa_attention_sink_bias": False,
    "add_full_attention_sink_bias": False, "no_rope_layers": [1, 1, 0, 1],
    "attn_temperature_tuning": 0,
}  # fmt: skip

#: what a family alone wants otherwise.
_OWN: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": {}},
    "glm4_moe": {"rope_scaling": {}},
    # mlx-lm 0.31's own fails where a chunk ends within what it is asked for
    "llama4": {"num_experts_per_tok": 1, "rope_scaling": {}, "attention_chunk_size": 8192},
    "llama4_text": {"num_experts_per_tok": 1},
    "minicpm3": {"rope_scaling": {}},
    "longcat_flash": {"rope_scaling": {}},
    "deepseek_v2": {"rope_scaling": {"factor": 1.0, "original_max_position_embeddings": 4096}},
    "hunyuan": {"rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0}},
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [1.0] * 16,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
            "original_max_position_embeddings": 4096,
        }
    },
    "mimo_v2_flash": {"moe_layer_freq": [0, 1, 1, 1]},
    "olmo": {"embedding_size": VOCABULARY},
    "plamo": {"num_attention_heads": 8, "hidden_size": 256},
    "longcat_flash_ngram": {"rope_scaling": {}},
    "step3p5": {"moe_num_experts": 16},
}

#: families whose settings lie in a text_config, and of which other family these are.
_INNER = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n", "gemma4": "gemma4_text",
    "llama4": "llama4_text", "mistral3": "llama", "pixtral": "llama", "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe", "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}  # fmt: skip


#: what no settings here describe, and why.
LEFT_OUT = {
    "baichuan_m1": "its convolutions are recurrent layers, as those of lfm2",
    "bailing_hybrid": "linear layers are recurrent, as those of qwen3_next",
    "bailing_moe_linear": "linear layers are recurrent, as those of qwen3_next",
    "bitnet": "its layers run on Metal alone",
    "dbrx": "settings in groups of its own; its attention is llama's",
    "exaone_moe": "settings a layer; its attention is exaone4's",
    "glm_moe_dsa": "deepseek_v32 under another name",
    "granitemoehybrid": "mamba layers are recurrent, as those of falcon_h1",
    "jamba": "mamba layers are recurrent, as those of falcon_h1",
    "kimi_k25": "a shell around deepseek_v3",
    "kimi_k3": "linear layers are recurrent, as those of qwen3_next",
    "kimi_linear": "linear layers are recurrent, as those of qwen3_next",
    "kimi_vl": "a shell around deepseek_v3",
    "lfm2-vl": "a shell around lfm2",
    "lfm2": "with mlx-lm 0.31 under other settings; its convolutions are recurrent layers",
    "lfm2_moe": "its convolutions are recurrent layers, as those of lfm2",
    "lille-130m": "settings of its own; its attention is llama's",
    "mamba2": "recurrent, as mamba",
    "mellum": "rope settings a kind of layer; its attention is qwen3_moe's",
    "minimax_m3_vl": "a shell around a model whose settings are not known here",
    "ministral3": "scales of positions in its own words; its attention is llama's",
    "mistral4": "scales of positions in its own words; latent attention, as deepseek_v3",
    "muse_spark": "a shell around a model whose settings are not known here",
    "nemotron-nas": "settings a block; its attention is llama's",
    "nemotron_h": "mamba layers are recurrent, as those of falcon_h1",
    "olmo": "mlx-lm's own does not run: it adds the word that stands for its mask to scores",
    "olmo_hybrid": "linear layers are recurrent, as those of qwen3_next",
    "openelm": "settings in groups of its own; heads a layer",
    "phi3small": "block-sparse attention of its own, whose tables small settings overrun",
    "phixtral": "has no small settings: 4.8 GB of weights",
    "prism_hadamard_qwen35": "linear layers are recurrent, as those of qwen3_next",
    "recurrent_gemma": "recurrent layers",
    "spark2_5": "rope settings a kind of layer",
}


#: packages that a family looks for and does not use.
_LOOKED_FOR = {"olmo": "hf_olmo"}


class NotBuiltError(Exception):
    """No model, or none of these settings: the message says why."""


def names() -> list[str]:
    """The modules of models of the installed mlx-lm."""
    package = importlib.import_module("mlx_lm.models")
    return [found.name for found in pkgutil.iter_modules(package.__path__)]


def is_model(name: str) -> bool:
    """Whether a module of mlx-lm is a model; others are what models share."""
    if name in _LOOKED_FOR:
        return True
    return hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "Model")


def build(name: str, **changes: Any) -> Any:
    """A model of a family with seeded float32 weights, which runs. Raises NotBuiltError.

    ``changes`` replace settings.
    """
    if name in LEFT_OUT:
        raise NotBuiltError(f"{name}: {LEFT_OUT[name]}")
    model = made(name, **changes)
    try:
        mx.eval(model(mx.array([[1, 2, 3]])))
    except Exception as error:
        raise NotBuiltError(f"{name}: {type(error).__name__}: {error}") from error
    return model


def made(name: str, **changes: Any) -> Any:
    """The same of a model that nobody has asked yet, be it one that does not run."""
    mx.random.seed(7)
    if name in _LOOKED_FOR:
        sys.modules.setdefault(_LOOKED_FOR[name], types.ModuleType(_LOOKED_FOR[name]))
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
        model = module.Model(_arguments(module.ModelArgs, name, changes))
        size = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        if size > _MOST_BYTES:
            raise NotBuiltError(f"{name}: {size} bytes of weights")
        model.update(tree_map(_weight, model.parameters()))
        model.eval()
    except (Exception, SystemExit) as error:  # whatever a family asks for, or lacks
        raise NotBuiltError(f"{name}: {type(error).__name__}: {error}") from error
    return model


def _arguments(kind: Any, name: str, changes: dict[str, Any]) -> Any:
    """The settings of a family, those that it knows."""
    config = {**_WIDE, **_EXPERTS, **_KINDS, **CONFIGS.get(name, {}), **_OWN.get(name, {})}
    config |= {"model_type": name, **changes}
    if name in _INNER:
        inner = {**config, "model_type": _INNER[name]}
        return kind.from_dict({"model_type": name, "text_config": inner, "vocab_size": VOCABULARY})
    known = inspect.signature(kind).parameters
    return kind(**{setting: value for setting, value in config.items() if setting in known})


def _weight(like: mx.array) -> mx.array:
    if like.ndim < 2:
        return like + 0.05 * mx.random.normal(like.shape)
    weight: mx.array = mx.random.normal(like.shape) * float(like.shape[-1]) ** -0.5
    return weight
