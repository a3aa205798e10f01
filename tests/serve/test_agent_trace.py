"""An agent's trace over HTTP: nearly all that an earlier request has computed is reused.

A system prompt and tools, turns with tool calls, sub-agents side by side, an edited history, a
restart, the last request once more; each request has a billing header and a time of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

import numpy as np

from benchmarks.reproducers.agent_trace_client import Answer
from benchmarks.reproducers.agent_trace_shares import shares, total_share
from tests.serve.agent_trace import FAMILIES, prove_trace


@pytest.mark.timeout(300)  # half a minute for all on a machine of its own
@pytest.mark.parametrize("family", FAMILIES)
def test_an_agent_s_trace_reuses_what_earlier_requests_computed(
    tmp_path: Path, family: str
) -> None:
    prove_trace("serve, mlx-lm", family, tmp_path)


def test_what_is_said_to_be_reused_and_went_through_the_model_is_lost() -> None:
    """So is what was reused without being said; of requests beside others it is not known."""
    prompts = {name: np.arange(100, dtype=np.uint32) for name in ("one", "two")}

    def told(cached: int, forwarded: int | None) -> tuple[float, bool]:
        first = Answer("one", began=1.0, ended=2.0, cached=0, forwarded=100)
        second = Answer("two", began=3.0, ended=4.0, cached=cached, forwarded=forwarded)
        found = shares([first, second], prompts)
        return total_share(found), found[1].told_wrong

    assert told(99, 1) == (1.0, False)
    assert told(99, 100) == (0.0, True)
    assert told(0, 1) == (0.0, True)
    assert told(99, None) == (1.0, False)
    assert told(0, 100) == (0.0, False)
