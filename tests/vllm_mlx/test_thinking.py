"""Thoughts of a model on vllm-mlx's engine are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")
pytest.importorskip("openai")

from tests.serve.thinking import prove_thoughts_are_counted  # noqa: E402


def test_what_a_model_thinks_is_counted_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, words = "pion_vllm_mlx.serve.engine_vllm_mlx", ("--engine", "vllm-mlx")
    parser = ("--reasoning-parser", "qwen3")
    prove_thoughts_are_counted(tmp_path, monkeypatch, engine, *words, parser=parser)
