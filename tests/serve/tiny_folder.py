"""A model folder that mlx-lm loads: a tiny random model, a byte-level tokenizer, a chat template.

The tokenizer knows every byte, so any text is some tokens, and the markers of a chat, of
thinking and of tool calls, which are one token each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models import CONFIGS, tiny_model

MARKERS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
VOCABULARY = 264  # 256 bytes and the markers, rounded up

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% if not loop.first %}
{{- raise_exception('the system message must be first') }}{% endif %}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}"""

#: a template that has no system turns: the system prompt is the beginning of the first user's.
FOLDING = """\
{%- set system = messages[0].role == 'system' %}
{%- for message in (messages[1:] if system else messages) %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if system and loop.first %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def make_folder(
    folder: Path,
    family: str = "llama",
    dtype: mx.Dtype = mx.float32,
    template: str = CHAT_TEMPLATE,
    **changes: Any,
) -> Path:
    """Write a model of ``family`` to the new ``folder``; the same arguments, the same weights."""
    folder.mkdir(parents=True)
    config = {**CONFIGS[family], "model_type": family, "eos_token_id": 0, **changes}
    if "text_config" in config:
        changes = {"text_config": {**config["text_config"], "vocab_size": VOCABULARY}, **changes}
    else:
        changes = {"vocab_size": VOCABULARY, **changes}
    model = tiny_model(family, dtype, **changes)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    write_tokenizer(folder, template)
    return folder


def write_tokenizer(folder: Path, template: str = CHAT_TEMPLATE) -> None:
    """Write the tokenizer's files, without training: one token a byte and one a marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate((*MARKERS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS[:3]))
    tokenizer.add_tokens(list(MARKERS[3:]))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MARKERS[0],
        "pad_token": MARKERS[0],
        "additional_special_tokens": list(MARKERS[1:3]),
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
