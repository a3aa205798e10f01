"""What a test can see of a server from outside: memory, open files, segment files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import RunningServer
from tests.server.wire import Wire

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def anonymous_bytes(server: RunningServer) -> int:
    """Memory of its own, files it has mapped or read left out."""
    for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def open_files(server: RunningServer) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def segment_files(server: RunningServer) -> list[Path]:
    return sorted((server.dir / "pion.segments.0").iterdir())


def eventually(what: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Whether something becomes true before it takes absurdly long."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def only_client(wire: Wire) -> bool:
    """Whether the server has noticed that everybody else is gone."""
    return wire.info("INFO", "clients")["connected_clients"] == "1"
