"""Rollback points: what was taken back stays away, through restarts, SAVE, sealing and cuts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.recovery.broken import VSTORE_WAL, Copies, boundaries, content_of
from tests.recovery.driving import Driver, Word
from tests.recovery.material import noise, open_sealed, register
from tests.recovery.test_reclaim import tidy

WIDTH = 64
ROW_BYTES = 2 * WIDTH
STEPS = ("store", "point", "restore", "again", "seal", "tidy")
LONG = 600  # rows of 128 bytes: more than ride in the log


def store(sid: str, layer: int, start: int, count: int, salt: int) -> tuple[Word, ...]:
    blob = noise((salt, start), count * ROW_BYTES)
    return ("V.STOREBATCH", sid, layer, start, count, blob, "FMT", "STORED")


@dataclass
class Layer:
    """What a layer must hold: rows by token, and its token count."""

    rows: dict[int, bytes] = field(default_factory=dict)
    count: int = 0

    def put(self, start: int, blob: bytes) -> None:
        for n in range(len(blob) // ROW_BYTES):
            self.rows[start + n] = blob[n * ROW_BYTES : (n + 1) * ROW_BYTES]
        self.count = max(self.count, start + len(blob) // ROW_BYTES)

    def truncate(self, length: int) -> None:
        if self.count > length:
            self.rows = {n: row for n, row in self.rows.items() if n < length}
            self.count = length if self.rows else 0

    def data(self) -> bytes:
        return b"".join(self.rows.get(n, bytes(ROW_BYTES)) for n in range(self.count))


@dataclass
class Walk:
    """A store and the simple one beside it, through the same random steps."""

    folder: Path
    seed: int
    layers: tuple[Layer, ...] = field(default_factory=lambda: (Layer(), Layer()))
    points: dict[int, list[int]] = field(default_factory=dict)

    def run(self, steps: int) -> int:
        """How many truncations there were."""
        random_ = random.Random(self.seed)
        self.driver = Driver(self.folder)
        self.driver.ask(*register("n", 2, WIDTH))
        truncations = 0
        for step in range(steps):
            (kind,) = random_.choices(STEPS, (8, 4, 5, 1, 1, 2))
            match kind:
                case "store":
                    self.store(random_, step)
                case "point" if len(self.points) < 16:
                    point = self.driver.ask("V.SNAPSHOT", "n_pk")
                    self.points[point] = [layer.count for layer in self.layers]
                case "restore" if self.points:
                    truncations += self.restore(random_.choice(list(self.points)))
                case "again":
                    self.start_again(random_.random() < 0.6)
                case "seal":
                    self.driver.ask("KV.PREFIX.MAP", "n")
                case "tidy":
                    tidy(self.driver)
            self.check(step)
        self.start_again(True)
        self.start_again(False)
        self.check(steps)
        self.driver.crash()
        return truncations

    def store(self, random_: random.Random, step: int) -> None:
        number = random_.randrange(2)
        layer = self.layers[number]
        start = random_.choice((layer.count, random_.randrange(layer.count + 3), layer.count + 7))
        count = random_.choice((1, 5, 40, 4 * LONG if random_.random() < 0.5 else 9))
        words = store("n_pk", number, start, count, step)
        self.driver.ask(*words)
        blob = words[5]
        assert isinstance(blob, bytes)
        layer.put(start, blob)

    def restore(self, point: int) -> int:
        before = [layer.count for layer in self.layers]
        assert self.driver.ask("V.RESTORE", "n_pk", point) == "OK"
        for layer, length in zip(self.layers, self.points[point], strict=True):
            layer.truncate(length)
        return [layer.count for layer in self.layers] != before

    def start_again(self, save: bool) -> None:
        if save:
            self.driver.ask("KV.PREFIX.SAVE")
            open_sealed(self.driver)
        self.driver.crash()
        self.driver = Driver(self.folder)
        self.points.clear()  # in memory only

    def check(self, step: int) -> None:
        content = self.driver.content()
        for number, layer in enumerate(self.layers):
            found = content.get(("rows", b"n_pk", number))
            if not layer.rows:
                assert found is None, (step, number)
                continue
            assert found is not None, (step, number)
            assert found[0] == layer.count, (step, number)
            assert found[2] == layer.data(), (step, number)
            shown = {n for a, b in found[1] for n in range(a, b)}
            assert shown == set(layer.rows), (step, number)


def test_random_steps_leave_what_a_simple_store_holds(folder: Path) -> None:
    truncations = 0
    for seed in range(25):
        place = folder / str(seed)
        place.mkdir()
        truncations += Walk(place, seed).run(40)
    assert truncations > 60


def test_what_lay_under_a_truncated_run_does_not_come_back_with_the_snapshot(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("n", 1, WIDTH))
        driver.ask(*store("n_pk", 0, 0, 60, 1))
        point = driver.ask("V.SNAPSHOT", "n_pk")
        driver.ask(*store("n_pk", 0, 40, 60, 2))
        driver.ask(*store("n_pk", 0, 50, 50, 3))  # hides the end of the second run
        driver.ask("V.RESTORE", "n_pk", point)
        driver.ask(*store("n_pk", 0, 80, 5, 4))
        before = driver.content()
        driver.ask("KV.PREFIX.SAVE")
        assert driver.content() == before
    assert before["rows", b"n_pk", 0][:2] == (85, ((0, 60), (80, 85)))
    assert content_of(folder) == before


def test_a_token_count_that_no_run_reaches_survives_a_save(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("n", 1, WIDTH))
        points = []
        for salt, (start, count) in enumerate(((0, 5), (5, 10))):
            driver.ask(*store("n_pk", 0, start, count, salt))
            points.append(driver.ask("V.SNAPSHOT", "n_pk"))
        driver.ask("V.RESTORE", "n_pk", points[0])
        driver.ask(*store("n_pk", 0, 20, 5, 3))
        driver.ask("V.RESTORE", "n_pk", points[1])
        before = driver.content()
        assert before["rows", b"n_pk", 0][:2] == (15, ((0, 5),))
    assert content_of(folder) == before
    with Driver(folder) as driver:
        driver.ask("KV.PREFIX.SAVE")
    assert content_of(folder) == before


@pytest.mark.parametrize("count", [5, LONG])
def test_a_log_cut_anywhere_in_a_truncation_has_all_of_it_or_nothing(
    folder: Path, count: int
) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("n", 2, WIDTH))
        driver.ask(*store("n_pk", 0, 0, count, 1))
        point = driver.ask("V.SNAPSHOT", "n_pk")
        driver.ask(*store("n_pk", 0, count, 3, 2))
        driver.ask(*store("n_pk", 1, 0, count, 3))
        before = driver.content()
        driver.ask("V.RESTORE", "n_pk", point)
        after = driver.content()
    assert ("rows", b"n_pk", 1) in before and ("rows", b"n_pk", 1) not in after
    copies = Copies(folder)
    *_, begin, end = boundaries(folder / VSTORE_WAL)
    for size in range(begin, end):
        assert content_of(copies.cut(VSTORE_WAL, size)) == before, size
    assert content_of(copies.fresh()) == after


def test_rows_that_were_taken_back_give_their_space_back(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("n", 1, WIDTH))
        point = driver.ask("V.SNAPSHOT", "n_pk")
        driver.ask(*store("n_pk", 0, 0, LONG, 1))
        assert driver.store.space.disk_bytes() > 0
        driver.ask("V.RESTORE", "n_pk", point)
        assert driver.store.space.disk_bytes() == 0
        assert driver.store.state.sessions[b"n_pk"].empty
    assert ("rows", b"n_pk", 0) not in content_of(folder)
