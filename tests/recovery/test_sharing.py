"""Equal rows are stored once: every read stays what it was, whatever goes or breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from crc32c import crc32c

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store import sharing
from pion_vllm_mlx.server.store.index import InSegment
from pion_vllm_mlx.server.store.reclaim import Reclaimer
from pion_vllm_mlx.server.store.store import StoreConfig
from tests.recovery.broken import content_of
from tests.recovery.driving import Content, Driver, Options, Word, one_bulk
from tests.recovery.faults import failing
from tests.recovery.material import agrees, noise, open_sealed, register, state

WIDE, COUNT = 1024, 64
#: 64 rows of 2 KB, both sides, two layers.
PREFIX_BYTES = 4 * COUNT * WIDE * 2
SIDES = ("_pk", "_pv")
#: block tables, headers and short runs
SLACK = 80_000


def put(sid: str, layer: int, start: int, count: int, blob: bytes) -> tuple[Word, ...]:
    place: tuple[Word, ...] = ("V.STOREBATCH", sid, layer, start, count, blob)
    return (*place, "FMT", "STORED", "LAYOUT", "HND")


def block(side: str, layer: int, start: int, count: int, seed: str = "same") -> bytes:
    return noise((seed, side, layer, start, count), count * WIDE * 2)


def prefix(driver: Driver, name: str, seed: str = "same", start: int = 0) -> None:
    """A prefix of two layers whose rows follow from the seed, not from the name."""
    if not start:
        driver.ask(*register(name, 2, WIDE))
    for layer in range(2):
        for side in SIDES:
            blob = block(side, layer, start, COUNT, seed)
            driver.ask(*put(name + side, layer, start, COUNT, blob))


def share(driver: Driver, limit: int = 1000) -> int:
    """Reclaim and share until there is nothing to do; how many steps did something."""
    reclaimer, busy = Reclaimer(driver.store), 0
    for _ in range(limit):
        did = driver.loop.run_until_complete(reclaimer.step())
        busy += did
        # a step that finds nothing may only have run out of its time
        if not did and not driver.store.state.untidy and not driver.store.state.unshared:
            return busy
    raise AssertionError("never at rest")


def disk(driver: Driver) -> int:
    return driver.store.space.disk_bytes()


def places(driver: Driver, name: str) -> set[tuple[str, int]]:
    """Where the rows of a namespace lie."""
    found = set()
    for side in SIDES:
        for run in driver.store.state.sessions[(name + side).encode()].runs():
            assert isinstance(run.place, InSegment)
            found.add((run.place.segment.name, run.place.offset))
    return found


def files(driver: Driver) -> set[str]:
    return {path.name for path in driver.store.segments.path.iterdir()}


def sound(driver: Driver) -> None:
    """What is counted is what is there, and no file is left over."""
    segments = driver.store.segments.segments
    assert files(driver) == {segment.path.name for segment in segments.values()}
    uses: dict[str, dict[bytes, int]] = {name: {} for name in segments}
    for session in driver.store.state.sessions.values():
        group = session.sid[:-3]
        for run in session.runs():
            if isinstance(run.place, InSegment):
                mine = uses[run.place.segment.name]
                mine[group] = mine.get(group, 0) + 1
    for sid, layers in driver.store.state.states.items():
        for blob in layers.values():
            if isinstance(blob.place, InSegment):
                mine = uses[blob.place.segment.name]
                mine[sid] = mine.get(sid, 0) + 1
    for name, segment in segments.items():
        assert segment.uses == sum(uses[name].values())
        assert set(segment.users()) == set(uses[name])
    open_sealed(driver)


def rows_of(content: Content, name: str) -> dict[str, Any]:
    """What a namespace holds, without its name."""
    return {
        f"{kind}{sid[len(name) :]!r}{layer}": value
        for (kind, sid, layer), value in content.items()
        if sid.startswith(name.encode())
    }


def logical_bytes(driver: Driver) -> int:
    return sum(session.row_bytes() for session in driver.store.state.sessions.values())


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
            effects = space.evict_for_bytes(1)
            left.append(effects[0].sids[0][:-3].decode())  # type: ignore[attr-defined]
            driver.loop.run_until_complete(driver.store.commit(lambda found=effects: found))
        # the cold twin costs nothing as long as the other one lives
        assert left == ["old", "twin", "cold twin"] or left == ["old", "cold twin", "twin"]
        assert files(driver) == set()


def test_a_cold_twin_outlives_what_is_warmer_and_costs_bytes(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "cold", "twins")
        prefix(driver, "warm", "alone")
        prefix(driver, "hot", "twins")
        share(driver)
        effects = driver.store.space.evict_for_bytes(1)
        assert [one.sids for one in effects] == [(b"warm_pk", b"warm_pv")]  # type: ignore[attr-defined]


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


def test_without_a_log_a_snapshot_keeps_the_segments_it_names(folder: Path) -> None:
    with Driver(folder, Options(wal=False)) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        driver.ask("KV.PREFIX.SAVE")
        expected = driver.content()
        assert driver.loop.run_until_complete(Reclaimer(driver.store).step()) is False
    assert content_of(folder, Options(wal=False)) == expected


def test_nothing_is_shared_when_it_is_switched_off(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        driver.store.config.__dict__["share_equal"] = False
        assert driver.loop.run_until_complete(Reclaimer(driver.store).step()) is False
        assert driver.store.counters.bytes_shared == 0


def test_a_step_compares_a_bounded_part(folder: Path) -> None:
    with Driver(folder) as driver, mock.patch.object(sharing, "STEP_BYTES", 1):
        prefix(driver, "a")
        prefix(driver, "b")
        expected = driver.content()
        assert 4 <= share(driver) <= 6
        assert places(driver, "a") == places(driver, "b")
        assert driver.content() == expected


def test_many_short_runs_are_merged_and_still_shared(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "ab":
            driver.ask(*register(name, 1, WIDE))
        for turn in range(40):
            for name in "ab":
                blob = block("_pk", 0, turn * 8, 8)
                driver.ask(*put(name + "_pk", 0, turn * 8, 8, blob))
            if turn % 7 == 0:
                share(driver)
        share(driver)
        expected = driver.content()
        assert rows_of(expected, "a")["rowsb'_pk'0"] == rows_of(expected, "b")["rowsb'_pk'0"]
        assert one_bulk(driver.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 320, "FMT", "STORED"))
        sound(driver)
    with Driver(folder) as driver:
        assert driver.content() == expected
        share(driver)
        assert driver.content() == expected
        sound(driver)
