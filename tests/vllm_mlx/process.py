"""The engine of ``serve --engine vllm-mlx`` as a process, asked over HTTP as the front does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serve.front import ROOT

Json = dict[str, Any]
KEY = "key-of-the-front"


@dataclass
class EngineProcess:
    """A running engine process."""

    port: int
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def open(self, path: str, body: object = None, key: str = KEY) -> Any:
        """The open answer to a request; raises urllib's HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        return urllib.request.urlopen(asked, timeout=120)

    def ask(self, path: str, body: object = None, key: str = KEY) -> tuple[int, Json]:
        """Status and JSON of an answer."""
        try:
            with self.open(path, body, key) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"null")

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

    def events(self, path: str, body: Json) -> list[Json]:
        """The data of a streamed answer's events, the closing [DONE] left out."""
        with self.open(path, {**body, "stream": True}) as answer:
            lines = answer.read().decode().splitlines()
        data = [line[6:] for line in lines if line.startswith("data: ")]
        return [json.loads(item) for item in data if item != "[DONE]"]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


def greedy(count: int) -> Json:
    """Sampling settings of a reply that is the same every time."""
    return {"model": "default", "max_tokens": count, "temperature": 0.0, "top_p": 1.0}


@contextlib.contextmanager
def running_process(folder: Path, model: Path, *flags: str) -> Iterator[EngineProcess]:
    """An engine over the model folder ``model``; its lifeline ends with the block."""
    log = folder / f"engine-{len(list(folder.glob('engine-*.log')))}.log"
    ready, ready_write = os.pipe()
    lifeline_read, lifeline = os.pipe()
    words = [sys.executable, "-m", "pion_vllm_mlx.serve.engine_vllm_mlx", str(model), *flags]
    words += ["--ready-fd", str(ready_write), "--lifeline-fd", str(lifeline_read)]
    words += ["--served-model-name", "default"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PION_ENGINE_KEY": KEY}
    env["PYTHONUNBUFFERED"] = "1"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(ready_write, lifeline_read),
        )
    os.close(ready_write)
    os.close(lifeline_read)
    try:
        with os.fdopen(ready, "rb") as pipe:
            line = pipe.readline()
        if not line:
            raise RuntimeError(f"the engine did not start:\n{log.read_text(errors='replace')}")
        told = json.loads(line)
        yield EngineProcess(told["port"], told["model"], process, log)
    finally:
        os.close(lifeline)
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)
