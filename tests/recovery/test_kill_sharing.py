"""SIGKILL while equal rows are being shared: every prefix stays what was stored."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import free_port_block
from tests.recovery.driving import Driver, Word
from tests.recovery.hasty import Starter
from tests.recovery.material import noise, open_sealed, register, sealed_tensors
from tests.server.wire import Wire

KILLS, COUNT, WIDE = 25, 64, 1024
BLOCK_BYTES = COUNT * WIDE * 2
SIDES = ("_pk", "_pv")


def block(side: str, layer: int, position: int, seed: int) -> bytes:
    return noise((side, layer, position, seed), BLOCK_BYTES)


@dataclass
class Client:
    """Stores prefixes of which many are equal, and knows them: a seed for each block of rows."""

    dice: random.Random
    known: dict[str, list[int]] = field(default_factory=dict)
    made: int = 0

    def work(self, wire: Wire) -> None:
        """A few commands, all acknowledged."""
        for _ in range(self.dice.randrange(1, 4)):
            if len(self.known) > 5:
                gone = self.dice.choice(list(self.known))
                assert wire.ask("KV.PREFIX.DROP", gone) == 1
                del self.known[gone]
            name = f"p{self.made}"
            self.made += 1
            assert wire.ask(*register(name, 2, WIDE)) == "OK"
            self.known[name] = []
            for _ in range(self.dice.randrange(1, 3)):
                self.store(wire, name, self.dice.choice([1, 1, 1, 2]))
            if self.dice.random() < 0.3:
                wire.ask("KV.PREFIX.MAP", name)
        if self.dice.random() < 0.3:
            self.store(wire, self.dice.choice(list(self.known)), 3)
        if self.dice.random() < 0.1:
            wire.ok("KV.PREFIX.SAVE")

    def store(self, wire: Wire, name: str, seed: int) -> None:
        position = len(self.known[name])
        for layer in range(2):
            for side in SIDES:
                rows: tuple[Word, ...] = (layer, position * COUNT, COUNT)
                blob = block(side, layer, position, seed)
                layout = ("FMT", "STORED", "LAYOUT", "HND")
                wire.ok("V.STOREBATCH", name + side, *rows, blob, *layout)
        self.known[name].append(seed)

    def check(self, wire: Wire) -> None:
        """Compare all that is known, byte for byte."""
        for name, seeds in self.known.items():
            for position, seed in enumerate(seeds):
                for layer in range(2):
                    for side in SIDES:
                        place = (layer, "RANGE", position * COUNT, (position + 1) * COUNT)
                        found = wire.ask(
                            "V.FETCH", name + side, *place, "FMT", "STORED", "LAYOUT", "HND"
                        )
                        assert found == block(side, layer, position, seed), (name, position)
        for name in self.dice.sample(sorted(self.known), min(2, len(self.known))):
            # a file may go before it is opened; what was opened stays
            while not self.mapped_right(wire, name):
                pass

    def mapped_right(self, wire: Wire, name: str) -> bool:
        """Compare the files that MAP names; False when one of them is gone."""
        answer = wire.ask("KV.PREFIX.MAP", name)
        assert isinstance(answer, bytes), answer
        seen = 0
        for segment in json.loads(answer)["segments"]:
            try:
                tensors = sealed_tensors(Path(segment["path"]))
            except FileNotFoundError:
                return False
            for entry in segment["tensors"]:
                rows = self.rows(name, "_p" + entry["side"], entry["layer"])
                data = np.frombuffer(tensors[entry["name"]], np.uint8).reshape(2, -1, WIDE)
                count = entry["end"] - entry["start"]
                shown = data[:, entry["row"] : entry["row"] + count]
                assert np.array_equal(shown, rows[:, entry["start"] : entry["end"]]), entry
                seen += count
        assert seen == 4 * COUNT * len(self.known[name])
        return True

    def rows(self, name: str, side: str, layer: int) -> NDArray[np.uint8]:
        """What a layer holds: two heads, rows, bytes of one head's share."""
        blocks = [block(side, layer, at, seed) for at, seed in enumerate(self.known[name])]
        return np.concatenate(
            [np.frombuffer(one, np.uint8).reshape(2, COUNT, WIDE) for one in blocks], axis=1
        )


def started(starter: Starter, port: int, log: Path, folder: Path) -> int:
    flags = ["--kvcache", "--wal-size", "1", "--appendfsync", "no"]
    pid = starter.start(log, *flags, "-p", str(port), "--dir", str(folder))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return pid
        except OSError:
            time.sleep(0.005)
    raise AssertionError(log.read_text())


@pytest.mark.timeout(300)
def test_kills_while_rows_are_shared_lose_and_mix_up_nothing(folder: Path, tmp_path: Path) -> None:
    dice = random.Random(1974)
    client, port, shared = Client(dice), free_port_block(), 0
    with Starter() as starter:
        for _ in range(KILLS):
            pid = started(starter, port, tmp_path / "log", folder)
            with Wire.tcp(port) as wire:
                client.check(wire)
                client.work(wire)
                time.sleep(dice.random() * 0.15)
                info = wire.info("KV.PREFIX.INFO")
                shared += int(info["vstore_disk_bytes"]) < 0.9 * int(info["vstore_bytes"])
                os.kill(pid, signal.SIGKILL)
            starter.wait(pid)
    assert shared > KILLS // 4, "rows were being shared"
    with Driver(folder) as driver:
        assert driver.store.counters.damaged == 0
        assert set(driver.store.state.namespaces()) == {name.encode() for name in client.known}
        open_sealed(driver)
    assert "damaged" not in (tmp_path / "log").read_text()
