"""SIGKILL at any moment: what was acknowledged is there bit for bit, and nothing else."""

from __future__ import annotations

import random
import select
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningServer, free_port_block
from tests.recovery.driving import Content, Driver, Word
from tests.recovery.material import (
    COMPLETION_LAYER,
    agrees,
    open_sealed,
    register,
    rows,
    state,
    whole_store,
)
from tests.recovery.model import Model
from tests.server.wire import Refusal, Wire, request

KILLS = 56
WIDE = 4096  # values a row: 600 rows are 4.9 MB, more than one window
Words = tuple[Word, ...]


@pytest.fixture
def server(folder: Path) -> Iterator[RunningServer]:
    """A server that is not started yet."""
    running = RunningServer(free_port_block(), folder)
    yield running
    running.kill()


def _found(server: RunningServer) -> tuple[Content, int]:
    """What a start on a copy of the killed server's folder finds; sealed files are opened."""
    copy = server.dir.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(server.dir, copy, ignore=shutil.ignore_patterns("*.sock"))
    with Driver(copy) as driver:
        content = driver.content()
        assert driver.store.counters.damaged == 0
        driver.loop.run_until_complete(driver.store.save())
        sealed = open_sealed(driver)
        assert driver.content() == content, "sealing changes nothing"
        return content, sealed


def _commands() -> Iterator[Words]:
    """Every kind of command of a store, one after the other."""
    yield from whole_store("a")
    yield register("wide", 1, WIDE)
    yield rows("wide_pk", 0, 0, 600, WIDE)
    yield ("KV.PREFIX.MAP", "a")
    yield rows("a_pk", 0, 5, 6)
    yield ("KV.PREFIX.SAVE",)
    yield rows("a_pv", 1, 3, 700)
    yield state("a", 1, 5_000_000)
    yield ("KV.PREFIX.MAP", "a")
    yield ("KV.PREFIX.DROP", "a")


def test_a_kill_after_every_single_command_loses_and_invents_nothing(
    server: RunningServer,
) -> None:
    expected = Model()
    for number, words in enumerate(_commands()):
        server.start()
        with Wire.tcp(server.port) as wire:
            answer = wire.ask(*words)
            assert not isinstance(answer, Refusal), (words[:5], answer)
        server.kill()
        expected = expected.after(words)
        content, _ = _found(server)
        assert Model.of(content) == expected, (number, words[:5])


class Loop:
    """A client that stores for ever, and a server that is killed under it again and again."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.expected = Model()
        self.round = 0
        self.in_flight: dict[str, int] = {}
        self.sealed = 0

    def words(self) -> Words:
        """Some command; every kind comes up often."""
        draw, name = self.random.random(), self.random.choice("abc")
        if f"{name}_pk".encode() not in self.expected.sessions:
            return register(name, 2, WIDE if name == "c" else 64)
        if draw < 0.15:
            return ("KV.PREFIX.MAP", name)
        if draw < 0.30:
            return ("KV.PREFIX.SAVE",)
        if draw < 0.36:
            return ("KV.PREFIX.DROP", name)
        if draw < 0.60:
            sid = self.random.choice([name, f"{name}@64"])
            length = self.random.choice([500, 70_000, 5_000_000])
            return state(sid, self.random.choice([0, COMPLETION_LAYER]), length, self.round)
        width = WIDE if name == "c" else 64
        count = self.random.choice([3, 600])
        sid = name + self.random.choice(["_pk", "_pv"])
        return rows(sid, self.random.randrange(2), self.random.randrange(40), count, width)

    def one_round(self) -> None:
        """Start, store for a while, kill within a command or after it, compare."""
        self.round += 1
        self.server.start()
        with Wire.tcp(self.server.port) as wire:
            for _ in range(self.random.randrange(4)):
                words = self.words()
                answer = wire.ask(*words)
                assert not isinstance(answer, Refusal), (words[:5], answer)
                self.expected = self.expected.after(words)
            words = self.words()
            acknowledged = self._killed_within(wire, words)
        content, sealed = _found(self.server)
        self.sealed += sealed
        self._compare(Model.of(content), words, acknowledged)

    def _killed_within(self, wire: Wire, words: Words) -> bool:
        """Send a command, or a part of it, kill, and see whether it was answered."""
        data = request(*words)
        if self.round % 4 == 0:
            data = data[: self.random.randrange(1, len(data))]
        wire.send(data)
        time.sleep(self.random.choice([0, 0, 0.0005, 0.001, 0.002, 0.004]))
        self.server.kill()
        readable, _, _ = select.select([wire.sock], [], [], 0)
        if readable:
            try:
                answer = wire.reply()
            except (EOFError, ConnectionError):
                pass
            else:
                assert not isinstance(answer, Refusal), (words[:5], answer)
                return True
        kind = str(words[0])
        self.in_flight[kind] = self.in_flight.get(kind, 0) + 1
        return False

    def _compare(self, found: Model, words: Words, acknowledged: bool) -> None:
        after = self.expected.after(words)
        allowed = [after] if acknowledged else [self.expected, after]
        if words[0] == "KV.PREFIX.DROP" and not acknowledged:
            allowed.append(self.expected.without_states(str(words[1]).encode()))
        assert found in allowed, (self.round, words[:5], acknowledged)
        self.expected = found


def test_kills_at_random_moments_of_a_store_loop_lose_and_invent_nothing(
    server: RunningServer,
) -> None:
    loop = Loop(server, seed=1974)
    for _ in range(KILLS):
        loop.one_round()

    assert sum(loop.in_flight.values()) >= 20, loop.in_flight
    assert {"V.STOREBATCH", "SSM.PREFIX.STORE", "KV.PREFIX.SAVE"} <= set(loop.in_flight)
    assert loop.sealed >= KILLS, "most rounds sealed something"


def test_a_kill_right_behind_a_pipeline_keeps_what_was_answered(server: RunningServer) -> None:
    commands = [*whole_store("a")]
    for kill_after in (0, 3, 7, 11):
        server.start()
        with Wire.tcp(server.port) as wire:
            wire.send(b"".join(request(*words) for words in commands))
            for _ in range(kill_after):
                wire.reply()
            server.kill()
        states = [Model()]
        for words in commands:
            states.append(states[-1].after(words))
        found = Model.of(_found(server)[0])
        assert found in states[kill_after:], kill_after
        shutil.rmtree(server.dir)
        server.dir.mkdir(mode=0o700)


def test_mapped_and_fetched_rows_agree_after_kills(server: RunningServer) -> None:
    server.start()
    with Wire.tcp(server.port) as wire:
        for words in whole_store("a"):
            wire.ok(*words)
        server.kill()
        server.start()
    with Wire.tcp(server.port) as wire:
        assert wire.ask("KV.PREFIX.MAP", "a").startswith(b"{")
        wire.ok(*rows("a_pk", 0, 6, 20))
        server.kill()
    with Driver(server.dir) as driver:
        assert agrees(driver, "a") >= 8
        assert open_sealed(driver) >= 2
