"""The server's own saves: stores go on, nothing is lost, the logs stay bounded."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store import freezing, saving, snapshot
from pion_vllm_mlx.server.store.reclaim import Reclaimer
from pion_vllm_mlx.server.store.records import Seal
from pion_vllm_mlx.server.store.state import State
from tests.recovery.broken import SSM_WAL, VSTORE_WAL, boundaries, content_of
from tests.recovery.driving import Content, Driver, Options, Word
from tests.recovery.faults import failing
from tests.recovery.material import agrees, open_sealed, register, rows, state, store_all
from tests.recovery.model import Model

#: short runs ride in the log, whatever their session has.
RIDING = Options(appendfsync="always")


def save(driver: Driver) -> None:
    driver.loop.run_until_complete(driver.store.save_in_steps())


def small_logs(driver: Driver, size: int = 1000) -> None:
    """Logs that are too long soon."""
    object.__setattr__(driver.store.config, "wal_size", size)


def logs(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in (VSTORE_WAL, SSM_WAL))


def test_a_save_in_steps_of_a_quiet_store_leaves_empty_logs(folder: Path) -> None:
    with Driver(folder) as driver:
        small_logs(driver)
        store_all(driver, "a")
        store_all(driver, "b")
        driver.ask("KV.PREFIX.PIN", "a")
        expected = driver.content()
        save(driver)
        assert logs(folder) == 0 and driver.store.vstore_wal.appended == 0
        assert driver.content() == expected
        open_sealed(driver)
        save(driver)
    with Driver(folder) as driver:
        assert driver.store.replayed.vstore == driver.store.replayed.ssm == 0
        assert driver.content() == expected and agrees(driver, "a") == 8


def some_words(dice: random.Random, turn: int) -> tuple[Word, ...]:
    name = dice.choice("abc")
    sid = name + dice.choice(["_pk", "_pv"])
    return dice.choice(
        [
            *[rows(sid, dice.randrange(2), dice.randrange(40), dice.choice([1, 9, 600]))] * 4,
            state(dice.choice([name, f"{name}@8"]), dice.randrange(3), 300, turn),
            state(name, 65535, 70_000, turn),
            ("KV.PREFIX.MAP", name),
        ]
    )


async def _both(driver: Driver, words: list[tuple[Word, ...]], dice: random.Random) -> None:
    """Store and save at the same time."""
    await asyncio.gather(driver.store.save_in_steps(), _storing(driver, words, dice))


async def _storing(driver: Driver, words: list[tuple[Word, ...]], dice: random.Random) -> None:
    for command in words:
        await driver._ask(command)
        await asyncio.sleep(dice.choice([0, 0, 0.0005]))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_stored_during_a_save_survives_it(folder: Path, seed: int) -> None:
    dice = random.Random(seed)
    driver = Driver(folder)
    model = Model()
    tails = 0
    for name in "abc":
        driver.ask(*register(name))
        model = model.after(register(name))
    for turn in range(12):
        small_logs(driver)
        batch = [some_words(dice, 100 * turn + n) for n in range(12)]
        driver.loop.run_until_complete(_both(driver, batch, dice))
        for words in batch:
            model = model.after(words)
        tails += logs(folder) > 0
        for name in (VSTORE_WAL, SSM_WAL):
            if (folder / name).stat().st_size:
                boundaries(folder / name)
        if turn % 2:
            driver.crash()
            driver = Driver(folder)
            assert driver.store.counters.damaged == 0
        assert Model.of(driver.content()) == model, turn
        if turn % 3 == 0:
            driver.loop.run_until_complete(Reclaimer(driver.store).step())
    assert tails >= 6, "stores went on while a save ran"
    driver.ask("KV.PREFIX.SAVE")
    assert logs(folder) == 0
    open_sealed(driver)
    assert Model.of(driver.content()) == model
    driver.crash()


def test_a_save_at_once_waits_for_one_in_steps_and_leaves_nothing_behind(folder: Path) -> None:
    with Driver(folder) as driver:
        small_logs(driver)
        store_all(driver, "a")

        async def both() -> None:
            in_steps = asyncio.ensure_future(driver.store.save_in_steps())
            await asyncio.sleep(0.001)
            await driver._ask(rows("a_pk", 0, 3, 4))
            await driver._ask(("KV.PREFIX.SAVE",))
            await in_steps
            await asyncio.gather(driver.store.save(), driver.store.save_in_steps())

        driver.loop.run_until_complete(both())
        expected = driver.content()
        assert logs(folder) == 0
    assert content_of(folder) == expected


def test_an_older_snapshot_never_replaces_a_newer_one(folder: Path) -> None:
    with Driver(folder) as driver:
        small_logs(driver)
        store_all(driver, "a")

        async def both() -> None:
            with Held(driver) as held:
                saving_it = asyncio.ensure_future(driver.store.save_in_steps())
                while not held.reached.is_set():
                    await asyncio.sleep(0.001)
                # the index is copied: a store, and a SAVE that would overtake if it could
                await driver._ask(rows("a_pk", 0, 3, 4))
                other = asyncio.ensure_future(driver._ask(("KV.PREFIX.SAVE",)))
                done, _ = await asyncio.wait([other], timeout=0.5)
                assert not done
            await asyncio.gather(saving_it, other)

        driver.loop.run_until_complete(both())
        expected = driver.content()
        assert logs(folder) == 0
    assert content_of(folder) == expected


@pytest.mark.parametrize("words", [(), ("copy",)])
def test_writes_are_acknowledged_while_a_save_seals(
    folder: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two batches of prefixes; also where a copy is asked for, which is written later."""
    with Driver(folder, Options(max_sessions=1000)) as driver:
        for number in range(3 * saving.SEAL_BATCH):
            driver.ask(*register(f"n{number}"))
            driver.ask(*rows(f"n{number}_pk", 0, 0, 1))
        batches: list[int] = []
        real = driver.store.seal_locked

        async def sealed(groups: list[bytes], *most: int) -> int:
            batches.append(len(groups))
            return await real(groups, *most)

        monkeypatch.setattr(driver.store, "seal_locked", sealed)

        async def both() -> None:
            save_it = asyncio.ensure_future(driver._ask(("KV.PREFIX.SAVE", *words)))
            while not batches:
                await asyncio.sleep(0)
            await driver._ask(rows("n0_pk", 0, 1, 3))
            assert len(batches) < 3 and not save_it.done()
            await save_it

        driver.loop.run_until_complete(both())
        expected = driver.content()
    assert content_of(folder) == expected


