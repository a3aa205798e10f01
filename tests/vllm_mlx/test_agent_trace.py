"""An agent's trace over HTTP with vllm-mlx's engine: see ``tests/serve/test_agent_trace``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm_mlx")

from tests.serve.agent_trace import FAMILIES, prove_trace


@pytest.mark.timeout(300)  # half a minute for all on a machine of its own
@pytest.mark.parametrize("family", FAMILIES)
def test_an_agent_s_trace_reuses_what_earlier_requests_computed(
    tmp_path: Path, family: str
) -> None:
    prove_trace("serve, vllm-mlx", family, tmp_path)
