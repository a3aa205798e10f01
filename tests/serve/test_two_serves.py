"""Two serves on mlx-lm, alive over one embedded server."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from tests.serve.tiny_folder import make_folder  # noqa: E402
from tests.serve.two_serves import prove_sharing  # noqa: E402


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_two_serves_alive_on_the_embedded_server_share_what_either_computes(
    tmp_path: Path, family: str
) -> None:
    model = make_folder(tmp_path / "model", family)
    prove_sharing(tmp_path, "pion_vllm_mlx.serve.engine_mlx_lm", "--model", str(model))