def test_writes_are_acknowledged_while_the_snapshot_of_an_explicit_save_is_written(
    folder: Path,
) -> None:
    with Driver(folder) as driver:
        store_all(driver, "a")

        async def both() -> None:
            with Held(driver) as held:
                save_it = asyncio.ensure_future(driver._ask(("KV.PREFIX.SAVE",)))
                while not held.reached.is_set():
                    await asyncio.sleep(0.001)
                await driver._ask(rows("a_pk", 0, 3, 4))
                await driver._ask(state("a", 2, 60))
                assert not save_it.done()
            await save_it

        driver.loop.run_until_complete(both())
        # what came meanwhile is what the logs hold
        assert driver.store.vstore_wal.appended == driver.store.ssm_wal.appended == 1
        expected = driver.content()
        driver.ask("KV.PREFIX.SAVE")
        assert logs(folder) == 0
    assert content_of(folder) == expected


def some_change(dice: random.Random, points: Mapping[str, int]) -> tuple[Word, ...]:
    """A command of any kind to one of some prefixes; ``points``: to roll sessions back to."""
    name = f"n{dice.randrange(12)}"
    sid = name + dice.choice(["_pk", "_pv"])
    return dice.choice(
        [
            *[rows(sid, dice.randrange(2), dice.randrange(40), dice.choice([1, 9, 600]))] * 4,
            *[state(name, dice.randrange(2), 100, dice.randrange(99))] * 2,
            ("KV.PREFIX.DROP", name),
            *[("V.RESTORE", sid, points.get(sid, 1))] * 2,
            ("KV.PREFIX.MAP", name),
            ("KV.PREFIX.EXPIRE", name, 1000),
            register(name),
        ]
    )


@pytest.mark.parametrize("seed", range(4))
def test_what_changes_while_the_state_is_copied_is_copied_as_it_was(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freezing, "PART", 1)
    dice = random.Random(seed)
    points: dict[str, int] = {}
    with Driver(folder) as driver:
        for number in range(12):
            driver.ask(*register(f"n{number}"))
            driver.ask(*rows(f"n{number}_pk", 0, 0, dice.choice([5, 600])))
            points[f"n{number}_pk"] = driver.ask("V.SNAPSHOT", f"n{number}_pk")
            driver.ask(*state(f"n{number}", 0, 100, number))
        for _ in range(40):
            with suppress(CommandError):
                driver.ask(*some_change(dice, points))

        def described(state: State) -> list[str]:
            found = [one for one in snapshot.vstore_records(state) if not isinstance(one, Seal)]
            return sorted(map(repr, [*found, *snapshot.ssm_records(state)]))

        async def both() -> tuple[list[str], list[str], list[str]]:
            then = described(driver.store.state)
            copying = asyncio.ensure_future(freezing.Freezing(driver.store.state).copied())
            for _ in range(30):
                with suppress(CommandError):
                    await driver._ask(some_change(dice, points))
            return then, described(await copying), described(driver.store.state)

        then, copied, now = driver.loop.run_until_complete(both())
        assert copied == then != now
        assert driver.store.state.before_change is None


