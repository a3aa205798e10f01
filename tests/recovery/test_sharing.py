"""Equal rows are stored once: every read stays what it was, whatever comes."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from pion_vllm_mlx.server.store import sharing
from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.server.store.reclaim import Reclaimer
from tests.recovery.broken import content_of
from tests.recovery.driving import Driver, one_bulk
from tests.recovery.material import agrees, noise, register
from tests.recovery.twins import (
    COUNT,
    PREFIX_BYTES,
    SIDES,
    SLACK,
    WIDE,
    block,
    disk,
    files,
    logical_bytes,
    places,
    prefix,
    put,
    rows_of,
    share,
    sound,
)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("count", [2, 8])
def test_equal_prefixes_are_stored_once_and_read_as_before(
    folder: Path, count: int, mapped: bool
) -> None:
    names = [f"n{number}" for number in range(count)]
    with Driver(folder) as driver:
        for name in names:
            prefix(driver, name)
            if mapped:
                driver.ask("KV.PREFIX.MAP", name)
        prefix(driver, "other", "another")
        expected, logical, order = driver.content(), logical_bytes(driver), driver.access_order()

        assert share(driver) >= count - 1

        assert driver.content() == expected and logical_bytes(driver) == logical
        assert driver.access_order() == order
        assert len({frozenset(places(driver, name)) for name in names}) == 1
        assert disk(driver) < 2 * PREFIX_BYTES + SLACK
        assert driver.store.counters.bytes_shared == (count - 1) * PREFIX_BYTES
        assert all(agrees(driver, name) == 4 for name in (*names, "other"))
        sound(driver)
    with Driver(folder) as driver:
        assert driver.content() == expected
        assert all(agrees(driver, name) == 4 for name in (*names, "other"))
        assert share(driver) == 0
        sound(driver)


def test_a_snapshot_names_the_shared_rows_of_both_whoever_was_used_last(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        share(driver)
        driver.ask("KV.PREFIX.LOOKUP", "a")  # the later one comes first in the snapshot
        driver.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 4)
        driver.ask("V.FETCH", "a_pv", 0, "RANGE", 0, 4)
        expected = driver.content()
        driver.ask("KV.PREFIX.SAVE", "copy")
        assert driver.store.vstore_wal.size == 0
    (folder / "other").mkdir()
    (folder / "copy").rename(folder / "other" / "pion.vstore.0")
    for place in (folder, folder / "other"):
        with Driver(place) as driver:
            assert driver.content() == expected
            assert places(driver, "a") == places(driver, "b")
            assert agrees(driver, "a") == agrees(driver, "b") == 4
            sound(driver)
            driver.ask("KV.PREFIX.DROP", "a")
            assert agrees(driver, "b") == 4
            driver.ask("KV.PREFIX.DROP", "b")
            assert files(driver) == set()


def test_rows_that_come_after_sharing_are_nobody_elses(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        share(driver)
        kept = rows_of(driver.content(), "a")
        before = {path: path.read_bytes() for path in driver.store.segments.path.iterdir()}
        prefix(driver, "b", "other continuation", start=COUNT)
        driver.ask(*put("b_pk", 0, 10, 20, block("_pk", 0, 10, 20, "overwritten")))
        driver.ask("KV.PREFIX.MAP", "b")
        assert rows_of(driver.content(), "a") == kept
        assert all(path.read_bytes() == data for path, data in before.items())
        share(driver)
        expected = driver.content()
        assert rows_of(expected, "a") == kept and agrees(driver, "a") == 4
        sound(driver)
    assert content_of(folder) == expected


def test_what_a_later_prefix_has_in_common_with_two_others_is_shared_with_both(
    folder: Path,
) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        prefix(driver, "a", "left", start=COUNT)
        prefix(driver, "b")
        prefix(driver, "b", "right", start=COUNT)
        prefix(driver, "c")
        prefix(driver, "c", "right", start=COUNT)
        expected = driver.content()
        share(driver)
        assert driver.content() == expected
        assert places(driver, "c") == places(driver, "b")
        assert len(places(driver, "a") & places(driver, "b")) == 4
        # of six; a file of which no more than half is dead stays as it is
        assert disk(driver) < 4 * PREFIX_BYTES + 2 * SLACK
        sound(driver)
        for name in "abc":
            assert agrees(driver, name) == 8
            driver.ask("KV.PREFIX.DROP", name)
            share(driver)
            sound(driver)
        assert files(driver) == set()


def test_rows_of_other_formats_layouts_or_places_are_left_alone(folder: Path) -> None:
    size = COUNT * WIDE * 2
    with Driver(folder) as driver:
        driver.ask("KV.PREFIX.REGISTER", "a", WIDE, "bf16", "HEADS", 2)
        driver.ask("KV.PREFIX.REGISTER", "b", WIDE, "fp16", "HEADS", 2)
        driver.ask("KV.PREFIX.REGISTER", "c", WIDE, "bf16", "HEADS", 4)
        driver.ask("KV.PREFIX.REGISTER", "d", WIDE, "bf16", "HEADS", 2)
        driver.ask("KV.PREFIX.REGISTER", "e", WIDE, "bf16", "HEADS", 2)
        for name in "abc":
            driver.ask(*put(name + "_pk", 0, 0, COUNT, noise(1, size)))
        driver.ask(*put("d_pk", 0, 1, COUNT, noise(1, size)))
        driver.ask(*put("d_pv", 0, 0, COUNT, noise(1, size)))
        driver.ask("V.STOREBATCH", "e_pk", 0, 0, COUNT, noise(1, size), "FMT", "STORED")
        share(driver)
        assert driver.store.counters.bytes_shared == 0


def test_a_layer_in_another_layout_is_left_alone_beside_one_that_is_shared(folder: Path) -> None:
    size = COUNT * WIDE * 2
    with Driver(folder) as driver:
        for name in "ab":
            driver.ask(*register(name, 2, WIDE))
            driver.ask(*put(name + "_pk", 0, 0, COUNT, noise(0, size)))
        driver.ask(*put("a_pk", 1, 0, COUNT, noise(1, size)))
        driver.ask("V.STOREBATCH", "b_pk", 1, 0, COUNT, noise(1, size), "FMT", "STORED")
        expected = driver.content()
        share(driver)
        assert driver.store.counters.bytes_shared == size and driver.content() == expected
        assert len(places(driver, "a") & places(driver, "b")) == 1
        sound(driver)


@pytest.mark.parametrize("fmt", ["fp16", "int8", "mlx4g32", "fp32", "turbo4"])
def test_every_format_is_shared_bit_equal(folder: Path, fmt: str) -> None:
    layout = "NHD" if fmt in ("int8", "turbo4") else "HND"
    with Driver(folder) as driver:
        for name in "ab":
            driver.ask("KV.PREFIX.REGISTER", name, 128, fmt, "HEADS", 2)
            size = driver.store.state.sessions[b"a_pk"].spec(0).row_bytes
            for side in SIDES:
                place = ("V.STOREBATCH", name + side, 0, 0, 900, noise((side, fmt), 900 * size))
                driver.ask(*place, "FMT", "STORED", "LAYOUT", layout)
        expected = driver.content()
        share(driver)
        assert places(driver, "a") == places(driver, "b")
        assert driver.content() == expected
        driver.ask("KV.PREFIX.MAP", "b")
        sound(driver)
    assert content_of(folder) == expected


def test_a_rollback_of_shared_rows_is_only_its_own(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "ab":
            driver.ask(*register(name, 2, WIDE))
        number = driver.ask("V.SNAPSHOT", "b_pk")
        for name in "ab":
            for side in SIDES:
                driver.ask(*put(name + side, 0, 0, COUNT, block(side, 0, 0, COUNT)))
        share(driver)
        kept = rows_of(driver.content(), "a")
        assert places(driver, "a") == places(driver, "b")
        driver.ask("V.RESTORE", "b_pk", number)
        share(driver)
        assert rows_of(driver.content(), "a") == kept and agrees(driver, "a") == 2
        expected = driver.content()
        sound(driver)
    assert content_of(folder) == expected


def test_nothing_is_shared_when_it_is_switched_off(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        driver.store.config.__dict__["share_equal"] = False
        assert driver.loop.run_until_complete(Reclaimer(driver.store).step()) is False
        assert driver.store.counters.bytes_shared == 0
    config = StoreConfig(folder, share_equal=False)
    with mock.patch("tests.recovery.driving.StoreConfig", lambda *a, **k: config):
        with Driver(folder) as driver:
            prefix(driver, "c")
            # nobody would ever look at them
            assert not driver.store.state.unshared


def test_a_step_compares_a_bounded_part(folder: Path) -> None:
    with Driver(folder) as driver, mock.patch.object(sharing, "STEP_BYTES", 1):
        prefix(driver, "a")
        prefix(driver, "b")
        expected = driver.content()
        assert 4 <= share(driver) <= 6
        assert places(driver, "a") == places(driver, "b")
        assert driver.content() == expected


@pytest.mark.usefixtures("fewer_runs")
def test_many_short_runs_are_merged_and_still_shared(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "ab":
            driver.ask(*register(name, 1, WIDE))
        for turn in range(80):
            for name in "ab":
                blob = block("_pk", 0, turn * 8, 8)
                driver.ask(*put(name + "_pk", 0, turn * 8, 8, blob))
            if turn % 7 == 0:
                share(driver)
        share(driver)
        assert len(driver.store.state.sessions[b"a_pk"].layers[0].extents) <= 64
        expected = driver.content()
        assert rows_of(expected, "a")["rowsb'_pk'0"] == rows_of(expected, "b")["rowsb'_pk'0"]
        assert one_bulk(driver.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 640, "FMT", "STORED"))
        sound(driver)
    with Driver(folder) as driver:
        assert driver.content() == expected
        share(driver)
        assert driver.content() == expected
        sound(driver)
