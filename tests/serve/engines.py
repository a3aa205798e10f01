"""An engine process of one test without its front, stopped by its process id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.serve.front import ROOT, START_SECONDS

Json = dict[str, Any]
KEY = "the key of the test"
COUNTING = "tests.serve.counting_engine"


@dataclass
class Reply:
    """What a request was answered with, and how many tokens the model saw for it."""

    text: str
    tokens: list[int]
    usage: Json
    receipt: Json
    forward: int

    @property
    def cached(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    @property
    def prompt(self) -> int:
        return int(self.usage["prompt_tokens"])


@dataclass
class Engine:
    """An engine on ``model``; ``store`` are the flags that name its store."""

    folder: Path
    model: Path
    store: tuple[str, ...]
    flags: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / f"engine-{len(list(self.folder.glob('engine-*.log')))}.log"
        self.log.touch()

    @property
    def counter(self) -> Path:
        return self.log.with_suffix(".count")

    @property
    def forward(self) -> int:
        """Tokens that the model has seen since the start."""
        return int.from_bytes(self.counter.read_bytes(), "little")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def start(self, *more: str) -> Engine:
        """Start it, and wait until it is healthy."""
        ready, ready_write = os.pipe()
        lifeline_read, self._lifeline = os.pipe()
        words = ["-m", COUNTING, "--counter", str(self.counter)]
        words += ["--ready-fd", str(ready_write), "--lifeline-fd", str(lifeline_read)]
        words += ["--model", str(self.model), *self.store, *self.flags, *more]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PION_ENGINE_KEY": KEY}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(ready_write, lifeline_read),
            )
        os.close(ready_write)
        os.close(lifeline_read)
        with os.fdopen(ready) as pipe:
            line = pipe.readline()
        if not line:
            raise RuntimeError(f"the engine did not start:\n{self.output()}")
        self.port = int(json.loads(line)["port"])
        deadline = time.monotonic() + START_SECONDS
        while self.request("/health")[0] != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine did not come up:\n{self.output()}")
            time.sleep(0.02)
        return self

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; the exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        self.process = None
        os.close(self._lifeline)
        return code

    def restart(self, number: signal.Signals = signal.SIGKILL) -> Engine:
        """End it and start it again on the same model and store."""
        self.end(number)
        return self.start()

    def request(self, path: str, body: object = None, key: str = KEY) -> tuple[int, Json]:
        """One request: the status and the JSON."""
        with contextlib.suppress(urllib.error.HTTPError):
            with self.open(path, body, key) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        return self._refused(path, body, key)

    def _refused(self, path: str, body: object, key: str) -> tuple[int, Json]:
        try:
            with self.open(path, body, key) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    def open(self, path: str, body: object = None, key: str = KEY) -> Any:
        """The open answer of one request."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        return urllib.request.urlopen(asked, timeout=100)

    def complete(self, prompt: str, limit: int = 8, **more: Any) -> Reply:
        """A text completion."""
        return self._reply("/v1/completions", {"prompt": prompt, "max_tokens": limit, **more})

    def chat(self, messages: list[Json], limit: int = 8, **more: Any) -> Reply:
        """A chat completion."""
        body = {"messages": messages, "max_tokens": limit, **more}
        return self._reply("/v1/chat/completions", body)

    def stats(self) -> Json:
        return self.request("/v1/pion/stats")[1]

    def until_stored(self) -> Json:
        """Wait until the store has written what it was given."""
        deadline = time.monotonic() + 30
        while (found := self.stats()).get("waiting"):
            if time.monotonic() > deadline:
                raise AssertionError(f"still waiting: {found}")
            time.sleep(0.02)
        return found

    def _reply(self, path: str, body: Json) -> Reply:
        before = self.forward
        status, answer = self.request(path, {"temperature": 0, "logprobs": True, **body})
        assert status == 200, answer
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"].get("content")
        seen = self.forward - before
        noted = choice.get("logprobs", {}).get("content", [])
        tokens = [int(one["id"]) for one in noted]
        return Reply(text or "", tokens, answer["usage"], answer.get("pion", {}), seen)


@contextlib.contextmanager
def running_engine(
    folder: Path, model: Path, *store: str, flags: tuple[str, ...] = ()
) -> Iterator[Engine]:
    """An engine, ended by its process id."""
    engine = Engine(folder, model, store, flags)
    try:
        yield engine.start()
    finally:
        engine.end(signal.SIGKILL)
