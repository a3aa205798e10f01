"""The server of one test, with the flags it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Wire

StartServer = Callable[..., RunningServer]
Connect = Callable[[RunningServer], Wire]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens connections that are closed at the end, however the test ends."""
    opened: list[Wire] = []

    def open_one(server: RunningServer) -> Wire:
        opened.append(Wire.tcp(server.port))
        return opened[-1]

    yield open_one
    for wire in opened:
        wire.close()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server on its own folder, ``data`` unless another is given."""
    started: list[RunningServer] = []

    def start(*flags: str, folder: Path | None = None) -> RunningServer:
        server = RunningServer(free_port_block(), folder or tmp_path / "data", flags)
        started.append(server)
        return server.start()

    try:
        yield start
    finally:
        for server in started:
            server.stop()
