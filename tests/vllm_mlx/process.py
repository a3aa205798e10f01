"""The engine of ``serve --engine vllm-mlx`` as a process, asked over HTTP as the front does."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reproducers.agent_trace_counted import read_counter
from tests.serve.engine_child import KEY, EngineChild

Json = dict[str, Any]


@dataclass
class EngineProcess:
    """A running engine process, and the file in which its model counts what it sees."""

    child: EngineChild
    log: Path
    counter: Path

    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def open(self, path: str, body: object = None, key: str = KEY) -> Any:
        """The open answer to a request; raises urllib's HTTPError."""
        return self.child.open(path, body, key)

    def ask(self, path: str, body: object = None, key: str = KEY) -> tuple[int, Json]:
        """Status and JSON of an answer."""
        return self.child.request(path, body, key)

    def stats(self) -> Json:
        """Its counters."""
        return self.ask("/v1/pion/stats")[1]

    def complete(self, prompt: str, count: int = 6, **more: Any) -> Json:
        """A greedy completion."""
        status, body = self.ask("/v1/completions", {**greedy(count), "prompt": prompt, **more})
        assert status == 200, body
        return body

    def chat(self, messages: list[Json], count: int = 6, **more: Any) -> Json:
        """A greedy chat answer."""
        body = {**greedy(count), "messages": messages, **more}
        status, answer = self.ask("/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    def computed(self, messages: list[Json], count: int = 6) -> tuple[Json, int]:
        """A greedy chat answer, and how many tokens of its prompt went through the model."""
        before = sum(read_counter(self.counter))
        answer = self.chat(messages, count)
        seen = sum(read_counter(self.counter)) - before
        # Every reply token goes through the model too, before the next is known.
        return answer, seen - int(answer["usage"]["completion_tokens"])

    def events(self, path: str, body: Json) -> list[Json]:
        """The data of a streamed answer's events, the closing [DONE] left out."""
        with self.open(path, {**body, "stream": True}) as answer:
            lines = answer.read().decode().splitlines()
        data = [line[6:] for line in lines if line.startswith("data: ")]
        return [json.loads(item) for item in data if item != "[DONE]"]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; its exit code."""
        return self.child.end(number)


def greedy(count: int) -> Json:
    """Sampling settings of a reply that is the same every time."""
    return {"model": "default", "max_tokens": count, "temperature": 0.0, "top_p": 1.0}


@contextlib.contextmanager
def running_process(folder: Path, model: Path, *flags: str) -> Iterator[EngineProcess]:
    """An engine over the model folder ``model``, which counts; it ends with the block."""
    log = folder / f"engine-{len(list(folder.glob('engine-*.log')))}.log"
    counter = log.with_suffix(".count")
    kind = json.loads((model / "config.json").read_text())["model_type"]
    words = ["benchmarks.reproducers.agent_trace_counted", "--as", "engine-vllm-mlx"]
    words += ["--counter", str(counter), "--kind", kind, str(model), *flags]
    child = EngineChild.started(log, *words, "--served-model-name", "default")
    try:
        yield EngineProcess(child, log, counter)
    finally:
        child.end(signal.SIGKILL)
