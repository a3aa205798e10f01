"""Sharing under crashes, damage and commands that come in between: nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from crc32c import crc32c

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.index import InSegment
from pion_vllm_mlx.server.store.reclaim import Reclaimer
from tests.recovery.broken import content_of
from tests.recovery.driving import Driver, Options, Word
from tests.recovery.faults import failing
from tests.recovery.material import agrees, register
from tests.recovery.twins import (
    COUNT,
    PREFIX_BYTES,
    SIDES,
    SLACK,
    WIDE,
    block,
    disk,
    places,
    prefix,
    put,
    rows_of,
    share,
    sound,
)


@pytest.mark.parametrize("forever", [True, False])
def test_a_crash_at_any_step_of_sharing_loses_nothing(folder: Path, forever: bool) -> None:
    for fail_at in range(200):
        place = folder / str(fail_at)
        place.mkdir()
        with Driver(place) as driver:
            for name in "abc":
                prefix(driver, name)
            driver.ask("KV.PREFIX.MAP", "b")
            expected = driver.content()
            with failing(fail_at, forever) as faults:
                try:
                    share(driver)
                except (CommandError, OSError):
                    assert faults.failed
            assert driver.content() == expected, (fail_at, faults.failed)
            if not forever:
                driver.store.state.unshared.update(dict.fromkeys(driver.store.state.sessions))
                driver.store.state.untidy.update(dict.fromkeys([b"a", b"b", b"c"]))
                share(driver)
                driver.loop.run_until_complete(driver.server.mend())
                assert driver.content() == expected
                assert disk(driver) < PREFIX_BYTES + SLACK
                sound(driver)
        with Driver(place) as driver:
            assert driver.store.counters.damaged == 0, (fail_at, faults.failed)
            assert driver.content() == expected, (fail_at, faults.failed)
            share(driver)
            assert driver.content() == expected and disk(driver) < PREFIX_BYTES + SLACK
            assert all(agrees(driver, name) == 4 for name in "abc")
            sound(driver)
        if not faults.failed:
            assert fail_at > 8
            return
    raise AssertionError("never got through")


#: CRC-32C's polynomial with its leading term, as bits of consecutive bytes (low bit first).
_POLYNOMIAL = 0x1_05EC_76F1


def same_checksum(data: bytes) -> bytes:
    """Other bytes with the same CRC-32C: it is linear, and the polynomial's own is nothing."""
    changed = int.from_bytes(data[:5], "little") ^ _POLYNOMIAL
    other = changed.to_bytes(5, "little") + data[5:]
    assert other != data and crc32c(other) == crc32c(data)
    return other


def test_other_rows_with_the_same_checksum_are_not_shared(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        driver.ask(*register("b", 2, WIDE))
        for layer in range(2):
            for side in SIDES:
                blob = block(side, layer, 0, COUNT)
                blob = same_checksum(blob) if layer == 0 or side == "_pv" else blob
                driver.ask(*put("b" + side, layer, 0, COUNT, blob))
        expected = driver.content()
        share(driver)
        assert driver.content() == expected and driver.store.counters.damaged == 0
        # one run of four is the same
        assert len(places(driver, "a") & places(driver, "b")) == 1
        assert rows_of(expected, "a") != rows_of(expected, "b")
        sound(driver)
    assert content_of(folder) == expected


def test_damaged_rows_are_found_and_never_take_the_place_of_good_ones(folder: Path) -> None:
    for victim in "ab":
        place = folder / victim
        place.mkdir()
        with Driver(place) as driver:
            prefix(driver, "a")
            prefix(driver, "b")
            driver.ask("KV.PREFIX.MAP", "a")
            expected = rows_of(driver.content(), "ba"["ab".index(victim)])
            session = driver.store.state.sessions[victim.encode() + b"_pk"]
            run = session.layers[1].extents[0].run
            assert isinstance(run.place, InSegment)
            with run.place.segment.path.open("r+b") as file:
                file.seek(run.place.offset + 5)
                file.write(b"other")
            share(driver)
            assert driver.ask("KV.PREFIX.LOOKUP", victim) == "MISS"
            assert driver.store.counters.damaged == 2
            assert rows_of(driver.content(), "ba"["ab".index(victim)]) == expected
            sound(driver)


def meanwhile(driver: Driver, *words: Word) -> None:
    """Share, and run a command when the bytes were compared and nothing is logged yet."""
    real, done = driver.store.run, []

    async def run(work: Callable[[], Any]) -> Any:
        result = await real(work)
        if "_share" in work.__qualname__ and not done:
            done.append(work)
            await driver._ask(words)
        return result

    with mock.patch.object(driver.store, "run", run):
        share(driver)
    assert done


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("what", ["drop", "overwrite"])
def test_what_happens_while_bytes_are_compared_wins(folder: Path, what: str, name: str) -> None:
    newer = put(name + "_pk", 0, 20, 30, block("_pk", 0, 20, 30, "newer"))
    commands: dict[str, tuple[Word, ...]] = {
        "drop": ("KV.PREFIX.DROP", name),
        "overwrite": newer,
    }
    with Driver(folder) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        driver.ask("KV.PREFIX.MAP", "a")
        meanwhile(driver, *commands[what])
        found = driver.content()
        assert driver.store.counters.damaged == 0
        sound(driver)
    (folder / "plain").mkdir()
    with Driver(folder / "plain") as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        driver.ask(*commands[what])
        assert driver.content() == found
    assert content_of(folder) == found


def test_saving_in_steps_while_rows_are_shared_loses_nothing(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "abcd":
            prefix(driver, name)
        expected = driver.content()
        reclaimer = Reclaimer(driver.store)

        async def both() -> None:
            save = asyncio.ensure_future(driver.store.save_in_steps())
            while not save.done() or driver.store.state.unshared:
                await reclaimer.step()
                await asyncio.sleep(0)
            await save

        driver.store.config.__dict__["wal_size"] = 0  # every log is worth a snapshot
        driver.loop.run_until_complete(both())
        assert driver.store.counters.bytes_shared == 3 * PREFIX_BYTES
        assert driver.content() == expected
    with Driver(folder) as driver:
        assert driver.store.counters.damaged == 0 and driver.content() == expected
        sound(driver)


def test_without_a_log_a_snapshot_keeps_the_segments_it_names(folder: Path) -> None:
    with Driver(folder, Options(wal=False)) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        driver.ask("KV.PREFIX.SAVE")
        expected = driver.content()
        assert driver.loop.run_until_complete(Reclaimer(driver.store).step()) is False
    assert content_of(folder, Options(wal=False)) == expected
