"""The store's server killed while vllm-mlx serves a request: the client is told all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from benchmarks.reproducers.agent_trace_counted import read_counter  # noqa: E402
from tests.conftest import RunningServer  # noqa: E402
from tests.serve.front import until  # noqa: E402
from tests.serve.served import NO_END  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402
from tests.vllm_mlx.process import EngineProcess, greedy, running_process  # noqa: E402

FAMILIES = ["llama", "gemma3_text", "qwen3_5"]
TEXT = "A quick brown fox jumps over a lazy dog and naps. " * 11
CHAT = [{"role": "user", "content": TEXT}]
LONG, LIMIT = 400, 20


class Reading:
    """A streamed chat that is being read."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.text, self.finish = "", None

    def read(self, chunks: int = 1 << 30) -> Reading:
        """Reads so many chunks, or to the end."""
        for line in self._answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    self.text += choice["delta"].get("content") or ""
                    self.finish = choice["finish_reason"] or self.finish
                chunks -= 1
            if not chunks:
                break
        return self


def streamed(engine: EngineProcess) -> Any:
    """The open answer of a long reply without an end of its own."""
    body = {**greedy(LONG), **NO_END, "messages": CHAT, "stream": True}
    return engine.open("/v1/chat/completions", body)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def asked_again(engine: EngineProcess, messages: list[Any]) -> tuple[dict[str, Any], int]:
    """A reply, and how many tokens of its prompt went through the model."""
    before = sum(read_counter(engine.counter))
    answer = engine.chat(messages, LIMIT, **NO_END)
    seen = sum(read_counter(engine.counter)) - before
    return answer, seen - int(answer["usage"]["completion_tokens"])


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A family's folder."""
    return make_folder(tmp_path / "model", request.param)


@pytest.fixture
def alone(tmp_path: Path, model: Path) -> Iterator[EngineProcess]:
    """An engine that keeps nothing."""
    folder = tmp_path / "alone"
    folder.mkdir()
    with running_process(folder, model, "--no-pion", "--disable-prefix-cache") as engine:
        yield engine


def test_a_server_that_is_killed_within_a_reply_costs_the_client_nothing(
    tmp_path: Path, pion_server: RunningServer, model: Path, alone: EngineProcess
) -> None:
    with streamed(alone) as answer:
        expected = Reading(answer).read().text
    flags = ("--pion-host", "127.0.0.1", "--pion-port", str(pion_server.port))
    with running_process(tmp_path, model, *flags) as engine:
        with streamed(engine) as answer:
            before = len(Reading(answer).read(20).text)
            pion_server.kill()
            reading = Reading(answer).read()
        assert 0 < before < len(expected), "tokens were still being made"
        assert (reading.finish, expected[:before] + reading.text) == ("length", expected)
        again, computed = asked_again(engine, CHAT)
        prompt = again["usage"]["prompt_tokens"]
        assert (cached(again), computed, again["pion"]["tier"]) == (prompt - 1, 1, "memory")
        assert again["choices"][0]["message"]["content"] == expected[:LIMIT]
        other = engine.chat([{"role": "user", "content": "Other. " + TEXT}], LIMIT)
        assert cached(other) < 30


def test_a_server_that_is_killed_within_a_prefill_costs_the_client_nothing(
    tmp_path: Path, pion_server: RunningServer, model: Path, alone: EngineProcess
) -> None:
    system = {"role": "system", "content": "You answer in one short sentence. " * 20}
    chat = [system, {"role": "user", "content": TEXT * 2}]
    expected = alone.chat(chat, LIMIT, **NO_END)["choices"]
    flags = ["--pion-host", "127.0.0.1", "--pion-port", str(pion_server.port)]
    flags += ["--prefill-step-size", "4"]
    with running_process(tmp_path, model, *flags) as engine, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: engine.chat(chat, LIMIT, **NO_END))
        until(lambda: sum(read_counter(engine.counter)) >= 400, "the prefill is under way")
        pion_server.kill()
        seen = sum(read_counter(engine.counter))
        reply = asked.result(120)
        prompt = reply["usage"]["prompt_tokens"]
        assert seen < prompt, "and was not over when the server was gone"
        assert (reply["choices"][0]["message"], cached(reply)) == (expected[0]["message"], 0)
        again, computed = asked_again(engine, chat)
        assert (cached(again), computed) == (prompt - 1, 1)
        assert again["choices"][0]["message"] == expected[0]["message"]
        pion_server.start()
