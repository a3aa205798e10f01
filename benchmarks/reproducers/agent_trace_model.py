"""The models of the agent's trace: tiny, of random weights, and saying plain text.

A token is one printable character or a marker of the chat template, which renders tools before
the system prompt, so that agents with the same tools share them.  The markers' embeddings are
next to nothing: a model of random weights chooses characters, and each is a visible delta.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pion_vllm_mlx.serve.anthropic_request import chat_body
from tests.models import CONFIGS, tiny_model

Json = dict[str, Any]

#: what the trace calls a family, and mlx-lm's own name for it.
FAMILIES = {"plain": "llama", "sliding-window": "gemma3_text", "hybrid": "qwen3_5"}
WINDOW = 512
_MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
#: space and line end as byte-level tokenizers spell them, and the printable characters.
_CHARACTERS = ("\u0120", "\u010a", *map(chr, range(33, 127)))
VOCABULARY = 104
_CHAT_TEMPLATE = """\
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or first %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- first + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)
    + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def make_folder(folder: Path, family: str) -> Path:
    """Write a model of ``family`` (a key of ``FAMILIES``) to the new ``folder``."""
    kind = FAMILIES[family]
    changes: Json = {"vocab_size": VOCABULARY, "max_position_embeddings": 1 << 17}
    if "text_config" in CONFIGS[kind]:
        changes = {"text_config": {**CONFIGS[kind]["text_config"], **changes}}
    if kind == "gemma3_text":
        changes["sliding_window"] = WINDOW
    model = tiny_model(kind, mx.float32, **changes)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    weights = {name: _quiet(name, one) for name, one in parameters.items()}
    folder.mkdir(parents=True)
    config = {**CONFIGS[kind], "model_type": kind, "eos_token_id": 0, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _write_tokenizer(folder)
    return folder


def _quiet(name: str, weight: mx.array) -> mx.array:
    """The embeddings [vocabulary, width] with those of the markers next to nothing."""
    if "embed_tokens" not in name:
        return weight
    numbers = mx.arange(weight.shape[0])
    speaks = (numbers >= len(_MARKERS)) & (numbers < len(_MARKERS) + len(_CHARACTERS))
    loud: mx.array = mx.where(speaks[:, None], weight, weight * 1e-3)
    return loud


def _write_tokenizer(folder: Path) -> None:
    words = {word: number for number, word in enumerate((*_MARKERS, *_CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_MARKERS[:3]))
    tokenizer.add_tokens(list(_MARKERS[3:]))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _MARKERS[0],
        "pad_token": _MARKERS[0],
        "additional_special_tokens": list(_MARKERS[1:3]),
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Renderer:
    """The tokens of a request, by the folder's tokenizer and template and serve's own rules."""

    def __init__(self, folder: Path) -> None:
        from mlx_lm.utils import load_tokenizer

        self._tokenizer: Any = load_tokenizer(folder)  # type: ignore[no-untyped-call]

    def tokens(self, body: Json) -> list[int]:
        """Of a body of Anthropic Messages, after header removal."""
        chat = chat_body(body)
        return list(
            self._tokenizer.apply_chat_template(
                [_with_objects(message) for message in chat["messages"]],
                tools=chat.get("tools"),
                add_generation_prompt=True,
                tokenize=True,
            )
        )


def _with_objects(message: Json) -> Json:
    """A chat message whose calls have their arguments as objects, as templates expect them."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(given)}}
        for call in message["tool_calls"]
        for given in [call["function"]["arguments"]]
    ]
    return {**message, "tool_calls": calls}
