"""What one mlx-lm stored is a miss for another, whose code may give other K/V.

Runs where the environments of ``make test`` and ``make test-mlx-lm-0.31`` both exist, so in
the second of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningServer

ROOT = Path(__file__).resolve().parents[2]
VENVS = (ROOT / ".venv/bin/python", ROOT / ".venvs/mlx-lm-0.31/bin/python")

_ASK = """
import json, sys
import mlx_lm
from pion_vllm_mlx import PionPromptCache
from tests.models import tiny_model, token_ids
name, port = sys.argv[1], int(sys.argv[2])
with PionPromptCache(tiny_model(name), port=port) as pion:
    pion.get_or_prefill(token_ids(40), "two-versions-" + name)
    print(json.dumps([mlx_lm.__version__, pion.hits, pion.last_miss_reason]))
"""


def ask(python: Path, name: str, port: int) -> tuple[str, int, Any]:
    """The version, hits and reason of one fresh process that wants the prefix."""
    command = [str(python), "-c", _ASK, name, str(port)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=120)
    version, hits, reason = json.loads(done.stdout.splitlines()[-1])
    return version, hits, reason


@pytest.mark.skipif(
    not all(python.exists() for python in VENVS), reason="only one mlx-lm is installed"
)
@pytest.mark.parametrize("name", ["deepseek_v32", "llama"])
def test_a_prefix_of_another_mlx_lm_is_a_miss_that_says_so(
    pion_server: RunningServer, name: str
) -> None:
    new, old = VENVS
    first, hits, _ = ask(old, name, pion_server.port)
    assert (first, hits) == ("0.31.3", 0)
    assert ask(old, name, pion_server.port)[1] == 1
    second, hits, reason = ask(new, name, pion_server.port)
    assert second != first and hits == 0
    assert "key field" in reason and "differs" in reason
    assert ask(new, name, pion_server.port)[1] == 1


def test_one_version_alone_hits_its_own_prefix(pion_server: RunningServer) -> None:
    python = Path(sys.executable)
    assert ask(python, "llama", pion_server.port)[1] == 0
    assert ask(python, "llama", pion_server.port)[1] == 1
