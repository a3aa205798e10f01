"""An engine process of one test without its front, stopped by its process id."""

from __future__ import annotations

import contextlib
import http.client
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.serve.engine_child import KEY, EngineChild
from tests.serve.front import START_SECONDS

Json = dict[str, Any]
COUNTING = "tests.serve.counting_engine"


@dataclass
class Reply:
    """What a request was answered with, and how many tokens the model saw for it.

    ``logprobs`` are those of ``tokens``.
    """

    text: str
    tokens: list[int]
    usage: Json
    receipt: Json
    forward: int
    logprobs: list[float] = field(default_factory=list)

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
    child: EngineChild | None = None
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

    @property
    def running(self) -> EngineChild:
        assert self.child is not None, "the engine does not run"
        return self.child

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def start(self, *more: str) -> Engine:
        """Start it, and wait until it is healthy."""
        words = [COUNTING, "--counter", str(self.counter), "--model", str(self.model)]
        self.child = EngineChild.started(self.log, *words, *self.store, *self.flags, *more)
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self.child.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine did not come up:\n{self.output()}")
            time.sleep(0.02)
        return self

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):  # it may just be ending
            return self.request("/health")[0] == 200
        return False

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; the exit code."""
        child, self.child = self.child, None
        return 0 if child is None else child.end(number)

    def restart(self, number: signal.Signals = signal.SIGKILL) -> Engine:
        """End it and start it again on the same model and store."""
        self.end(number)
        return self.start()

    def request(self, path: str, body: object = None, key: str = KEY) -> tuple[int, Json]:
        """One request: the status and the JSON."""
        return self.running.request(path, body, key)

    def open(self, path: str, body: object = None, key: str = KEY) -> Any:
        """The open answer of one request."""
        return self.running.open(path, body, key)

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
        logprobs = [float(one["logprob"]) for one in noted]
        return Reply(text or "", tokens, answer["usage"], answer.get("pion", {}), seen, logprobs)


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
