"""SIGKILL while the server saves itself under steady load: what was acknowledged is there."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningServer, free_port_block
from tests.recovery.driving import Driver, Word
from tests.recovery.material import open_sealed, register, rows, state
from tests.recovery.model import Model
from tests.server.wire import Wire

KILLS, SAVES = 10, 5
#: a machine that is busy stores less between two kills, and saves less often.
MOST_KILLS = 40
Words = tuple[Word, ...]


@pytest.fixture
def server(folder: Path) -> Iterator[RunningServer]:
    """A server with the smallest log; not started yet."""
    running = RunningServer(free_port_block(), folder, ("--wal-size", "1"))
    yield running
    running.kill()


class Writer(threading.Thread):
    """Stores one thing after the other until the server goes away."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.random = random.Random(seed)
        self.sent: list[Words] = []
        self.acknowledged = 0

    def words(self) -> Words:
        name = self.random.choice("ab")
        if self.random.random() < 0.3:
            return state(name, self.random.randrange(3), 40_000, len(self.sent))
        sid = name + self.random.choice(["_pk", "_pv"])
        place = (self.random.randrange(2), self.random.randrange(40))
        return rows(sid, *place, self.random.choice([3, 200, 400]))

    def run(self) -> None:
        try:
            with Wire.tcp(self.port) as wire:
                while True:
                    self.sent.append(self.words())
                    wire.ok(*self.sent[-1])
                    self.acknowledged += 1
        except (EOFError, OSError):
            return


def after_all(model: Model, commands: list[Words]) -> Model:
    for words in commands:
        model = model.after(words)
    return model


def test_kills_while_the_server_saves_itself_lose_and_invent_nothing(
    server: RunningServer, tmp_path: Path
) -> None:
    server.start()
    model, saves, longest = Model(), 0, 0
    with Wire.tcp(server.port) as wire:
        for name in "ab":
            wire.ok(*register(name))
            model = model.after(register(name))
    for turn in range(MOST_KILLS):
        if turn >= KILLS and saves >= SAVES:
            break
        manifest = server.dir / "pion.vstore.0"
        before = manifest.stat().st_mtime_ns if manifest.exists() else 0
        writer = Writer(server.port, turn)
        writer.start()
        time.sleep(0.5 + random.Random(turn).random() * 0.7)
        server.kill()
        writer.join()
        saves += manifest.exists() and manifest.stat().st_mtime_ns != before
        longest = max(longest, (server.dir / "pion.vstore.wal.0").stat().st_size)

        copy = tmp_path / f"copy{turn}"
        shutil.copytree(server.dir, copy)
        with Driver(copy) as driver:
            found = Model.of(driver.content())
            assert driver.store.counters.damaged == 0
            open_sealed(driver)
        model = after_all(model, writer.sent[: writer.acknowledged])
        unanswered = writer.sent[writer.acknowledged :]
        assert found in (model, after_all(model, unanswered)), turn
        model = found
        server.start()
    assert saves >= SAVES, "the server saved itself while it was stored to"
    assert longest < 32 << 20, "the log stays bounded, on a machine that is busy too"
