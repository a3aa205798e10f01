"""A folder that serve loads: a Llama of seeded random weights and a tokenizer of bytes.

One byte of text is one token. The rest of the vocabulary are words that no text becomes, so that
whatever a random model says can be decoded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .models import LLAMA, SHAPES, random_llama

GROUP_SIZE = 64
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_model(folder: Path, shape: str, dtype: mx.Dtype, bits: int | None) -> Path:
    """Write a model of ``shape`` to the new ``folder``, quantized in groups of 64 if ``bits``."""
    folder.mkdir()
    config: dict[str, Any] = {**LLAMA, **SHAPES[shape], "tie_word_embeddings": True}
    # no reply ends before its limit
    config |= {"eos_token_id": config["vocab_size"] - 1}
    if bits is not None:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(random_llama(shape, dtype, bits=bits).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _write_tokenizer(folder, config["vocab_size"])
    return folder


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = [*MARKERS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{number}" for number in range(len(words), vocabulary - 1)] + ["<|end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={w: n for n, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*MARKERS, words[-1]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": words[-1],
        "pad_token": MARKERS[0],
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
