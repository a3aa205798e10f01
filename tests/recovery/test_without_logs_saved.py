"""Without logs, what a save acknowledged is there after a kill, whatever was stored since."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from pion_vllm_mlx.server.store.segment import Segment
from tests.recovery.broken import Copies, content_of
from tests.recovery.driving import Content, Driver, Options, Word
from tests.recovery.material import noise, register, state
from tests.recovery.test_save_in_steps import Held
from tests.recovery.test_save_moment import until
from tests.recovery.twins import COUNT, SIDES, block, places, prefix, put, rows_of, share

NO_LOG = Options(wal=False)
LONG, SHORT = 600, 8
Words = tuple[Word, ...]


def salted(sid: str, count: int, salt: int) -> Words:
    """Rows from the first one on, other ones with each ``salt``."""
    blob = noise((sid, count, salt), count * 128)
    return ("V.STOREBATCH", sid, 0, 0, count, blob, "FMT", "STORED", "LAYOUT", "HND")


def both_sides(count: int, salt: int) -> Iterator[Words]:
    for side in ("_pk", "_pv"):
        yield salted("a" + side, count, salt)


def stored() -> Iterator[Words]:
    yield register("a")
    yield from both_sides(LONG, 0)
    yield state("a", 0, 70_000)
    yield state("a", 1, 300)


def replaced(what: str, salt: int) -> Iterator[Words]:
    """What takes the place of something that is stored, other bytes with each ``salt``."""
    if what == "rows":
        yield from both_sides(LONG, salt)
    elif what == "short rows":
        yield from both_sides(SHORT, salt)
    elif what == "rows, then sealed":
        yield from both_sides(LONG, salt)
        yield ("KV.PREFIX.MAP", "a")
    elif what == "a state":
        yield state("a", 0, 70_000, salt)
    elif what == "a short state":
        yield state("a", 1, 300, salt)
    elif salt % 2:
        yield state("a", 0, 70_000, salt)
    else:
        yield ("SSM.PREFIX.DROP", "a", 0)


KINDS = ["rows", "short rows", "rows, then sealed", "a state", "a short state", "a dropped state"]


def carry_out(driver: Driver, commands: Iterator[Words]) -> None:
    for words in commands:
        driver.ask(*words)


def saved(driver: Driver) -> Content:
    """What a save acknowledges."""
    assert driver.ask("KV.PREFIX.SAVE") is not None
    return driver.content()


def segment_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*")}


def opened(folder: Path) -> Content:
    """What a server holds that starts on the folder as a kill at this moment would leave it."""
    return content_of(Copies(folder).fresh(), NO_LOG)


@pytest.mark.parametrize("what", KINDS)
def test_what_the_last_save_acknowledged_survives_a_kill(folder: Path, what: str) -> None:
    with Driver(folder, NO_LOG) as driver:
        carry_out(driver, stored())
        expected = saved(driver)
        for salt in range(1, 4):
            carry_out(driver, replaced(what, salt))
            assert opened(folder) == expected
            expected = saved(driver)
            assert opened(folder) == expected
        carry_out(driver, replaced(what, 4))
        carry_out(driver, replaced(what, 5))
    assert content_of(folder, NO_LOG) == expected


@pytest.mark.parametrize("what", KINDS)
def test_it_does_so_after_a_start_too(folder: Path, what: str) -> None:
    with Driver(folder, NO_LOG) as driver:
        carry_out(driver, stored())
        saved(driver)
        carry_out(driver, replaced(what, 1))
        expected = saved(driver)
    with Driver(folder, NO_LOG) as driver:
        carry_out(driver, replaced(what, 2))
    assert content_of(folder, NO_LOG) == expected


@pytest.mark.parametrize("what", KINDS)
def test_what_is_replaced_while_the_snapshot_is_written_is_in_it_still(
    folder: Path, what: str
) -> None:
    with Driver(folder, NO_LOG) as driver:
        carry_out(driver, stored())
        saved(driver)
        carry_out(driver, replaced(what, 1))
        expected = driver.content()

        async def both() -> None:
            with Held(driver) as held:
                save_it = asyncio.ensure_future(driver._ask(("KV.PREFIX.SAVE",)))
                await until(held.reached)
                for words in replaced(what, 2):
                    await driver._ask(words)
            await save_it

        driver.loop.run_until_complete(both())
        assert opened(folder) == expected
        carry_out(driver, replaced(what, 3))
    assert content_of(folder, NO_LOG) == expected


def test_a_store_costs_no_more_the_more_was_replaced_since_the_save(folder: Path) -> None:
    count = 60
    with Driver(folder, NO_LOG) as driver:
        for number in range(count):
            driver.ask(*state(f"s{number}", 0, 300))
        expected = saved(driver)
        looked: list[int] = []
        all_emptied = driver.store.space.emptied
        real = all_emptied._missed_for

        def missed_for(segment: Segment) -> bytes | None:
            looked[-1] += 1
            return real(segment)

        with mock.patch.object(all_emptied, "_missed_for", missed_for):
            for number in range(count):
                looked.append(0)
                driver.ask(*state(f"s{number}", 0, 300, salt=1))
        assert max(looked) <= 2 * min(looked) + 4
        assert opened(folder) == expected
        expected = saved(driver)
        assert opened(folder) == expected
        assert len(segment_files(folder)) == count


@pytest.mark.parametrize("what", KINDS)
def test_files_that_no_snapshot_names_any_more_go_with_the_next_save(
    folder: Path, what: str
) -> None:
    with Driver(folder, NO_LOG) as driver:
        carry_out(driver, stored())
        counts = []
        for salt in range(1, 21):
            carry_out(driver, replaced(what, salt))
            saved(driver)
            counts.append(len(segment_files(folder)))
        used = {s.name for s in driver.store.segments.segments.values() if s.uses}
        assert len(segment_files(folder)) == len(used)
        assert max(counts[10:]) <= max(counts[:10]) <= len(used) + 1
    with Driver(folder, NO_LOG) as driver:
        assert set(driver.store.segments.segments) == used


def test_files_of_a_dropped_namespace_go_at_once(folder: Path) -> None:
    with Driver(folder, NO_LOG) as driver:
        carry_out(driver, stored())
        saved(driver)
        carry_out(driver, both_sides(LONG, 1))
        assert len(segment_files(folder)) > 1
        driver.ask("KV.PREFIX.DROP", "a")
        assert segment_files(folder) == set()
    assert content_of(folder, NO_LOG) == {}


@pytest.mark.parametrize("sid", ["s", "s_pk", "s_pv"])
def test_files_of_dropped_states_go_at_once_whatever_their_name_ends_in(
    folder: Path, sid: str
) -> None:
    with Driver(folder, NO_LOG) as driver:
        driver.ask(*state(sid, 0, 70_000))
        saved(driver)
        driver.ask(*state(sid, 0, 70_000, 1))
        driver.ask("SSM.PREFIX.DROP", sid)
        assert segment_files(folder) == set()


@pytest.mark.parametrize("gone", ["a", "b"])
def test_rows_that_two_namespaces_share_stay_for_the_one_that_is_there_still(
    folder: Path, gone: str
) -> None:
    (kept,) = {"a", "b"} - {gone}
    with Driver(folder, NO_LOG) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        share(driver)
        assert places(driver, "a") == places(driver, "b")
        expected = rows_of(saved(driver), kept)
        driver.ask("KV.PREFIX.DROP", gone)
        for layer in range(2):
            for side in SIDES:
                other = block(side, layer, 0, COUNT, "other")
                driver.ask(*put(kept + side, layer, 0, COUNT, other))
        assert rows_of(opened(folder), kept) == expected
        driver.ask("KV.PREFIX.DROP", kept)
        assert segment_files(folder) == set()
