"""``pion-vllm-mlx`` as a process of its own, or in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx import cli

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ran:
    """What a command has printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output, which is JSON."""
        assert self.code == 0, self.err
        return json.loads(self.out)


def command(*words: object, data: Path | None = None, stdin: str = "") -> Ran:
    """Run the command line; ``data`` is the data folder of its embedded server."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    env.pop("PION_API_KEY", None)
    if data is not None:
        env["PION_DATA_DIR"] = str(data)
    done = subprocess.run(
        [sys.executable, "-m", "pion_vllm_mlx", *map(str, words)],
        cwd=ROOT,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Ran(done.returncode, done.stdout, done.stderr)


def here(capsys: pytest.CaptureFixture[str], *words: object) -> Ran:
    """The same in this process: for refusals, which are many."""
    try:
        code = cli.main([*map(str, words)])
    except SystemExit as leave:
        code = int(leave.code or 0)
    printed = capsys.readouterr()
    return Ran(code, printed.out, printed.err)
