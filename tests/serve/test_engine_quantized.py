"""Quantized caches that a model cannot have: refused when it is loaded, before any request."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from pion_vllm_mlx.serve.engine_mlx_lm_quantized import not_quantized  # noqa: E402
from tests.models import NAMES, tiny_model  # noqa: E402
from tests.serve.front import refused_at_start  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

ENGINE = "pion_vllm_mlx.serve.engine_mlx_lm"


def test_a_group_that_does_not_divide_the_heads_is_refused_when_the_model_is_there(
    tmp_path: Path,
) -> None:
    if "--kv-bits" not in inspect.getsource(importlib.import_module("mlx_lm.server")):
        pytest.skip("this mlx-lm's server does not quantize caches")
    model = make_folder(tmp_path / "model", "llama")
    flags = ("--model", str(model), "--kv-bits", "8", "--quantized-kv-start", "0")
    said = refused_at_start(tmp_path, ENGINE, *flags)
    assert "--kv-group-size 64 does not divide this model's head dimension 32: 32 does" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("family", NAMES)
def test_what_mlx_lm_can_quantize_is_not_refused(family: str) -> None:
    model = tiny_model(family)
    told = not_quantized(model, {"kv_bits": 8, "kv_group_size": 32})
    rotating = any("Rotating" in type(cache).__name__ for cache in make_prompt_cache(model))
    assert rotating == ("cannot quantize a RotatingKVCache" in (told or ""))
    assert rotating or told is None
    assert not_quantized(model, {"kv_bits": None, "kv_group_size": 64}) is None
    assert not_quantized(model, {}) is None
