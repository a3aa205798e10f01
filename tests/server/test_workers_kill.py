"""Workers killed under load: nothing that was acknowledged is lost, none of it is wrong."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Refusal, Wire

WORKERS = 2
KILLS = 8
#: rows of 256 bytes.
WIDTH = 64
CLIENTS = 4


@pytest.fixture(params=["everysec", "always"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    flags = ("-w", str(WORKERS), "--independent-workers", "--appendfsync", request.param)
    running = RunningServer(free_port_block(2 + WORKERS), folder, flags).start()
    yield running
    running.stop()


class Client(threading.Thread):
    """Stores runs of rows in a namespace of one worker; remembers what was acknowledged."""

    def __init__(self, server: RunningServer, number: int) -> None:
        super().__init__(daemon=True)
        self.worker = number % WORKERS
        self.port = server.port + 2 + self.worker
        self.name = f"load{number}"
        self.draw = random.Random(number)
        self.acknowledged: dict[int, bytes] = {}
        self.tried: dict[int, bytes] = {}
        self.keys = 0
        self.stop = False
        self.failure = ""

    def run(self) -> None:
        while not self.stop and not self.failure:
            try:
                with Wire.tcp(self.port) as wire:
                    while not self.stop:
                        self._step(wire)
            except (OSError, EOFError):
                time.sleep(0.02)

    def _step(self, wire: Wire) -> None:
        if not self.tried:
            wire.ok("KV.PREFIX.REGISTER", self.name, WIDTH, "fp32")
        at = len(self.tried)
        # below and above what rides in the log where every store is flushed; else the first ones do
        count = self.draw.choice([1, 60, 300])
        data = self.draw.randbytes(4) * (WIDTH * count)
        self.tried[at] = data
        answer = wire.ask("V.STOREBATCH", f"{self.name}_pk", at, 0, count, data)
        if isinstance(answer, Refusal):
            self.failure = str(answer)
            return
        self.acknowledged[at] = data
        wire.ok("SET", self.name, self.keys + 1)
        self.keys += 1

    def check(self, wire: Wire) -> None:
        """Acknowledged rows are there; one in flight is there in whole or not at all."""
        for at, data in self.tried.items():
            count = len(data) // (4 * WIDTH)
            found = wire.ask("V.FETCH", f"{self.name}_pk", at, "RANGE", 0, count)
            assert found == data or (at not in self.acknowledged and found is None), at
        assert int(wire.ask("GET", self.name)) in (self.keys, self.keys + 1)


def test_workers_killed_under_load_lose_nothing_acknowledged(server: RunningServer) -> None:
    clients = [Client(server, number) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    draw = random.Random(3)
    for _ in range(KILLS):
        time.sleep(draw.uniform(0.05, 0.4))
        worker = draw.randrange(WORKERS)
        with Wire.tcp(server.port + 2 + worker) as wire:
            pid = int(wire.info("INFO", "server")["worker_process_id"])
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    for client in clients:
        client.stop = True
    for client in clients:
        client.join(timeout=30)
        assert not client.failure and len(client.acknowledged) > KILLS
    with Wire.tcp(server.port) as anyone:
        for client in clients:
            assert anyone.ask("KV.PREFIX.OWNER", client.name) == str(client.worker)
            assert anyone.ask("KV.PREFIX.LOOKUP", client.name) == "HIT"
    for client in clients:
        with Wire.tcp(client.port) as wire:
            client.check(wire)
            assert wire.info("KV.PREFIX.INFO")["vstore_damaged"] == "0"
