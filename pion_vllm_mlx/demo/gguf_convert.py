"""A Gemma 3 GGUF, converted to a folder that ``mlx_lm.load`` reads.

The quantized tensors become float32, the fast type on a CPU, written one slice of rows after
the other so that the conversion needs little memory. GGUF stores a norm's weight as 1 + w,
mlx-lm's Gemma adds the 1 itself: it is taken off here. A tensor without a known place, or a
place without its tensor, ends the conversion: a model with a hole would still talk.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.demo.gguf_tokenizer import Vocabulary, write_tokenizer
from pion_vllm_mlx.errors import ConfigError

Progress = Callable[[int], object]
"""Called with the number of bytes of weights that have just been written."""

WEIGHTS = "model.safetensors"
SLICE_ROWS = 8192

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OPTIONAL = {"output"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """A GGUF opened for conversion: its settings, vocabulary and tensors."""

    def __init__(self, path: Path) -> None:
        # The package of the `demo` extra: only a conversion needs it.
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        architecture = self.setting("general.architecture")
        if architecture != "gemma3":
            raise ConfigError(f"{path.name} holds a {architecture} model, not gemma3")

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of ``key``; raises ConfigError if there is neither value nor default."""
        field = self._reader.fields.get(key)
        value = default if field is None else field.contents()
        if value is None:
            raise ConfigError(f"the GGUF has no {key}")
        return value

    def config(self) -> dict[str, Any]:
        """``config.json`` of the model as mlx-lm's ``gemma3_text`` names its arguments."""
        head_dim = self.setting("gemma3.attention.key_length")
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "torch_dtype": "float32",
            "hidden_size": self.setting("gemma3.embedding_length"),
            "num_hidden_layers": self.setting("gemma3.block_count"),
            "intermediate_size": self.setting("gemma3.feed_forward_length"),
            "num_attention_heads": self.setting("gemma3.attention.head_count"),
            "num_key_value_heads": self.setting("gemma3.attention.head_count_kv"),
            "head_dim": head_dim,
            "query_pre_attn_scalar": head_dim,
            "rms_norm_eps": self.setting("gemma3.attention.layer_norm_rms_epsilon"),
            "rope_theta": self.setting("gemma3.rope.freq_base"),
            "rope_local_base_freq": 10_000.0,
            "sliding_window": self.setting("gemma3.attention.sliding_window"),
            "sliding_window_pattern": 6,
            "max_position_embeddings": self.setting("gemma3.context_length"),
            "vocab_size": len(self.setting("tokenizer.ggml.tokens")),
            "bos_token_id": self.setting("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.setting("tokenizer.ggml.eos_token_id"),
        }

    def vocabulary(self) -> Vocabulary:
        """The pieces, scores and kinds of the vocabulary, and the ids with a meaning."""
        return Vocabulary(
            pieces=self.setting("tokenizer.ggml.tokens"),
            scores=self.setting("tokenizer.ggml.scores"),
            kinds=self.setting("tokenizer.ggml.token_type"),
            bos_id=self.setting("tokenizer.ggml.bos_token_id"),
            eos_id=self.setting("tokenizer.ggml.eos_token_id"),
            unknown_id=self.setting("tokenizer.ggml.unknown_token_id"),
            padding_id=self.setting("tokenizer.ggml.padding_token_id"),
        )

    def tensors(self) -> dict[str, Any]:
        """The tensors by the names that mlx-lm gives them."""
        places = tensor_places(self.setting("gemma3.block_count"))
        by_name = {tensor.name: tensor for tensor in self._reader.tensors}
        unknown = sorted(by_name.keys() - places.keys())
        missing = sorted(places.keys() - by_name.keys() - {f"{name}.weight" for name in _OPTIONAL})
        if unknown or missing:
            raise ConfigError(
                f"the GGUF's tensors are not those of gemma3: unknown {unknown}, missing {missing}"
            )
        return {places[name]: by_name[name] for name in places if name in by_name}


def tensor_places(num_blocks: int) -> dict[str, str]:
    """Where each tensor of a GGUF with ``num_blocks`` layers goes in mlx-lm's model."""
    places = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _TOP.items()}
    for block in range(num_blocks):
        for ours, theirs in _BLOCK.items():
            places[f"blk.{block}.{ours}.weight"] = f"model.layers.{block}.{theirs}.weight"
    return places


def float32_slices(name: str, tensor: Any) -> Iterator[NDArray[np.float32]]:
    """The rows of one GGUF tensor as float32, ``SLICE_ROWS`` at a time; norms without their 1."""
    from gguf.quants import dequantize

    is_norm = name.endswith("norm.weight")
    for start in range(0, len(tensor.data), SLICE_ROWS):
        rows = dequantize(tensor.data[start : start + SLICE_ROWS], tensor.tensor_type)
        rows = rows.astype("<f4", copy=False)
        yield rows - np.float32(1) if is_norm else rows


def _header(tensors: dict[str, Any]) -> bytes:
    """The safetensors header: u64 length, JSON padded with spaces to eight bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def weight_bytes(source: GgufFile) -> int:
    """How many bytes of float32 weights the conversion of ``source`` writes."""
    return sum(4 * int(tensor.n_elements) for tensor in source.tensors().values())


def convert(source: GgufFile, folder: Path, progress: Progress) -> None:
    """Write weights, config and tokenizer of ``source`` into the existing ``folder``."""
    tensors = source.tensors()
    with open(folder / WEIGHTS, "wb") as file:
        file.write(_header(tensors))
        for name, tensor in tensors.items():
            for rows in float32_slices(name, tensor):
                file.write(np.ascontiguousarray(rows).data)
                progress(rows.nbytes)
    text = json.dumps(source.config(), indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")
    write_tokenizer(source.vocabulary(), folder)
