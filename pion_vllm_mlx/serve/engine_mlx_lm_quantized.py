"""Whether a model's caches can be quantized as mlx-lm's flags say, before a request finds out.

mlx-lm quantizes them in the middle of a request; where that cannot be done the request ends the
engine, and so does every other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.serve.engine_flags import KV_GROUPS


def not_quantized(model: Any, cli: Mapping[str, Any]) -> str | None:
    """Why ``--kv-bits`` of mlx-lm's flags ``cli`` cannot be had of a model; None where it can.

    The model is asked for the rows of one token, of which nothing is computed but their shapes.
    """
    bits, group = cli.get("kv_bits"), cli.get("kv_group_size")
    if bits is None or group is None:
        return None
    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    for cache in caches:
        if not hasattr(cache, "to_quantized"):
            continue
        try:
            cache.to_quantized(group_size=group, bits=bits)
        except NotImplementedError:
            return f"--kv-bits: mlx-lm cannot quantize a {type(cache).__name__} of this model"
        except ValueError as error:
            return _named(cache, group) or f"--kv-bits {bits}: {error}"
    return None


def _named(cache: Any, group: int) -> str | None:
    """The head dimensions that are no multiple of a group; None where all of them are."""
    widths = sorted({int(rows.shape[-1]) for rows in (cache.keys, cache.values)})
    wrong = [width for width in widths if width % group]
    if not wrong:
        return None
    fitting = [size for size in KV_GROUPS if not any(width % size for width in widths)]
    helps = f"{max(fitting)} does" if fitting else "leave out --kv-bits"
    named = " and ".join(map(str, wrong))
    return f"--kv-group-size {group} does not divide this model's head dimension {named}: {helps}"
