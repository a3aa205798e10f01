"""A converted GGUF holds the values, settings and vocabulary that the GGUF means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="comes with the demo extra")

from pion_vllm_mlx.demo.gguf_convert import WEIGHTS, GgufFile, convert, weight_bytes
from pion_vllm_mlx.errors import ConfigError
from tests.demo.tiny_gguf import BLOCKS, TinyGguf, write_tiny_gguf
from tests.demo.tiny_vocabulary import vocabulary

PLACES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "blk.1.attn_q": "model.layers.1.self_attn.q_proj.weight",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.attn_k_norm": "model.layers.0.self_attn.k_norm.weight",
    "blk.0.attn_norm": "model.layers.0.input_layernorm.weight",
    "blk.1.post_attention_norm": "model.layers.1.post_attention_layernorm.weight",
    "blk.1.ffn_norm": "model.layers.1.pre_feedforward_layernorm.weight",
    "blk.1.post_ffw_norm": "model.layers.1.post_feedforward_layernorm.weight",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj.weight",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TinyGguf, int]:
    folder = tmp_path_factory.mktemp("converted")
    tiny = write_tiny_gguf(folder / "tiny.gguf")
    source = GgufFile(tiny.path)
    written: list[int] = []
    convert(source, folder, written.append)
    assert sum(written) == weight_bytes(source)
    return folder, tiny, sum(written)


def _weights(folder: Path) -> Any:
    numpy_reader = pytest.importorskip("safetensors.numpy")
    return numpy_reader.load_file(folder / WEIGHTS)


def test_weights_are_the_dequantized_values_in_safetensors_own_reader(
    converted: tuple[Path, TinyGguf, int],
) -> None:
    folder, tiny, _ = converted
    weights = _weights(folder)
    assert len(weights) == len(tiny.dense) == 2 + 13 * BLOCKS
    for theirs, ours in PLACES.items():
        expected = tiny.dense[theirs]
        assert weights[ours].dtype == np.float32
        # A norm lost its 1 in float32, so its last bits may differ.
        np.testing.assert_allclose(weights[ours], expected, rtol=0, atol=2e-7)
        if not theirs.endswith("norm"):
            np.testing.assert_array_equal(weights[ours], expected)


def test_weights_do_not_depend_on_the_slice_they_are_written_in(
    converted: tuple[Path, TinyGguf, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tiny, _ = converted
    monkeypatch.setattr("pion_vllm_mlx.demo.gguf_convert.SLICE_ROWS", 7)
    convert(GgufFile(tiny.path), tmp_path, lambda _: None)
    assert (tmp_path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_mlx_lm_loads_the_folder_and_puts_bos_first(
    converted: tuple[Path, TinyGguf, int],
) -> None:
    mlx_lm = pytest.importorskip("mlx_lm")
    import mlx.core as mx

    folder, _, _ = converted
    model, tokenizer = mlx_lm.load(str(folder))
    ids = tokenizer.encode("hello world")
    pieces = vocabulary()[0]
    assert [pieces[i] for i in ids] == ["<bos>", "hello", "\u2581world"]
    logits = model(mx.array(ids)[None])
    assert logits.shape == (1, 3, len(pieces))
    assert bool(mx.isfinite(logits).all())
    kinds = [type(cache).__name__ for cache in model.make_cache()]
    assert kinds == ["RotatingKVCache"] * 5 + ["KVCache"]


def test_config_carries_every_setting_of_the_gguf(
    converted: tuple[Path, TinyGguf, int],
) -> None:
    config = json.loads((converted[0] / "config.json").read_text())
    assert config["model_type"] == "gemma3_text"
    assert config["num_hidden_layers"] == BLOCKS
    assert config["sliding_window"] == 16
    assert config["query_pre_attn_scalar"] == config["head_dim"] == 32
    assert config["rope_theta"] == 1e6
    assert config["vocab_size"] == len(vocabulary()[0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"without": "blk.1.ffn_up"}, "blk.1.ffn_up.weight"),
        ({"extra": "blk.0.gate_norm"}, "blk.0.gate_norm.weight"),
    ],
)
def test_a_tensor_without_place_or_a_place_without_tensor_is_refused_by_name(
    tmp_path: Path, changes: dict[str, str], named: str
) -> None:
    tiny = write_tiny_gguf(tmp_path / "odd.gguf", **changes)
    with pytest.raises(ConfigError, match=named):
        convert(GgufFile(tiny.path), tmp_path, lambda _: None)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    tiny = write_tiny_gguf(tmp_path / "odd.gguf", architecture="llama")
    with pytest.raises(ConfigError, match="llama"):
        GgufFile(tiny.path)
