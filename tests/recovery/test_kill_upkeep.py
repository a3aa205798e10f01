"""SIGKILL while the server saves itself under steady load: what was acknowledged is there."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import RunningServer, free_port_block
from tests.recovery.broken import SSM_WAL, VSTORE_WAL
from tests.recovery.driving import Driver, Word
from tests.recovery.material import noise, open_sealed, register, rows, state
from tests.recovery.model import Model
from tests.server.wire import Wire, request

KILLS, SAVES = 6, 3
#: a machine that is busy stores less between two kills, and saves less often.
MOST_KILLS = 40
#: commands that are sent at once: the server never waits for the client.
PACKET = 20
WAL_SIZE = 1 << 20
#: in a busy time a log is saved where it is as long as its snapshot, up to this; who adds to it
#: waits then. Beyond it are one record, and those that a save writes of its own.
LIMIT, BEYOND = 4 * WAL_SIZE, WAL_SIZE // 4
Words = tuple[Word, ...]
#: one command: from a source of chance, its number, and how many of all store a state.
Some = Callable[[random.Random, int, float], Words]


def filling() -> list[Words]:
    """What makes both snapshots longer than the limit: no save that is due comes before it."""
    hashes = 100_000
    blocks: Words = ("BLOCKS", 64, hashes, noise("hashes", 8 * hashes))
    long = [(*register(f"fill{number}"), *blocks) for number in range(LIMIT // (8 * hashes) + 1)]
    short = [state(f"fill@{number}", 0, 3_900) for number in range(LIMIT // 3_900 + 1)]
    return [*long, *short]


def flushed_words(dice: random.Random, number: int, states: float) -> Words:
    """Where a store is flushed before its answer all below 64 KiB rides in the logs."""
    name = dice.choice("ab")
    if dice.random() < states:
        return state(name, dice.randrange(3), 40_000, number)
    sid = name + dice.choice(["_pk", "_pv"])
    return rows(sid, dice.randrange(2), dice.randrange(40), dice.choice([3, 200, 400]))


def short_words(dice: random.Random, number: int, states: float) -> Words:
    """Else what its session, or sid, has less than 4 KiB of."""
    name = dice.choice("ab")
    if dice.random() < states:
        return state(f"{name}@{dice.randrange(8)}", 0, 3_900, number)
    sid = name + dice.choice(["_pk", "_pv"])
    blob = noise((sid, number), 15 * 128)
    return ("V.STOREBATCH", sid, 0, 0, 15, blob, "FMT", "STORED", "LAYOUT", "HND")


class Writer(threading.Thread):
    """Stores one thing after the other until the server goes away."""

    def __init__(self, port: int, words: Callable[[int], Words]) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.words = words
        self.sent: list[Words] = []
        self.acknowledged = 0

    def run(self) -> None:
        try:
            with Wire.tcp(self.port) as wire:
                while True:
                    first = len(self.sent)
                    packet = [self.words(first + n) for n in range(PACKET)]
                    self.sent += packet
                    wire.send(b"".join(request(*words) for words in packet))
                    for _ in packet:
                        assert wire.reply() == "OK"
                        self.acknowledged += 1
        except (EOFError, OSError):
            return


@dataclass
class Watch:
    """How long the logs of a folder were, and how often it was saved, while it was watched."""

    folder: Path
    longest: dict[str, int] = field(default_factory=lambda: dict.fromkeys((VSTORE_WAL, SSM_WAL), 0))
    saves: int = 0

    def look(self, seconds: float) -> None:
        manifest = self.folder / "pion.vstore.0"
        saved = manifest.stat().st_mtime_ns
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            for name, longest in self.longest.items():
                self.longest[name] = max(longest, (self.folder / name).stat().st_size)
            time.sleep(0.005)
        self.saves += manifest.stat().st_mtime_ns != saved

    @property
    def reached(self) -> bool:
        return min(self.longest.values()) > LIMIT


def after_all(model: Model, commands: list[Words]) -> Model:
    for words in commands:
        model = model.after(words)
    return model


def is_among(found: Model, model: Model, unanswered: list[Words]) -> bool:
    """Whether it is ``model``, or that after some of the commands that have no answer."""
    for words in unanswered:
        if found == model:
            return True
        model = model.after(words)
    return found == model


@pytest.mark.parametrize(
    ("words", "flags"),
    [(short_words, ()), (flushed_words, ("--appendfsync", "always"))],
    ids=["short", "flushed"],
)
def test_kills_while_the_server_saves_itself_lose_and_invent_nothing(
    folder: Path,
    tmp_path: Path,
    words: Some,
    flags: tuple[str, ...],
) -> None:
    server = RunningServer(free_port_block(), folder, ("--wal-size", "1", *flags))
    try:
        _kill_again_and_again(server, tmp_path, words)
    finally:
        server.kill()


def _kill_again_and_again(server: RunningServer, tmp_path: Path, words: Some) -> None:
    server.start()
    before = [register("a"), register("b"), *filling()]
    model = after_all(Model(), before)
    with Wire.tcp(server.port) as wire:
        assert {*wire.together(*before, ("KV.PREFIX.SAVE",))} == {"OK"}
    watch = Watch(server.dir)
    for turn in range(MOST_KILLS):
        if turn >= KILLS and watch.saves >= SAVES and watch.reached:
            break
        dice = random.Random(turn)
        # a save shortens both: whichever log was not at its limit yet gets most
        states = 0.9 if watch.longest[SSM_WAL] <= LIMIT else 0.1
        seconds = 0.5 + dice.random() * 0.7
        writer = Writer(server.port, partial(words, dice, states=states))
        writer.start()
        watch.look(seconds)
        server.kill()
        writer.join()

        copy = tmp_path / f"copy{turn}"
        shutil.copytree(server.dir, copy)
        with Driver(copy) as driver:
            found = Model.of(driver.content())
            assert driver.store.counters.damaged == 0
            open_sealed(driver)
        shutil.rmtree(copy)
        model = after_all(model, writer.sent[: writer.acknowledged])
        assert is_among(found, model, writer.sent[writer.acknowledged :]), turn
        model = found
        server.start()
    assert watch.saves >= SAVES, "the server saved itself while it was stored to"
    assert watch.reached, "both logs were as long as they may be"
    assert max(watch.longest.values()) < LIMIT + BEYOND, watch.longest