def _interrupted(driver: Driver, fail_at: int, forever: bool) -> tuple[Content, list[str]]:
    """A save whose call ``fail_at`` fails, with a store that got through before and one after."""
    small_logs(driver)
    store_all(driver, "a")
    driver.ask(*rows("a_pk", 0, 2, 9))
    expected = driver.content()
    with failing(fail_at, forever) as faults:
        try:
            save(driver)
        except (CommandError, OSError):
            assert faults.failed
    return expected, faults.failed


def test_a_crash_within_a_save_in_steps_loses_nothing(folder: Path) -> None:
    for fail_at in range(150):
        place = folder / str(fail_at)
        place.mkdir()
        with Driver(place) as driver:
            expected, failed = _interrupted(driver, fail_at, forever=True)
        with Driver(place) as driver:
            assert driver.content() == expected, (fail_at, failed)
            small_logs(driver)
            driver.ask(*rows("a_pk", 1, 2, 700))
            later = driver.content()
            save(driver)
            assert not list(place.glob("*.tmp"))
        assert content_of(place) == later
        if not failed:
            assert fail_at > 15
            return
    raise AssertionError("never got through")


def test_a_save_in_steps_that_fails_keeps_store_and_logs_going(folder: Path) -> None:
    for fail_at in range(150):
        place = folder / str(fail_at)
        place.mkdir()
        with Driver(place) as driver:
            expected, failed = _interrupted(driver, fail_at, forever=False)
            assert driver.content() == expected, (fail_at, failed)
            driver.ask(*rows("a_pk", 1, 2, 700))
            driver.ask(*state("a", 3, 50))
            later = driver.content()
        with Driver(place) as driver:
            assert driver.content() == later, (fail_at, failed)
        if not failed:
            return
    raise AssertionError("never got through")


def test_a_long_log_moves_in_steps_of_bounded_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "STEP_BYTES", 20_000)
    with Driver(folder, RIDING) as driver:
        for name in "abc":
            driver.ask(*register(name))
            for start in range(0, 400, 20):
                driver.ask(*rows(f"{name}_pk", 0, start, 20))
        small_logs(driver)
        expected = driver.content()
        held: list[int] = []
        real = driver.store.seal_locked

        async def counted(groups: list[bytes], most_bytes: int) -> int:
            before = len(driver.store.state.inline_runs)
            done = await real(groups, most_bytes)
            held.append(before - len(driver.store.state.inline_runs))
            return done

        monkeypatch.setattr(driver.store, "seal_locked", counted)
        save(driver)
        # 60 runs of 2,560 bytes, 8 in a step
        assert sum(held) == 60 and max(held) <= 9 and len(held) >= 8
        assert logs(folder) == 0 and driver.content() == expected
        assert agrees(driver, "a") == 20
        open_sealed(driver)
    assert content_of(folder) == expected


def test_only_a_log_that_is_long_is_saved(folder: Path) -> None:
    with Driver(folder) as driver:
        small_logs(driver, 100_000)
        driver.ask(*register("a"))
        for start in range(0, 4000, 20):
            driver.ask(*rows("a_pk", 0, start, 20))
        driver.ask(*state("a", 0, 100))
        expected, short = driver.content(), driver.store.ssm_wal.size
        save(driver)
        assert driver.store.vstore_wal.size == 0 and driver.store.ssm_wal.size == short
        assert not driver.store.paths.ssm.exists()
    assert content_of(folder) == expected


def test_a_busy_store_is_saved_when_its_log_is_far_past_its_size(folder: Path) -> None:
    with Driver(folder, RIDING) as driver:
        small_logs(driver, 20_000)
        driver.ask(*register("a"))
        longest = 0
        for turn in range(200):
            driver.ask(*rows("a_pk", 0, turn % 50, 20))
            longest = max(longest, driver.store.vstore_wal.size)
            if driver.store.saver.due(1e9):
                save(driver)
                assert driver.store.vstore_wal.size == 0
        assert 2 * 20_000 < longest < 5 * 20_000
        expected = driver.content()
    assert content_of(folder) == expected


