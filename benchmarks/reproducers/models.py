"""Models of random weights, the same in every process, and the first token after a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

SUFFIX_TOKENS = 16

LLAMA: dict[str, Any] = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}

SHAPES: dict[str, dict[str, Any]] = {
    # the caches of a 1B model, and next to nothing to compute
    "thin": {
        "num_hidden_layers": 16,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128,
    },
    # for a machine without a GPU: all of it is computed in seconds
    "small": {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    },
    "1b": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
    },
    "8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
}


class RowsOnly(llama.Model):
    """A Llama whose long prompts become random rows: what is restored need not be computed."""

    def __call__(self, inputs: mx.array, cache: Any = None, *more: Any, **named: Any) -> mx.array:
        """As a Llama, or random rows into ``cache`` and no logits."""
        tokens = inputs.shape[1]
        if cache is None or tokens <= SUFFIX_TOKENS:
            logits: mx.array = super().__call__(inputs, cache, *more, **named)
            return logits
        shape = (1, int(self.args.num_key_value_heads or 0), tokens, int(self.args.head_dim or 0))
        for number, layer in enumerate(cache):
            rows = mx.random.normal(shape, key=mx.random.key(number)).astype(self.row_dtype)
            layer.update_and_fetch(rows, rows[..., ::-1])
        return mx.zeros((1, 1, 1))

    @property
    def row_dtype(self) -> mx.Dtype:
        """What its caches hold."""
        dtype: mx.Dtype = self.layers[0].self_attn.k_proj.weight.dtype
        return dtype


def random_llama(shape: str, dtype: mx.Dtype, *, bits: int | None = None) -> Any:
    """A Llama of seeded random weights, quantized in groups of 64 if ``bits`` is given."""
    config = {**LLAMA, **SHAPES[shape], "tie_word_embeddings": True}
    mx.random.seed(7)
    kind = RowsOnly if shape == "thin" else llama.Model
    model = kind(llama.ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)  # type: ignore[attr-defined]
    model.eval()
    for layer in model.layers:  # one at a time: the unquantized weights are never all there
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def random_ids(count: int, vocabulary: int, seed: int) -> list[int]:
    """``count`` token ids, another list for every seed."""
    key = mx.random.key(seed)
    return [int(token) for token in np.array(mx.random.randint(0, vocabulary, (count,), key=key))]


def first_token(model: Any, ids: Sequence[int], cache: list[Any] | None = None) -> int:
    """The greedy token after ``ids``, as mlx-lm's own ``generate_step`` gives it."""
    step = generate_step(mx.array(list(ids)), model, max_tokens=1, prompt_cache=cache)
    token, _ = next(iter(step))
    return int(token)
