"""Real server processes that start in milliseconds: a parent that has imported the server forks.

``Nursery`` is that parent. What it starts is a server process like any other, with a data
folder and ports, and dies of a real SIGKILL; only the interpreter's start is saved.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.server.wire import Wire

START_SECONDS = 10.0


class Nursery:
    """The parent process; one child at a time for each ``ForkedServer``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.recovery.state_machine_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            text=True,
        )

    def _ask(self, **order: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, argv: Sequence[str], log: Path) -> int:
        """Fork a server; its process id."""
        pid: int = self._ask(argv=list(argv), log=str(log))
        return pid

    def end(self, pid: int, number: signal.Signals) -> int:
        """Send a signal and wait for the end: the wait status."""
        status: int = self._ask(pid=pid, signal=int(number))
        return status

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)
        self._process.stdout.close()


@dataclass
class ForkedServer:
    """One data folder and the process that serves it."""

    nursery: Nursery
    port: int
    dir: Path
    flags: tuple[str, ...] = ()
    pid: int = 0
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.dir.parent / f"{self.dir.name}.log"

    def start(self) -> Wire:
        """Start, wait until it answers; a connection to it."""
        argv = ["--kvcache", "-p", str(self.port), "--dir", str(self.dir), *self.flags]
        self.pid = self.nursery.start(argv, self.log)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                wire = Wire.tcp(self.port, timeout=20.0)
            except ConnectionError:
                time.sleep(0.002)
                continue
            try:
                if wire.ask("PING") == "PONG":
                    return wire
            except (EOFError, ConnectionError):
                wire.close()
        raise RuntimeError(f"the server did not start:\n{self.output()}")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.pid:
            self.nursery.end(self.pid, signal.SIGKILL)
            self.pid = 0

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
        if not self.pid:
            return 0
        status = self.nursery.end(self.pid, signal.SIGTERM)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def drain(wire: Wire) -> list[Any]:
    """Replies that a server had sent before it died."""
    replies: list[Any] = []
    while True:
        try:
            replies.append(wire.reply())
        except (EOFError, OSError, ValueError):
            return replies


def _fork(argv: list[str], log: str) -> int:
    from pion_vllm_mlx.server.main import main

    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os._exit(main(argv))
    finally:
        os._exit(70)


def _serve_orders() -> None:
    """One order a line; ends with its input, and its children with it."""
    children: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "argv" in order:
            answer = _fork(order["argv"], order["log"])
            children.add(answer)
        else:
            os.kill(order["pid"], order["signal"])
            _, answer = os.waitpid(order["pid"], 0)
            children.discard(order["pid"])
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _serve_orders()
