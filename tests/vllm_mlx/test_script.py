"""The backend as a script installs it, by a budget alone: an embedded store behind vllm-mlx."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from benchmarks.reproducers.agent_trace_counted import read_counter  # noqa: E402
from tests.conftest import free_port_block  # noqa: E402
from tests.serve.front import ROOT, START_SECONDS, until  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

Json = dict[str, Any]
SCRIPT = """
import sys
from benchmarks.reproducers.agent_trace_counted import count_calls
from pathlib import Path
count_calls("llama", Path(sys.argv[1]))

from pion_vllm_mlx.cache import install_vllm_mlx_backend
install_vllm_mlx_backend(budget_gb=8)   # before vllm-mlx builds its engine
from vllm_mlx.cli import create_parser, serve_command
serve_command(create_parser().parse_args(["serve", *sys.argv[2:]]))
"""
SYSTEM = {"role": "system", "content": "You answer in one word. " * 20}
HELLO = [SYSTEM, {"role": "user", "content": "Hello there"}]
OTHER = [SYSTEM, {"role": "user", "content": "And again?"}]


@dataclass
class Script:
    """A running script, and where its model counts what it sees."""

    port: int
    counter: Path
    log: Path
    process: subprocess.Popen[bytes]

    def ask(self, messages: list[Json]) -> tuple[Json, int]:
        """A greedy answer, and how many tokens of its prompt were computed."""
        body = {"model": "m", "messages": messages, "max_tokens": 6, "temperature": 0}
        before = sum(read_counter(self.counter))
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as told:
            answer: Json = json.loads(told.read())
        seen = sum(read_counter(self.counter)) - before
        return answer, seen - int(answer["usage"]["completion_tokens"])

    def healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")
        try:
            url = f"http://127.0.0.1:{self.port}/health"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextlib.contextmanager
def running_script(folder: Path, model: Path) -> Iterator[Script]:
    """The script over a data folder in ``folder``; SIGTERM ends it with the block."""
    number = len(list(folder.glob("script-*.log")))
    log, port = folder / f"script-{number}.log", free_port_block()
    counter = log.with_suffix(".count")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    env |= {"PION_DATA_DIR": str(folder / "data"), "PYTHONUNBUFFERED": "1"}
    words = [str(counter), str(model), "--served-model-name", "m", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *words, "--continuous-batching"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    script = Script(port, counter, log, process)
    try:
        until(script.healthy, "the script answers", START_SECONDS)
        yield script
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def cached(answer: Json) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.mark.timeout(300)  # two processes that import vllm-mlx, one after the other
def test_the_second_run_of_a_script_begins_where_the_first_has_ended(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model")
    with running_script(tmp_path, model) as script:
        first, computed = script.ask(HELLO)
        count = first["usage"]["prompt_tokens"]
        assert (cached(first), computed) == (0, count)
        assert (tmp_path / "data").is_dir()  # the embedded server's
    with running_script(tmp_path, model) as script:
        again, computed = script.ask(HELLO)
        assert again["choices"] == first["choices"]
        assert (cached(again), computed) == (count - 1, 1)
        assert again["pion"]["tier"] in ("memory", "mapped", "stored")
        other, computed = script.ask(OTHER)
        assert len(SYSTEM["content"]) < cached(other)
        assert computed == other["usage"]["prompt_tokens"] - cached(other)
