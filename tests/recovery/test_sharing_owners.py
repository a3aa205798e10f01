"""Who owns shared rows: tenants, prefixes that go, a disk budget."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.server.store.records import Drop
from tests.recovery.broken import content_of
from tests.recovery.driving import Driver
from tests.recovery.material import agrees, noise, state
from tests.recovery.twins import (
    COUNT,
    PREFIX_BYTES,
    SLACK,
    block,
    disk,
    files,
    places,
    prefix,
    put,
    rows_of,
    share,
    sound,
)


def test_tenants_share_nothing_with_each_other_or_the_admin(folder: Path) -> None:
    names = ["acme:a", "bolt:a", "a", "acme:b"]
    with Driver(folder) as driver:
        for name in names:
            prefix(driver, name)
        expected = driver.content()
        share(driver)
        assert driver.content() == expected
        assert places(driver, "acme:a") == places(driver, "acme:b")
        for other in ("bolt:a", "a"):
            assert not places(driver, other) & places(driver, "acme:a")
        assert not places(driver, "a") & places(driver, "bolt:a")
        sound(driver)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_either_owner_may_go_and_the_other_keeps_its_rows(
    folder: Path, order: tuple[str, str], saved: bool
) -> None:
    first, last = order
    with Driver(folder) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        share(driver)
        if saved:
            driver.ask("KV.PREFIX.SAVE")
        expected = rows_of(driver.content(), last)
        driver.ask("KV.PREFIX.DROP", first)
        assert rows_of(driver.content(), last) == expected and agrees(driver, last) == 4
        share(driver)
        sound(driver)
    with Driver(folder) as driver:
        assert rows_of(driver.content(), last) == expected and agrees(driver, last) == 4
        sound(driver)
        driver.ask(*put(last + "_pk", 0, COUNT, COUNT, block("_pk", 0, COUNT, COUNT)))
        assert agrees(driver, last) == 5
        driver.ask("KV.PREFIX.DROP", last)
        assert files(driver) == set()
    assert content_of(folder) == {}


def test_a_mostly_dead_segment_is_copied_once_for_all_who_share_in_it(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        for number in range(3):
            prefix(driver, "a", f"long {number}", start=(number + 1) * COUNT)
        for name in "bcd":
            prefix(driver, name)
        share(driver)
        sound(driver)
        assert disk(driver) < 4 * PREFIX_BYTES + SLACK
        kept = {name: rows_of(driver.content(), name) for name in "bcd"}
        copied = driver.store.counters.bytes_copied
        driver.ask("KV.PREFIX.DROP", "a")
        share(driver)
        assert disk(driver) < PREFIX_BYTES + SLACK
        assert driver.store.counters.bytes_copied - copied == pytest.approx(PREFIX_BYTES, rel=1.1)
        assert places(driver, "b") == places(driver, "c") == places(driver, "d")
        assert {name: rows_of(driver.content(), name) for name in "bcd"} == kept
        assert all(agrees(driver, name) == 4 for name in "bcd")
        sound(driver)
        expected = driver.content()
    with Driver(folder) as driver:
        assert driver.content() == expected
        sound(driver)


def test_eviction_for_room_takes_what_frees_bytes_and_shared_rows_last(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in ("old", "cold twin"):
            prefix(driver, name, name)
        prefix(driver, "twin", "cold twin")
        share(driver)
        space = driver.store.space
        left = []
        while driver.store.state.sessions:
            effects, before = space.evict_for_bytes(1), disk(driver)
            left.append([one.sids[0][:-3] for one in effects if isinstance(one, Drop)])
            driver.loop.run_until_complete(driver.store.commit(lambda found=effects: found))
            assert disk(driver) < before
        # the cold twin costs nothing as long as the other one lives, and goes with it
        assert left == [[b"old"], [b"cold twin", b"twin"]] and space.evictions == 6
        assert files(driver) == set()


def test_a_cold_twin_outlives_what_is_warmer_and_costs_bytes(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "cold", "twins")
        prefix(driver, "warm", "alone")
        prefix(driver, "hot", "twins")
        share(driver)
        effects = driver.store.space.evict_for_bytes(1)
        assert [one.sids for one in effects] == [(b"warm_pk", b"warm_pv")]  # type: ignore[attr-defined]


def test_a_twin_that_holds_more_leaves_alone_where_that_frees_bytes(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "cold", "twins")
        driver.ask("KV.PREFIX.MAP", "cold")
        prefix(driver, "hot", "twins")
        prefix(driver, "hot", "more", start=COUNT)
        share(driver)
        effects = driver.store.space.evict_for_bytes(1)
        assert [one.sids for one in effects] == [(b"hot_pk", b"hot_pv")]  # type: ignore[attr-defined]


def test_the_disk_budget_counts_shared_bytes_once(folder: Path) -> None:
    config = StoreConfig(folder, disk_budget=PREFIX_BYTES + 2 * SLACK, appendfsync="no")
    with mock.patch("tests.recovery.driving.StoreConfig", lambda *a, **k: config):
        with Driver(folder) as driver:
            with mock.patch.object(driver.store.space, "excess", lambda nbytes: 0):
                for name in "abcd":
                    prefix(driver, name)
            share(driver)
            assert driver.store.space.excess(SLACK) <= 0 < driver.store.space.excess(PREFIX_BYTES)
            assert len(driver.store.state.sessions) == 8


def test_states_beside_shared_rows_stay_their_owners(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "ab":
            prefix(driver, name)
            driver.ask(*state(name, 0, 90_000, salt=ord(name)))
        expected = driver.content()
        share(driver)
        assert driver.content() == expected and places(driver, "a") == places(driver, "b")
        sound(driver)
        driver.ask("KV.PREFIX.DROP", "a")
        share(driver)
        assert driver.state_of("b", 0) == noise(("b", 0, ord("b")), 90_000)
        sound(driver)
    with Driver(folder) as driver:
        assert driver.state_of("b", 0) == noise(("b", 0, ord("b")), 90_000)
        sound(driver)
