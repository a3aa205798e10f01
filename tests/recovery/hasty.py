"""Real servers whose housekeeping is in a hurry, started in a moment.

A server that lives for a quarter of a second would never come to save, seal or compact by
itself; here its upkeep waits for nothing. Starting one costs a fork: the process of this
module has imported everything. It reads a JSON list a line:

- ``["start", LOG, ARGUMENT...]`` forks a server that prints to LOG; answers its process id;
- ``["wait", PID]`` waits until that server has ended; answers its exit status.

At the end of its input it kills the servers that are left, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from pion_vllm_mlx.server import chores, launcher, main
from pion_vllm_mlx.server.keyspace import changes
from pion_vllm_mlx.server.store import compaction, saving, space

_ROOT = Path(__file__).parents[2]


def hurry() -> None:
    """Let the upkeep of a server of this process wait for nothing."""
    chores._TICK_SECONDS = 0.01
    chores.QUIET_SECONDS = 0.02
    chores.BUSY_STEP_SECONDS = 0.05
    saving.BUSY_FACTOR = 0
    changes.PIECE_BYTES = 300_000
    compaction.MIN_DEAD_BYTES = 16 << 10
    # the budget is what a test says, however full the disk is
    space.RESERVED_FREE_BYTES = 0
    launcher.MODULE = "tests.recovery.hasty_worker"  # type: ignore[attr-defined]
    launcher.FIRST_WAIT_SECONDS = 0.01


class Starter:
    """Starts servers on request. Use as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.recovery.hasty"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate(timeout=30)

    def start(self, log: Path, *arguments: str) -> int:
        """The process id of a new server, which may not listen yet."""
        return self._ask("start", str(log), *arguments)

    def wait(self, pid: int) -> int:
        """The exit status of a server that ends; minus the signal that killed it."""
        return self._ask("wait", pid)

    def _ask(self, *words: str | int) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _serve(log: str, arguments: list[str]) -> int:
    """Fork a server; its process id. Returns in the parent only."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        silence = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((silence, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        code = main.main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(code)


def _run() -> None:
    hurry()
    running: set[int] = set()
    for line in sys.stdin:
        kind, *words = json.loads(line)
        if kind == "start":
            answer = _serve(words[0], words[1:])
            running.add(answer)
        else:
            _, status = os.waitpid(words[0], 0)
            running.discard(words[0])
            answer = os.waitstatus_to_exitcode(status)
        print(answer, flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _run()
