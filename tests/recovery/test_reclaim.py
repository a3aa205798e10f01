"""Reclaiming: dead bytes go, nothing else changes, whatever happens in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.compaction import Job
from pion_vllm_mlx.server.store.index import InSegment
from pion_vllm_mlx.server.store.reclaim import Reclaimer
from tests.recovery.broken import content_of
from tests.recovery.conftest import MOST_RUNS as MOST
from tests.recovery.driving import Content, Driver, Options, Word
from tests.recovery.faults import failing
from tests.recovery.material import agrees, noise, open_sealed, register, rows, state
from tests.recovery.model import Model

WIDE = 1024
#: rows of 2 KB, both sides and two layers: 4 MB.
COUNT = 512


def tidy(driver: Driver, limit: int = 100) -> int:
    """Reclaim until there is nothing to do; how many steps did something."""
    reclaimer = Reclaimer(driver.store)
    for steps in range(limit):
        busy = driver.loop.run_until_complete(reclaimer.step())
        if not busy and not driver.store.state.untidy:
            return steps
    raise AssertionError("never at rest")


def disk(driver: Driver) -> int:
    return driver.store.space.disk_bytes()


def names(driver: Driver) -> set[str]:
    return {path.name for path in driver.store.segments.path.iterdir()}


def half_dead(driver: Driver, name: str = "a") -> Content:
    """A sealed segment of which most was overwritten; what is stored in the end."""
    driver.ask(*register(name, 2, WIDE))
    for layer in range(2):
        for side in ("_pk", "_pv"):
            driver.ask(*rows(name + side, layer, 0, COUNT, WIDE))
    driver.ask("KV.PREFIX.MAP", name)
    for layer in range(2):
        for side in ("_pk", "_pv"):
            driver.ask(*rows(name + side, layer, 100, COUNT - 100, WIDE))
    driver.ask("KV.PREFIX.MAP", name)
    return driver.content()


def test_overwritten_rows_give_their_bytes_back_and_nothing_else_changes(folder: Path) -> None:
    with Driver(folder) as driver:
        half_dead(driver)
        driver.ask(*register("other"))
        expected = driver.content()
        order, before = driver.access_order(), disk(driver)

        assert tidy(driver) >= 1

        live = sum(s.row_bytes() for s in driver.store.state.sessions.values())
        assert before > 1.7 * live and disk(driver) < 1.1 * live + 70_000
        assert driver.content() == expected and driver.access_order() == order
        assert all(session.published for session in driver.store.state.sessions.values())
        assert agrees(driver, "a") == 8 and open_sealed(driver) == 2
        assert driver.store.counters.bytes_copied >= 100 * 2 * WIDE * 4
    with Driver(folder) as driver:
        assert driver.content() == expected and driver.access_order() == order
        assert agrees(driver, "a") == 8
        driver.ask("KV.PREFIX.SAVE")
    assert content_of(folder) == expected


def test_a_tidy_store_is_left_alone(folder: Path) -> None:
    with Driver(folder) as driver:
        half_dead(driver)
        driver.ask(*register("b"))
        driver.ask(*rows("b_pk", 0, 0, 600))
        tidy(driver)
        size, files = driver.store.vstore_wal.size, names(driver)
        driver.store.state.untidy.update({b"a": None, b"b": None})
        assert tidy(driver) == 0
        assert (driver.store.vstore_wal.size, names(driver)) == (size, files)
    with Driver(folder) as driver:
        assert tidy(driver) == 0 and names(driver) == files


def test_a_restart_finds_what_was_dead_before(folder: Path) -> None:
    with Driver(folder) as driver:
        expected = half_dead(driver)
        driver.ask("KV.PREFIX.SAVE")
        before = disk(driver)
    with Driver(folder) as driver:
        assert tidy(driver) >= 1
        assert disk(driver) < 0.75 * before and driver.content() == expected


def test_a_crash_within_reclaiming_loses_nothing(folder: Path) -> None:
    for fail_at in range(120):
        place = folder / str(fail_at)
        place.mkdir()
        with Driver(place) as driver:
            expected = half_dead(driver)
            driver.ask(*state("a", 0, 900_000))
            driver.ask(*state("a", 1, 70_000))
            driver.ask("KV.PREFIX.MAP", "a")
            driver.ask("SSM.PREFIX.DROP", "a", 0)
            expected = driver.content()
            with failing(fail_at, forever=True) as faults:
                try:
                    tidy(driver)
                except (CommandError, OSError):
                    assert faults.failed
        with Driver(place) as driver:
            assert driver.store.counters.damaged == 0, (fail_at, faults.failed)
            assert driver.content() == expected, (fail_at, faults.failed)
            assert agrees(driver, "a") == 8
            open_sealed(driver)
            tidy(driver)
            assert driver.content() == expected
            known = {segment.path.name for segment in driver.store.segments.segments.values()}
            assert names(driver) == known
        if not faults.failed:
            assert fail_at > 10
            return
    raise AssertionError("never got through")


def test_one_call_that_fails_costs_that_step_only(folder: Path) -> None:
    for fail_at in range(120):
        place = folder / str(fail_at)
        place.mkdir()
        with Driver(place) as driver:
            expected = half_dead(driver)
            with failing(fail_at) as faults:
                try:
                    tidy(driver)
                except (CommandError, OSError):
                    assert faults.failed
            assert driver.content() == expected, (fail_at, faults.failed)
            driver.ask(*rows("a_pk", 0, 3, 5, WIDE))
            later = driver.content()
            tidy(driver)
            driver.loop.run_until_complete(driver.server.mend())
            assert driver.content() == later
            known = {segment.path.name for segment in driver.store.segments.segments.values()}
            assert names(driver) == known
            assert all(s.writers == 0 for s in driver.store.segments.segments.values())
        assert content_of(place) == later
        if not faults.failed:
            return
    raise AssertionError("never got through")


@pytest.mark.usefixtures("fewer_runs")
@pytest.mark.parametrize("turn_rows", [1, 2, 16])
def test_short_runs_of_a_growing_prefix_become_one_late_and_once_and_the_long_one_stays(
    folder: Path, turn_rows: int
) -> None:
    turns = 2 * MOST + 12
    with Driver(folder) as driver:
        _begin(driver)
        long_run = driver.store.state.sessions[b"a_pk"].layers[0].extents[0].run
        for turn in range(turns):
            _next_turn(driver, turn, turn_rows)
            if turn % 3 == 0:
                driver.ask("KV.PREFIX.MAP", "a")
            tidy(driver)
            layer = driver.store.state.sessions[b"a_pk"].layers[0]
            assert layer.extents[0].run is long_run
            if turn < MOST:
                assert len(layer.extents) == 2 + turn
                assert driver.store.counters.bytes_copied == 0
        # the runs that became others, the spare rows of these, and what is still short
        merged = turns // (MOST + 1)
        assert len(layer.extents) <= 1 + merged + MOST
        spare = 127 * WIDE * 2 * merged
        copied = driver.store.counters.bytes_copied
        assert 0 < copied <= turns * turn_rows * WIDE * 2 + spare
        expected = driver.content()
        assert expected == content_before_tidying(folder, turns, turn_rows)
        assert agrees(driver, "a") == len(layer.extents)
    assert content_of(folder) == expected


def _begin(driver: Driver) -> None:
    driver.ask(*register("a", 1, WIDE))
    driver.ask(*rows("a_pk", 0, 0, 1024, WIDE))


def _next_turn(driver: Driver, turn: int, turn_rows: int) -> None:
    driver.ask(*rows("a_pk", 0, 1024 + turn_rows * turn, turn_rows, WIDE))


def content_before_tidying(folder: Path, turns: int, turn_rows: int) -> Content:
    """The same stores into a folder that nobody tidies."""
    plain = folder / "plain"
    plain.mkdir()
    with Driver(plain) as driver:
        _begin(driver)
        for turn in range(turns):
            _next_turn(driver, turn, turn_rows)
        return driver.content()


@pytest.mark.usefixtures("fewer_runs")
@pytest.mark.parametrize("fmt", ["fp16", "int8", "mlx4g32", "fp32", "turbo4"])
@pytest.mark.parametrize("layouts", ["NHD", "HND", "mixed"])
def test_every_format_and_layout_comes_through_bit_equal(
    folder: Path, fmt: str, layouts: str
) -> None:
    if layouts != "NHD" and fmt in ("int8", "turbo4"):
        pytest.skip("these cannot be cut at heads")
    with Driver(folder) as driver:
        driver.ask("KV.PREFIX.REGISTER", "a", 128, fmt, "HEADS", 2)
        size = driver.store.state.sessions[b"a_pk"].spec(0).row_bytes
        for turn in range(MOST + 8):
            count = 700 if turn == 3 else 9
            layout = ("HND", "NHD")[turn % 2] if layouts == "mixed" else layouts
            blob = noise((turn, fmt), count * size)
            place = ("V.STOREBATCH", "a_pk", 0, turn * 7, count, blob, "FMT", "STORED")
            driver.ask(*place, "LAYOUT", layout)
        expected = driver.content()
        assert tidy(driver) >= 1
        assert len(driver.store.state.sessions[b"a_pk"].layers[0].extents) < 8
        assert driver.content() == expected
        driver.ask("KV.PREFIX.MAP", "a")
        open_sealed(driver)
    assert content_of(folder) == expected


def test_a_damaged_source_is_never_given_a_good_checksum(folder: Path) -> None:
    with Driver(folder) as driver:
        half_dead(driver)
        assert all(run.verified for run in driver.store.state.sessions[b"a_pk"].runs())
        place = driver.store.state.sessions[b"a_pk"].layers[0].extents[0].run.place
        assert isinstance(place, InSegment)
        with place.segment.path.open("r+b") as file:
            file.seek(place.offset + 11)
            (byte,) = file.read(1)
            file.seek(place.offset + 11)
            file.write(bytes([byte ^ 4]))
        tidy(driver)
        assert driver.store.counters.damaged == 2
        assert driver.ask("KV.PREFIX.LOOKUP", "a") == "MISS"
        assert names(driver) == set()
    assert content_of(folder) == {}


def test_a_damaged_state_takes_its_prefix_along(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*state("a", 0, 900_000))
        driver.ask(*state("a", 1, 70_000))
        place = driver.store.state.states[b"a"][1].place
        assert isinstance(place, InSegment)
        driver.ask("SSM.PREFIX.DROP", "a", 0)
        with place.segment.path.open("r+b") as file:
            file.seek(place.offset)
            file.write(b"other bytes")
        tidy(driver)
        assert driver.state_of("a", 1) is None and driver.store.counters.damaged == 1


def test_what_is_stored_while_a_copy_is_made_wins(folder: Path) -> None:
    dice = random.Random(5)
    with Driver(folder) as driver:
        model = Model.of(half_dead(driver))
        reclaimer = Reclaimer(driver.store)
        for turn in range(12):
            sid = dice.choice(["a_pk", "a_pv"])
            words = rows(sid, turn % 2, dice.randrange(400), dice.choice([5, 300]), WIDE)

            async def both(words: tuple[Word, ...] = words) -> None:
                driver.store.state.untidy[b"a"] = None
                step = asyncio.ensure_future(reclaimer.step())
                await asyncio.sleep(dice.choice([0, 0.001]))
                await driver._ask(words)
                await step

            driver.loop.run_until_complete(both())
            model = model.after(words)
            assert Model.of(driver.content()) == model, turn
        tidy(driver)
        assert driver.store.counters.damaged == 0
        assert Model.of(driver.content()) == model
        open_sealed(driver)
    assert Model.of(content_of(folder)) == model


@pytest.mark.parametrize("layer", [0, 1])
def test_rows_that_came_after_the_copy_was_made_win(folder: Path, layer: int) -> None:
    newer = rows("a_pk", layer, 20, 30, WIDE)
    with Driver(folder) as driver:
        model = Model.of(half_dead(driver)).after(newer)
        model = model.after(state("a", 0, 300_000, salt=1))
        driver.ask(*state("a", 0, 300_000))
        driver.ask(*state("a", 1, 900_000))
        driver.ask("SSM.PREFIX.DROP", "a", 1)
        real, written = driver.store.run, []

        async def run(work: Callable[[], Any]) -> Any:
            result = await real(work)
            if getattr(work, "__func__", None) is Job.carry_out and not written:
                written.append(work)
                await driver._ask(newer)
                await driver._ask(state("a", 0, 300_000, salt=1))
            return result

        with mock.patch.object(driver.store, "run", run):
            tidy(driver)
        assert written and Model.of(driver.content()) == model
        open_sealed(driver)
    assert Model.of(content_of(folder)) == model


def test_a_prefix_that_is_dropped_while_it_is_copied_stays_away(folder: Path) -> None:
    with Driver(folder) as driver:
        half_dead(driver)
        reclaimer = Reclaimer(driver.store)

        async def both() -> None:
            step = asyncio.ensure_future(reclaimer.step())
            await asyncio.sleep(0)
            await driver._ask(("KV.PREFIX.DROP", "a"))
            await step

        driver.loop.run_until_complete(both())
        tidy(driver)
        assert driver.content() == {} and names(driver) == set()
    assert content_of(folder) == {}


def test_a_cancelled_step_ends_first(folder: Path) -> None:
    with Driver(folder) as driver:
        expected = half_dead(driver)
        reclaimer = Reclaimer(driver.store)

        async def cancelled() -> None:
            step = asyncio.ensure_future(reclaimer.step())
            await asyncio.sleep(0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step

        driver.loop.run_until_complete(cancelled())
        assert driver.content() == expected
        assert driver.store.counters.bytes_copied > 0
    assert content_of(folder) == expected


def test_without_a_log_a_snapshot_keeps_the_segments_it_names(folder: Path) -> None:
    with Driver(folder, Options(wal=False)) as driver:
        driver.ask(*register("a", 2, WIDE))
        driver.ask(*rows("a_pk", 0, 0, COUNT, WIDE))
        driver.ask(*rows("a_pk", 0, 10, COUNT - 10, WIDE))
        driver.ask("KV.PREFIX.SAVE")
        expected = driver.content()
        assert driver.loop.run_until_complete(Reclaimer(driver.store).step()) is False
    assert content_of(folder, Options(wal=False)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_random_history_with_reclaiming_holds_what_a_simple_store_holds(
    folder: Path, seed: int
) -> None:
    dice = random.Random(seed)
    model, driver = Model(), Driver(folder)
    for name in "ab":
        driver.ask(*register(name))
        model = model.after(register(name))
    copied = 0
    for _ in range(120):
        name = dice.choice("ab")
        sid = name + dice.choice(["_pk", "_pv"])
        place = (sid, dice.randrange(2), dice.randrange(60), dice.choice([1, 20, 3000]))
        words = dice.choice(
            [
                *[rows(*place)] * 6,
                state(name, dice.randrange(2), dice.choice([70_000, 400_000]), place[2]),
                ("KV.PREFIX.MAP", name),
                ("KV.PREFIX.SAVE",),
            ]
        )
        driver.ask(*words)
        model = model.after(words)
        if dice.random() < 0.3:
            driver.loop.run_until_complete(Reclaimer(driver.store).step())
        if dice.random() < 0.1:
            copied += driver.store.counters.bytes_copied
            driver.crash()
            driver = Driver(folder)
            assert driver.store.counters.damaged == 0
        if dice.random() < 0.2:
            assert Model.of(driver.content()) == model
            open_sealed(driver)
    tidy(driver)
    assert Model.of(driver.content()) == model
    copied += driver.store.counters.bytes_copied
    assert copied > 100_000
    driver.crash()
