"""The servers that the trace is replayed against: serve with either engine, and both stock ones.

Each has a folder of its own for what it keeps on disk; a restart is SIGTERM, which lets a
server write what it wants to keep, and a new start on the same folder.  After a start one short
request that is not of the trace has the model loaded and its kernels made; it counts nowhere.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reproducers.agent_trace_client import ANTHROPIC, CHAT, Answer, Api, ask
from benchmarks.reproducers.agent_trace_counted import read_counter
from benchmarks.reproducers.agent_trace_script import Request, text_block
from benchmarks.reproducers.common import REPOSITORY, environment, free_port

Json = dict[str, Any]

START_SECONDS = 120.0
STOP_SECONDS = 60.0
_COUNTED = "benchmarks.reproducers.agent_trace_counted"
#: serve knows its engines' modules; this has it start the one that counts.
_FRONT = (
    "import sys; from pion_vllm_mlx.serve import main, options;"
    f"sys.exit(main.run(options.parse(sys.argv[1:]), {_COUNTED!r}))"
)
#: vllm-mlx keeps tool calls as the template has them only with a parser that knows them.
_VLLM_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
_SERVED_NAME = ("--served-model-name", "default_model")


@dataclass(frozen=True)
class Kind:
    """A server that can be chosen; ``words`` are its command line by model folder and port."""

    api: Api
    engine: str
    has_stats: bool
    words: Callable[[str, str], list[str]]


def _ours(engine: str, *flags: str) -> Kind:
    def words(model: str, port: str) -> list[str]:
        own = ["-c", _FRONT, "--engine", engine, "--port", port, "--model", model]
        return [*own, "--pion-budget-gb", "8", *flags, "--as", f"engine-{engine}"]

    return Kind(ANTHROPIC, engine, True, words)


def _stock(engine: str, *flags: str, model_flag: str = "") -> Kind:
    def words(model: str, port: str) -> list[str]:
        named = [model_flag, model] if model_flag else [model]
        return ["-m", _COUNTED, "--as", f"stock-{engine}", *named, "--port", port, *flags]

    return Kind(CHAT, engine, False, words)


KINDS = {
    "serve, mlx-lm": _ours("mlx-lm"),
    "serve, vllm-mlx": _ours("vllm-mlx", *_VLLM_TOOLS),
    "stock mlx-lm": _stock("mlx-lm", model_flag="--model"),
    "stock vllm-mlx": _stock("vllm-mlx", "--continuous-batching", *_SERVED_NAME, *_VLLM_TOOLS),
}


@dataclass(frozen=True)
class Place:
    """Where a server runs: its interpreter, the folder for its files, the model."""

    python: str
    folder: Path
    model: Path
    model_kind: str


@dataclass
class Server:
    """A server of one kind; totals go on over its restarts."""

    kind: Kind
    place: Place
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    totals: dict[str, int] = field(default_factory=dict)
    _base: dict[str, int] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """All that it prints."""
        return self.place.folder / "output.log"

    @property
    def counter(self) -> Path:
        """See ``agent_trace_counted``."""
        return self.place.folder / "counter"

    def start(self) -> Server:
        """Start it, and have it answer once."""
        self.port = free_port()
        words = self.kind.words(str(self.place.model), str(self.port))
        words += ["--counter", str(self.counter), "--kind", self.place.model_kind]
        home = self.place.folder / "home"
        home.mkdir(exist_ok=True)
        env = {**environment(), "PION_DATA_DIR": str(self.place.folder / "data")}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if not self.kind.has_stats:  # vllm-mlx keeps its prefixes under the home folder
            env["HOME"] = str(home)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [self.place.python, *words],
                cwd=REPOSITORY,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._until_healthy()
        ask(self.port, self.kind.api, _warm_up())
        self._base = self._counts()
        return self

    def stop(self) -> None:
        """SIGTERM and wait, SIGKILL for what does not end."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self._add_counts()
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def restart(self) -> None:
        """Stop it, and start it on what it kept."""
        self.stop()
        self.start()

    def ask(self, request: Request) -> Answer:
        """One request."""
        return ask(self.port, self.kind.api, request)

    def ask_alone(self, request: Request) -> Answer:
        """One request, beside which there is no other: its forwarded tokens are known."""
        before = sum(read_counter(self.counter))
        answer = self.ask(request)
        answer.forwarded = sum(read_counter(self.counter)) - before - answer.completion
        return answer

    def _add_counts(self) -> None:
        for name, value in self._counts().items():
            self.totals[name] = self.totals.get(name, 0) + value - self._base.get(name, 0)

    def _counts(self) -> dict[str, int]:
        prefill, single = read_counter(self.counter)
        told = {"prefill_tokens": prefill, "single_tokens": single}
        if self.kind.has_stats:
            _, stats = _get(self.port, "/v1/pion/stats")
            told["stats_asked_tokens"] = int(stats["tokens_prompt"])
            told["stats_reused_tokens"] = int(stats["tokens_reused"])
        return told

    def _until_healthy(self) -> None:
        assert self.process is not None
        ends_at = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit(f"{self.log}:\n{self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        try:
            return _get(self.port, "/health")[0] == 200
        except OSError:
            return False


def _get(port: int, path: str) -> tuple[int, Json]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    return answer.status, json.loads(body) if answer.status == 200 and body else {}


def _warm_up() -> Request:
    said = [{"role": "user", "content": [text_block("hello " * 60)]}]
    body = {"model": "default_model", "max_tokens": 4, "temperature": 0, "stream": True}
    return Request("warm-up", {**body, "messages": said})


@contextmanager
def running(kind: Kind, place: Place) -> Iterator[Server]:
    """A server, stopped at the end."""
    place.folder.mkdir()
    server = Server(kind, place)
    try:
        yield server.start()
    finally:
        server.stop()


def python_of(engine: str, vllm_python: str) -> str:
    """The interpreter for an engine; mlx-lm's is the one that runs this."""
    return vllm_python if engine == "vllm-mlx" else sys.executable
