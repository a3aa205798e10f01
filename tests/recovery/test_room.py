"""Dead bytes go before anybody does where room is short, within the budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from crc32c import crc32c

from pion_vllm_mlx.server.store import reclaim
from pion_vllm_mlx.server.store.compaction import Job
from pion_vllm_mlx.server.store.reclaim import Reclaimer
from pion_vllm_mlx.server.store.records import DropStates, StoreState
from tests.recovery.driving import Driver, Options
from tests.recovery.material import register, rows

MB = 1 << 20


def put(driver: Driver, sid: bytes, layer: int, nbytes: int) -> None:
    """A state in a segment."""
    data, store = os.urandom(nbytes), driver.store

    async def stored() -> None:
        region = await store.reserve(sid, nbytes, 1)
        region.write(memoryview(data), 0)
        state = StoreState(sid, layer, nbytes, crc32c(data), region.segment.name, region.offset)
        await store.commit(lambda: [state])
        store.space.release(region, kept=True)

    driver.loop.run_until_complete(stored())


def drop(driver: Driver, sid: bytes, layer: int) -> None:
    dropped = DropStates((sid,), layer)
    driver.loop.run_until_complete(driver.store.commit(lambda: [dropped]))


def make_room(driver: Driver, nbytes: int) -> None:
    driver.store.tidy = Reclaimer(driver.store).make_room
    driver.loop.run_until_complete(driver.store.make_room(nbytes))


@contextmanager
def most_used(driver: Driver) -> Iterator[list[int]]:
    """The bytes on disk after each copy."""
    used: list[int] = []
    original = Job.carry_out

    def carry_out(job: Job) -> None:
        original(job)
        driver.store.space.use.look_again()
        used.append(driver.store.space.used_bytes())

    with mock.patch.object(Job, "carry_out", carry_out):
        yield used


def test_dead_bytes_go_before_anybody_behind_however_many_that_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "_LOOK_SECONDS", 0.0)
    with Driver(tmp_path, Options(disk_budget=16 * MB)) as driver:
        others = [b"g%d" % number for number in range(40)]
        for name in others:
            put(driver, name, 0, 100_000)
        for layer in range(9):
            put(driver, b"victim", layer, MB)
        for layer in range(8):
            drop(driver, b"victim", layer)
        untidy = driver.store.state.untidy
        untidy.clear()
        untidy.update(dict.fromkeys([*others, b"victim"]))
        make_room(driver, 6 * MB)
        assert set(driver.store.state.states) == {*others, b"victim"}
        assert driver.store.space.excess(6 * MB) <= 0


def test_what_is_copied_to_give_dead_bytes_back_is_bounded(tmp_path: Path) -> None:
    budget = 24 * MB
    with Driver(tmp_path, Options(disk_budget=budget)) as driver:
        for layer in range(36):
            put(driver, b"half", layer, MB // 2)
        for layer in range(19):
            drop(driver, b"half", layer)
        for number in range(5):
            put(driver, b"o%d" % number, 0, MB)
        with most_used(driver) as used:
            make_room(driver, 4 * MB)
        assert driver.store.space.excess(4 * MB) <= 0
        assert max(used, default=0) <= budget + budget // 4


def test_nobody_leaves_beside_dead_bytes_in_a_folder_that_is_full(tmp_path: Path) -> None:
    with Driver(tmp_path, Options(disk_budget=16 * MB)) as driver:
        for layer in range(6):
            put(driver, b"victim", layer, MB)
        for layer in range(5):
            drop(driver, b"victim", layer)
        put(driver, b"idle", 0, 9 * MB)
        assert driver.store.space.excess(MB) > 0  # not even what lives there fits twice
        make_room(driver, 2 * MB)
        assert set(driver.store.state.states) == {b"victim", b"idle"}


def test_who_needs_room_next_finds_what_the_one_before_did_not_need(tmp_path: Path) -> None:
    with Driver(tmp_path, Options(disk_budget=16 * MB)) as driver:
        for first in (0, 4):
            for layer in range(first, first + 4):
                put(driver, b"victim", layer, MB)
            driver.loop.run_until_complete(driver.store.seal(b"victim"))
        put(driver, b"idle", 0, 5 * MB)
        for layer in (0, 1, 2, 4, 5, 6):
            drop(driver, b"victim", layer)
        driver.store.tidy = Reclaimer(driver.store).make_room
        for nbytes in (4 * MB, 7 * MB):
            assert driver.store.space.excess(nbytes) > 0
            driver.loop.run_until_complete(driver.store.make_room(nbytes))
        assert set(driver.store.state.states) == {b"victim", b"idle"}


def test_short_runs_are_not_merged_by_who_needs_room(tmp_path: Path) -> None:
    with Driver(tmp_path, Options(disk_budget=16 * MB)) as driver:
        driver.ask(*register("turns", 1, 1024))
        for number in range(300):
            driver.ask(*rows("turns_pk", 0, 4 * number, 4, 1024))
        before = driver.store.counters.bytes_copied
        reclaimer = Reclaimer(driver.store)
        driver.loop.run_until_complete(reclaimer.make_room(16 * MB))
        assert driver.store.counters.bytes_copied == before
        assert driver.loop.run_until_complete(reclaimer.step())  # but in a quiet moment
        assert driver.store.counters.bytes_copied > before
