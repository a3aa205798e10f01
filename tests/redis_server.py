"""A real redis-server, the other implementation that ours is compared with."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class RealRedis:
    """Where it listens: a port of this machine and a Unix socket."""

    port: int
    socket: Path


@contextmanager
def running_redis(folder: Path) -> Iterator[RealRedis]:
    """A redis-server that keeps nothing; the test is skipped where none is installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        real = RealRedis(probe.getsockname()[1], folder / "s")
    command = [program, "--port", str(real.port), "--unixsocket", str(real.socket), "--save", ""]
    process = subprocess.Popen([*command, "--dir", str(folder)], stdout=subprocess.DEVNULL)
    try:
        while not real.socket.exists():
            assert process.poll() is None
            time.sleep(0.01)
        yield real
    finally:
        process.terminate()
        process.wait()
