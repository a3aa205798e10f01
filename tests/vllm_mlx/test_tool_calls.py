"""Tool calls that the model says come out of vllm-mlx's engine as calls."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")
pytest.importorskip("anthropic")
pytest.importorskip("openai")

from tests.serve.tool_calls import prove_tool_calls  # noqa: E402


@pytest.mark.parametrize(
    "words", [(), ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")]
)
def test_what_a_model_says_as_a_tool_call_is_one_in_every_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    engine = "pion_vllm_mlx.serve.engine_vllm_mlx"
    prove_tool_calls(tmp_path, monkeypatch, engine, "--engine", "vllm-mlx", *words)
