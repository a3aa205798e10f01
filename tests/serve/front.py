"""A front process of one test over an engine of the test's choice, stopped by its process id."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

Json = dict[str, Any]

SCRIPTED = "tests.serve.scripted_engine"
START_SECONDS = 90.0
ROOT = Path(__file__).parents[2]


@dataclass
class Front:
    """A running front: where it listens, its process and what it has printed."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def engine_pids(self) -> list[int]:
        """Process ids of the engines that came up, the latest last."""
        return [int(pid) for pid in re.findall(r"engine ready: pid (\d+)", self.output())]

    def request(
        self, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Json]:
        """One request without an SDK: the status and the JSON; bytes are sent as they are."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, headers or {})
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, _parsed(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error.read())

    def until_healthy(self) -> Front:
        deadline = time.monotonic() + START_SECONDS
        while self.request("/health")[0] != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the front did not come up:\n{self.output()}")
            time.sleep(0.05)
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


def _parsed(raw: bytes) -> Json:
    try:
        value: Json = json.loads(raw)
    except ValueError:
        return {"text": raw.decode()}
    return value


@contextlib.contextmanager
def running_front(
    folder: Path,
    *flags: str,
    engine: str = SCRIPTED,
    healthy: bool = True,
    cwd: Path = ROOT,
) -> Iterator[Front]:
    """A front with ``flags`` over ``engine`` on a port that the system chose.

    What it stores lies in ``folder/data``; two fronts on one folder share it. ``cwd`` is its
    working folder, in which it looks for no modules.
    """
    log = folder / f"front-{len(list(folder.glob('front-*.log')))}.log"
    # serve itself knows two engines; this one is named to ``run``.
    code = (
        "import sys; sys.path.remove(''); from pion_vllm_mlx.serve import main, options;"
        "sys.exit(main.run(options.parse(sys.argv[2:]), sys.argv[1]))"
    )
    words = [engine, "--port", "0", "--model", "scripted", *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    env |= {"PION_DATA_DIR": str(folder / "data"), "HF_HUB_OFFLINE": "1"}
    env.pop("PION_API_KEY", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    front = Front(0, process, log)
    try:
        front.port = _port(front)
        yield front.until_healthy() if healthy else front
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)


def _port(front: Front) -> int:
    deadline = time.monotonic() + START_SECONDS
    while True:
        first = front.output().partition("\n")[0]
        if "serve on http://" in first:
            return int(first.partition(" (")[0].rpartition(":")[2])
        if front.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the front did not start:\n{front.output()}")
        time.sleep(0.02)


def refused_at_start(folder: Path, engine: str, *flags: str) -> str:
    """What a front over ``engine`` has printed that ends for its flags before anybody asks."""
    with running_front(folder, *flags, engine=engine, healthy=False) as front:
        assert front.process.wait(timeout=START_SECONDS) == 1, front.output()
    return front.output()


def until(condition: Any, what: str, seconds: float = 30.0) -> None:
    """Wait until ``condition()`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never came true: {what}")
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