class Held:
    """Within the block the saves of a driver stand still where they write their snapshots."""

    def __init__(self, driver: Driver) -> None:
        self.saver = driver.store.saver
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.publish = self.saver._publish

    def __enter__(self) -> Held:
        self.saver._publish = self._publish  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        self.go_on.set()

    def _publish(self, frozen: State, logs: Iterable[Any]) -> Any:
        self.reached.set()
        assert self.go_on.wait(60)
        return self.publish(frozen, logs)


#: what rides in a log, 100 stores of it: how the store is opened, which log, the commands.
FASTER = {
    "rows of one session": (RIDING, VSTORE_WAL, lambda n: rows("n0_pk", 0, 20 * n, 20)),
    "rows of many": (Options(), VSTORE_WAL, lambda n: rows(f"n{n}_pk", 0, 0, 20)),
    "states": (Options(), SSM_WAL, lambda n: state("n0", 0, 2_560, n)),
}


@pytest.mark.parametrize("kind", FASTER)
def test_who_stores_faster_than_the_log_is_saved_waits_for_the_save(
    folder: Path, kind: str
) -> None:
    size, record = 20_000, 2_560 + 300
    options, name, words_of = FASTER[kind]
    words = [words_of(number) for number in range(100)]
    model = Model()
    with Driver(folder, options) as driver:
        small_logs(driver, size)
        for number in range(100):
            driver.ask(*register(f"n{number}"))
            model = model.after(register(f"n{number}"))
        for one in words:
            model = model.after(one)
        store = driver.store
        log = store.vstore_wal if name == VSTORE_WAL else store.ssm_wal
        save(driver)  # of the log of rows what the sessions took is gone

        async def both() -> int:
            with Held(driver) as held:
                saving_it = asyncio.ensure_future(store.save_in_steps())
                storing = asyncio.ensure_future(_storing(driver, words, random.Random(0)))
                while log.size <= saving.BUSY_LIMIT * size and not storing.done():
                    await asyncio.sleep(0.001)
                for _ in range(100):  # nothing comes to it any more, however long that takes
                    await asyncio.sleep(0.001)
                longest = log.size
                assert held.reached.is_set() and not saving_it.done()
                assert not storing.done(), "all of it was stored before it had to wait"
            await asyncio.gather(saving_it, storing)
            return longest

        limit = saving.BUSY_LIMIT * size
        assert limit < driver.loop.run_until_complete(both()) < limit + record
        assert Model.of(driver.content()) == model
    assert Model.of(content_of(folder)) == model


def test_a_save_of_many_short_prefixes_stays_within_the_budget_and_one_log(folder: Path) -> None:
    """Each of them is a file of its own then, many times as large as what was in the log."""
    size, budget = 50_000, 300_000
    with Driver(folder) as driver:
        for number in range(100):
            driver.ask(*register(f"n{number}"))
            driver.ask(*rows(f"n{number}_pk", 0, 0, 1))
        small_logs(driver, size)
        driver.store.space.disk_budget = budget

        async def used_while_saving() -> int:
            with Held(driver) as held:
                saving_it = asyncio.ensure_future(driver.store.save_in_steps())
                while not held.reached.is_set():
                    await asyncio.sleep(0.001)
                used = driver.store.space.used_bytes()
            await saving_it
            return used

        used = driver.loop.run_until_complete(used_while_saving())
        assert budget // 2 < used <= budget + saving.BUSY_LIMIT * size
        assert 0 < driver.store.space.evictions
        assert driver.store.state.sessions.keys() >= {b"n99_pk", b"n99_pv"}
        expected = driver.content()
    assert content_of(folder) == expected


def test_a_quiet_store_is_saved_when_its_logs_are_past_their_size(folder: Path) -> None:
    with Driver(folder, RIDING) as driver:
        small_logs(driver, 3000)
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 10))
        assert not driver.store.saver.due(0)
        driver.ask(*rows("a_pk", 0, 10, 20))
        assert driver.store.saver.due(0) and not driver.store.saver.due(1e9)


def test_without_a_log_there_is_nothing_to_save_in_steps(folder: Path) -> None:
    with Driver(folder, Options(wal=False)) as driver:
        store_all(driver, "a")
        assert not driver.store.saver.due(0)
