"""Tool calls that the model says come out of mlx-lm's engine as calls."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from tests.serve.tool_calls import prove_tool_calls  # noqa: E402


def test_what_a_model_says_as_a_tool_call_is_one_in_every_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove_tool_calls(tmp_path, monkeypatch, "pion_vllm_mlx.serve.engine_mlx_lm")
