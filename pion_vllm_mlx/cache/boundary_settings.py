"""What can be said about ``boundary_protect`` before there is a cache; needs no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.formats import get_format


def check_settings(model: Any, vquant: str | None, protect: int) -> None:
    """Raises ConfigError for a ``boundary_protect`` that can be seen to be impossible."""
    if protect < 0:
        raise ConfigError("boundary_protect must not be negative")
    if not protect or vquant is None or get_format(vquant).block == 1:
        return
    if model is None:
        raise ConfigError(f"boundary_protect with {vquant} needs a model")
    width = attention_width(model)
    if width is not None:
        check_width(vquant, width)


def check_width(vquant: str, width: int) -> None:
    """Raises ConfigError where the blocks of a format do not fit the width."""
    block = get_format(vquant).block
    if width % block:
        raise ConfigError(f"boundary_protect with {vquant}: {width} is not a multiple of {block}")


def attention_width(model: Any) -> int | None:
    """``H_kv * D`` as the model's arguments have it; None where they don't say."""
    settings = _settings(vars(model).get("args"))
    for name in ("text_config", "args"):
        inner = settings.get(name)
        if isinstance(inner, Mapping) and "num_attention_heads" not in settings:
            settings = inner
    heads = settings.get("num_attention_heads")
    kv_heads = settings.get("num_key_value_heads") or heads
    dim = settings.get("head_dim") or settings.get("attention_head_dim")
    hidden = settings.get("hidden_size")
    if dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        dim = hidden // heads
    if "kv_lora_rank" in settings or not isinstance(dim, int) or not isinstance(kv_heads, int):
        return None
    return kv_heads * dim


def _settings(args: Any) -> Mapping[str, Any]:
    if is_dataclass(args) and not isinstance(args, type):
        return asdict(args)
    return args if isinstance(args, Mapping) else {}


def asked_format(vquant: str | None, protect: int) -> str | None:
    """What the key says about the storage formats that were asked for."""
    if not protect:
        return vquant
    return f"{vquant or 'native'}, boundary_protect {protect}"
