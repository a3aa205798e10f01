"""A six-layer Gemma 3 as a GGUF, small enough to convert in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.demo.tiny_vocabulary import vocabulary

HIDDEN, HEADS, HEAD_DIM, FEED_FORWARD, BLOCKS = 32, 2, 32, 64, 6


@dataclass
class TinyGguf:
    """The file's content: ``dense`` are the float32 values that a conversion must give."""

    path: Path
    dense: dict[str, NDArray[np.float32]] = field(default_factory=dict)


def _shapes(num_tokens: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (num_tokens, HIDDEN),
        "output_norm": (HIDDEN,),
    }
    for block in range(BLOCKS):
        for name, shape in {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (HEAD_DIM, HIDDEN),
            "attn_v": (HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "attn_q_norm": (HEAD_DIM,),
            "attn_k_norm": (HEAD_DIM,),
            "attn_norm": (HIDDEN,),
            "post_attention_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "post_ffw_norm": (HIDDEN,),
            "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_up": (FEED_FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD),
        }.items():
            shapes[f"blk.{block}.{name}"] = shape
    return shapes


def _q8_0(dense: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Blocks of 32 values: a float16 scale, then 32 signed bytes; and what they stand for."""
    blocks = dense.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
    codes = np.round(blocks / scales.astype(np.float32)).clip(-127, 127).astype(np.int8)
    packed = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    meant = scales.astype(np.float32) * codes.astype(np.float32)
    return packed.reshape(dense.shape[0], -1), meant.reshape(dense.shape)


def _add_settings(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(16)
    pieces, scores, kinds = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)


def write_tiny_gguf(
    path: Path, without: str | None = None, extra: str | None = None, architecture: str = "gemma3"
) -> TinyGguf:
    """Write the model to ``path``, less the tensor ``without``, plus one named ``extra``."""
    random = np.random.default_rng(7)
    result = TinyGguf(path)
    writer = gguf.GGUFWriter(path, architecture)
    _add_settings(writer)
    shapes = _shapes(len(vocabulary()[0]))
    if extra is not None:
        shapes[extra] = (HIDDEN,)
    for name, shape in shapes.items():
        if name == without:
            continue
        dense = random.normal(0, 0.3, shape).astype(np.float32)
        if name.endswith("norm"):
            result.dense[name] = dense
            writer.add_tensor(f"{name}.weight", dense + np.float32(1))
        else:
            packed, result.dense[name] = _q8_0(dense)
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return result
