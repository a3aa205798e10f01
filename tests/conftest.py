"""Fixtures: a real server on free ports, stopped by its process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PORT_BLOCK = 4  # RESP, binary lane, one worker's affinity port, one spare
START_SECONDS = 20.0


def free_port_block(count: int = PORT_BLOCK) -> int:
    """The first of ``count`` consecutive free ports.

    Below the range from which the system takes ports of outgoing connections, and apart from
    the blocks of other test processes.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    start = 12_000 + worker * 2_000 + os.getpid() % 400 * PORT_BLOCK
    for base in range(start, 32_000, PORT_BLOCK):
        if all(_is_free(base + step) for step in range(count)):
            return base
    raise RuntimeError("no block of free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run randomized tests for minutes")
    parser.addoption("--kills", type=int, default=0, help="kills of each kill loop (0: few)")


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether a randomized test may take minutes, and need not repeat itself."""
    return bool(request.config.getoption("--long"))


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How often a kill loop kills its server; 0: as often as fits among other tests."""
    return int(request.config.getoption("--kills"))


@dataclass
class RunningServer:
    """A ``pion-server`` process of one test, its data in ``dir``; ``module`` is its program."""

    port: int
    dir: Path
    flags: tuple[str, ...] = ()
    module: str = "pion_vllm_mlx"
    log: Path = field(init=False)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.log = self.dir.parent / f"{self.dir.name}.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def output(self) -> str:
        """All that the server has printed, over all its starts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def start(self, *more: str) -> RunningServer:
        """Start the server and wait until it answers PING."""
        command = [sys.executable, "-m", self.module, "server", "--kvcache"]
        command += ["-p", str(self.port), "--dir", str(self.dir), *self.flags, *more]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.output()}")
            time.sleep(0.02)
        return self

    def answers(self) -> bool:
        """Whether PING is answered, be it by a refusal for want of a password."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(16)[:1] in (b"+", b"-")
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._signal(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM and wait; returns the exit code."""
        return self._signal(signal.SIGTERM)

    def restart(self, *more: str) -> RunningServer:
        """Start again on the same folder and port, after a kill if it still runs."""
        self.kill()
        return self.start(*more)

    def _signal(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(timeout=15)


@contextmanager
def running_server(folder: Path) -> Iterator[RunningServer]:
    """A server on the new folder ``folder``, stopped at the end."""
    folder.mkdir(mode=0o700)
    server = RunningServer(port=free_port_block(), dir=folder)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def pion_server(tmp_path: Path) -> Iterator[RunningServer]:
    """A running server; ``.port``, ``.dir``, ``.pid``, ``.kill()``, ``.restart()``."""
    with running_server(tmp_path / "data") as server:
        yield server
