"""A server of ours beside a real Redis: the same commands go to both."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Wire

REDIS_SERVER = shutil.which("redis-server")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that the tests of one module share; without --kvcache keys work too."""
    folder: Path = tmp_path_factory.mktemp("shared") / "data"
    folder.mkdir(mode=0o700)
    server = RunningServer(free_port_block(), folder)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A real redis-server that keeps nothing."""
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("redis")
    port = free_port_block() + 3
    command = [REDIS_SERVER, "--port", str(port), "--save", "", "--appendonly", "no"]
    command += ["--dir", str(folder), "--bind", "127.0.0.1", "--daemonize", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        for _ in range(500):
            try:
                Wire.tcp(port).close()
                break
            except OSError:
                time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=15)


@pytest.fixture
def wire(shared: RunningServer) -> Iterator[Wire]:
    """A connection to our server, its keys cleared."""
    with closing(Wire.tcp(shared.port)) as connection:
        connection.ok("FLUSHALL")
        yield connection


@pytest.fixture
def redis_wire(redis_port: int) -> Iterator[Wire]:
    """A connection to the real Redis, its keys cleared."""
    with closing(Wire.tcp(redis_port)) as connection:
        connection.ok("FLUSHALL")
        yield connection
