"""An agent's trace over HTTP: nearly all that an earlier request has computed is reused.

A system prompt and tools, turns with tool calls, sub-agents side by side, an edited history, a
restart, the last request once more; each request has a billing header and a time of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from tests.serve.agent_trace import FAMILIES, prove_trace


@pytest.mark.timeout(300)  # half a minute for all on a machine of its own
@pytest.mark.parametrize("family", FAMILIES)
def test_an_agent_s_trace_reuses_what_earlier_requests_computed(
    tmp_path: Path, family: str
) -> None:
    prove_trace("serve, mlx-lm", family, tmp_path)
