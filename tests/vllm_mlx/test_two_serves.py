"""Two serves on vllm-mlx, alive over one embedded server."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from tests.serve.tiny_folder import make_folder  # noqa: E402
from tests.serve.two_serves import prove_sharing  # noqa: E402


@pytest.mark.timeout(300)  # three engines
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_two_serves_alive_on_the_embedded_server_share_what_either_computes(
    tmp_path: Path, family: str
) -> None:
    flags = ("--engine", "vllm-mlx", "--model", str(make_folder(tmp_path / "model", family)))
    prove_sharing(tmp_path, "pion_vllm_mlx.serve.engine_vllm_mlx", *flags)
