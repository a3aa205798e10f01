"""Stored rows go from the file to the socket without a copy in the server."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.conftest import RunningServer, free_port_block
from tests.server.telling_sendfile import LINE
from tests.server.wire import Wire

WIDTH, ROWS = 1024, 2048
NBYTES = WIDTH * ROWS * 2


@pytest.mark.skipif(not hasattr(os, "sendfile"), reason="the platform has no sendfile")
@pytest.mark.parametrize("sealed", [False, True], ids=["open segment", "sealed"])
def test_a_stored_fetch_of_4_mb_is_sent_by_sendfile(tmp_path: Path, sealed: bool) -> None:
    assert NBYTES == 4 << 20
    server = RunningServer(
        free_port_block(), tmp_path / "data", module="tests.server.telling_sendfile"
    )
    blob = random.Random(1).randbytes(NBYTES)
    try:
        server.start()
        with Wire.tcp(server.port) as wire:
            wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "bf16")
            for side in ("_pk", "_pv"):
                wire.ok("V.STOREBATCH", "n" + side, 0, 0, ROWS, blob, "FMT", "STORED")
            if sealed:
                assert isinstance(wire.ask("KV.PREFIX.MAP", "n"), bytes)
            before = _sent(server)
            assert wire.ask("V.FETCH", "n_pk", 0, "RANGE", 0, ROWS, "FMT", "STORED") == blob
            assert _sent(server) - before == NBYTES
    finally:
        server.stop()


def _sent(server: RunningServer) -> int:
    """Bytes that went through sendfile until now."""
    lines = server.output().splitlines()
    return sum(int(line.removeprefix(LINE)) for line in lines if line.startswith(LINE))
