"""Thoughts of a model on mlx-lm's engine are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from tests.serve.thinking import prove_thoughts_are_counted  # noqa: E402


def test_what_a_model_thinks_is_counted_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove_thoughts_are_counted(tmp_path, monkeypatch, "pion_vllm_mlx.serve.engine_mlx_lm")
