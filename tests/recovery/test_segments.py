"""Segment files: there exactly as long as something lives in them, readable, never read early."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from pathlib import Path
from unittest import mock

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.commands.vstore_fetch import Wanted, layer_chunks
from pion_vllm_mlx.server.outbound import Stream
from pion_vllm_mlx.server.store.findings import Finding, Kind
from pion_vllm_mlx.server.store.rows import read_rows
from pion_vllm_mlx.server.store.sealing import begin_seal
from tests.recovery.broken import VSTORE_WAL, content_of
from tests.recovery.driving import Driver, Options, Word, plain, refused
from tests.recovery.faults import counting, failing
from tests.recovery.material import (
    COMPLETION_LAYER,
    agrees,
    noise,
    open_sealed,
    register,
    rows,
    state,
    store_all,
)
from tests.recovery.model import Model


def _files(driver: Driver) -> set[str]:
    return {path.stem for path in driver.store.segments.path.iterdir()}


def _check_uses(driver: Driver) -> None:
    """Every segment is used as often as counted, and is there exactly while it is used."""
    used: dict[str, int] = {}
    store = driver.store
    places = [run.place for s in store.state.sessions.values() for run in s.runs()]
    places += [blob.place for layers in store.state.states.values() for blob in layers.values()]
    for place in places:
        segment = getattr(place, "segment", None)
        if segment is not None:
            used[segment.name] = used.get(segment.name, 0) + 1
    counted = {name: segment.uses for name, segment in store.segments.segments.items()}
    assert counted == used
    assert _files(driver) == set(used)
    assert all(segment.writers == 0 for segment in store.segments.segments.values())
    by_group = store.segments._of_group
    assert {n for mates in by_group.values() for n in mates} == set(used)
    live = {r.run_id for s in store.state.sessions.values() for r in s.runs()}
    assert set(store.state.inline_runs) <= live
    groups = store.state.inline_groups()
    riding = [one.run.run_id for group in groups for one in store.state.inline_of(group)]
    assert sorted(riding) == sorted(store.state.inline_runs)


def _some_command(dice: random.Random) -> tuple[Word, ...]:
    name = dice.choice("ab")
    sid = name + dice.choice(["_pk", "_pv"])
    start, count = dice.randrange(60), dice.choice([1, 3, 20, 700])
    return dice.choice(
        [
            register(name),
            *[rows(sid, dice.randrange(2), start, count) for _ in range(5)],
            state(dice.choice([name, name + "@8"]), dice.randrange(2), 300, start),
            state(dice.choice([name, name + "@8"]), COMPLETION_LAYER, 70_000, start),
            ("KV.PREFIX.MAP", name),
            ("KV.PREFIX.SAVE",),
            ("KV.PREFIX.DROP", name),
        ]
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_random_history_with_crashes_holds_what_a_simple_store_holds(
    folder: Path, seed: int
) -> None:
    dice = random.Random(seed)
    model, driver = Model(), Driver(folder)
    few = 2 if seed % 2 else 512
    crashes = 0
    for _ in range(150):
        driver.store.segments.files._limit = few
        words = _some_command(dice)
        try:
            driver.ask(*words)
        except CommandError as error:
            known = words[0] == "V.STOREBATCH" and str(words[1]).encode() not in model.sessions
            assert known or "nothing to save" in error.sentence, error
        else:
            model = model.after(words)
        _check_uses(driver)
        if dice.random() < 0.15:
            crashes += 1
            driver.crash()
            driver = Driver(folder)
            _check_uses(driver)
            assert driver.store.counters.damaged == 0
        if dice.random() < 0.3:
            assert Model.of(driver.content()) == model
            open_sealed(driver)
    assert crashes > 5
    for name in "ab":
        if model.sessions.get(f"{name}_pk".encode()):
            agrees(driver, name)
    driver.ask("KV.PREFIX.DROP", "a", "b")
    driver.ask("SSM.PREFIX.DROP", "a@8")
    assert _files(driver) == set()
    driver.crash()


def test_many_segments_need_few_open_files(folder: Path) -> None:
    names = [f"n{n}" for n in range(40)]
    with Driver(folder, Options(max_sessions=1000)) as driver:
        driver.store.segments.files._limit = 5
        for name in names:
            driver.ask(*register(name))
            driver.ask(*rows(f"{name}_pk", 0, 0, 600))
        expected = driver.content()
        held = driver.store.state.sessions[b"n0_pk"].layers[0].extents[0].run
        driver.ask("KV.PREFIX.SAVE")
        driver.ask("KV.PREFIX.DROP", "n0")
        assert len(driver.store.segments.files) <= 5
        rest = {key: value for key, value in expected.items() if key[1][:3] != b"n0_"}
        assert driver.content() == rest
        # who holds a run of a file that went can read it to its end
        assert read_rows(held, 0, 600).tobytes() == expected["rows", b"n0_pk", 0][2]
    with Driver(folder, Options(max_sessions=1000)) as driver:
        assert len(driver.store.segments.files) == 0
        assert driver.content() == rest


@pytest.mark.parametrize("kind", [errno.EMFILE, errno.EACCES])
def test_a_file_that_cannot_be_opened_now_is_no_damage(folder: Path, kind: int) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 600))
        driver.ask(*rows("a_pv", 0, 0, 600))
        driver.ask(*state("a", 0, 70_000))
        driver.ask("KV.PREFIX.SAVE")
        whole = driver.content()
    with Driver(folder) as driver:
        with mock.patch.object(os, "open", side_effect=OSError(kind, os.strerror(kind))):
            assert "cannot be read now" in refused(driver, "KV.PREFIX.MAP", "a")
        assert driver.store.counters.damaged == 0
        assert driver.content() == whole


def test_files_that_nothing_names_are_deleted_at_start(folder: Path) -> None:
    with Driver(folder) as driver:
        store_all(driver, "a")
        expected, names = driver.content(), _files(driver)
        segments = driver.store.segments.path
    (segments / "0123.safetensors").write_bytes(b"rows of a store that never ended")
    (segments / "4567.safetensors.tmp").write_bytes(b"")
    (folder / "pion.vstore.0.tmp").write_bytes(b"half a manifest")
    with Driver(folder) as driver:
        assert driver.content() == expected and _files(driver) == names
        assert Finding(Kind.ORPHANS, count=2) in driver.store.replayed.notes
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("how", ["missing", "short"])
def test_a_namespace_whose_segment_is_missing_or_short_is_dropped_whole_and_counted(
    folder: Path, how: str
) -> None:
    with Driver(folder) as driver:
        store_all(driver, "bad")
        store_all(driver, "good")
        driver.ask("KV.PREFIX.MAP", "bad")
        whole = driver.content()
        place = next(iter(driver.store.state.sessions[b"bad_pk"].runs())).place
        path = Path(place.segment.path)  # type: ignore[union-attr]
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, 2048)
    good = {key: value for key, value in whole.items() if key[1].startswith(b"good")}
    with Driver(folder) as driver:
        assert driver.store.counters.damaged == 2
        assert driver.content() == good
        assert driver.ask("KV.PREFIX.LOOKUP", "bad") == "MISS"
        assert "damaged" in driver.ask("KV.PREFIX.EXPLAIN", "bad")
        _check_uses(driver)
        # what is stored anew must not be taken for what was damaged
        driver.ask(*register("bad"))
        driver.ask(*rows("bad_pk", 0, 0, 3))
        stored = driver.content()
    with Driver(folder) as driver:
        assert driver.store.counters.damaged == 0
        assert driver.content() == stored


def test_a_missing_file_of_a_state_takes_its_whole_prefix_along(folder: Path) -> None:
    with Driver(folder) as driver:
        store_all(driver, "a")
        driver.ask(*register("b"))
        driver.ask(*rows("b_pk", 0, 0, 700))
        driver.ask(*state("a@700", 0, 70_000))
        paths = {
            sid: Path(driver.store.state.states[sid][layer].place.segment.path)  # type: ignore[union-attr]
            for sid, layer in ((b"a@700", 0), (b"a", 1))
        }
    paths[b"a@700"].unlink()
    with Driver(folder) as driver:
        assert driver.state_of("a@700", 0) is None and driver.store.counters.damaged == 1
        assert driver.state_of("a", 0) is not None
    paths[b"a"].unlink()
    with Driver(folder) as driver:
        assert {sid for _, sid, _ in driver.content()} == {b"b_pk", b"b_pv"}


def test_a_start_reads_no_rows(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "abc":
            store_all(driver, name)
            driver.ask(*rows(f"{name}_pk", 0, 0, 9000))
        driver.ask("KV.PREFIX.SAVE")
        driver.ask(*rows("a_pk", 1, 5, 9000))
        total = sum(s.disk_bytes() for s in driver.store.segments.segments.values())
    for path in (folder / "pion.segments.0").iterdir():
        size = path.stat().st_size
        os.truncate(path, 0)
        os.truncate(path, size)
    segments = {path.stat().st_ino for path in (folder / "pion.segments.0").iterdir()}
    with counting("preadv") as calls, Driver(folder) as driver:
        assert not segments & set(calls) and total > 4_000_000
        assert driver.store.counters.damaged == 0
        for name in "abc":
            assert driver.ask("KV.PREFIX.LOOKUP", name) == "HIT"
        # and the first look at the rows finds that they are gone
        assert driver.content() == {}
        assert segments & set(calls)


def test_a_segment_found_unsealed_is_sealed_with_a_header_of_usual_size(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 700))
        driver.ask(*rows("a_pk", 0, 0, 900))
        driver.ask(*rows("a_pk", 0, 900, 3))
        driver.ask(*state("a", 0, 70_001))
        driver.ask(*rows("a_pk", 1, 0, 700))
        expected = driver.content()
    with Driver(folder) as driver:
        assert agrees(driver, "a") == 3
        (segment,) = driver.store.segments.segments.values()
        assert segment.header_bytes <= 64 << 10
        assert open_sealed(driver) == 1
        assert driver.content() == expected
    assert content_of(folder) == expected


def test_a_crash_within_sealing_leaves_files_that_are_sealed_right_later(folder: Path) -> None:
    for fail_at in range(60):
        place = folder / str(fail_at)
        place.mkdir()
        with Driver(place) as driver:
            store_all(driver, "a")
            expected = driver.content()
            # after a crash nothing happens any more: every later call fails too
            with failing(fail_at, forever=True) as faults:
                try:
                    driver.ask("KV.PREFIX.MAP", "a")
                except CommandError:
                    assert faults.failed
        with Driver(place) as driver:
            assert driver.content() == expected, (fail_at, faults.failed)
            assert agrees(driver, "a") >= 8
            open_sealed(driver)
            driver.ask(*rows("a_pk", 0, 13, 900))
            driver.ask("KV.PREFIX.SAVE")
            open_sealed(driver)
            _check_uses(driver)
        if not faults.failed:
            return
    raise AssertionError("never got through")


def test_sealing_while_others_store_keeps_every_row(folder: Path) -> None:
    driver = Driver(folder, Options(max_sessions=1000))
    model = Model()
    script: dict[int, list[tuple[Word, ...]]] = {}
    for writer in range(4):
        name = f"n{writer % 2}"
        side = "_pk" if writer < 2 else "_pv"
        script[writer] = [rows(name + side, 0, n * 700, 700) for n in range(12)]
        script[writer] += [rows(name + side, 1, n * 9, 9) for n in range(12)]
        script[writer] += [state(f"{name}@{writer}", n, 70_000) for n in range(3)]
        random.Random(writer).shuffle(script[writer])
    for name in ("n0", "n1"):
        driver.ask(*register(name))
        model = model.after(register(name))

    async def store(writer: int) -> None:
        for words in script[writer]:
            await driver._ask(words)
            await asyncio.sleep(0)

    async def seal(words: tuple[Word, ...]) -> int:
        done = 0
        for _ in range(15):
            try:
                await driver._ask(words)
                done += 1
            except CommandError as error:
                assert "under way" in error.sentence, error
            await asyncio.sleep(0.001)
        return done

    async def everything() -> list[int | None]:
        sealing = [("KV.PREFIX.MAP", "n0"), ("KV.PREFIX.MAP", "n1"), ("KV.PREFIX.SAVE",)]
        return await asyncio.gather(*map(store, script), *map(seal, sealing))

    done = driver.loop.run_until_complete(everything())
    assert sum(n or 0 for n in done) >= 15
    for commands in script.values():
        for words in commands:
            model = model.after(words)
    assert Model.of(driver.content()) == model
    _check_uses(driver)
    open_sealed(driver)
    driver.crash()
    with Driver(folder, Options(max_sessions=1000)) as again:
        assert Model.of(again.content()) == model
        assert again.store.counters.damaged == 0
        again.ask("KV.PREFIX.SAVE")
        assert open_sealed(again) == len(_files(again))
        assert agrees(again, "n0") >= 4


def test_a_run_that_moves_while_it_is_read_is_read_right(folder: Path) -> None:
    """Readers on other threads hold a run's place and shape together."""
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 20))
        driver.ask(*rows("a_pv", 0, 0, 20))
        before = driver.content()
        held = driver.store.state.sessions[b"a_pk"].layers[0].extents[0].run
        place, shape = held.place, held.shape
        driver.ask("KV.PREFIX.MAP", "a")
        moved = driver.store.state.sessions[b"a_pk"].layers[0].extents[0].run
        assert moved is not held and moved.place != place
        assert (held.place, held.shape) == (place, shape)
        assert moved.run_id == held.run_id
        driver.ask("KV.PREFIX.SAVE")
        fd = place.file.fd  # type: ignore[union-attr]
        data = os.pread(fd, shape.data_bytes, place.offset)
        assert data == noise(("a_pk", 0, 0, 20), 20 * 128)
        assert driver.content() == before


def test_a_segment_that_is_being_sealed_takes_no_more_rows(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 700))
        store = driver.store
        job = begin_seal(store.state, store.segments, b"a")
        region = store.segments.reserve(b"a", 100, 1)
        assert job.segments and region.segment not in job.segments


def test_a_reply_under_way_is_not_written_over_by_runs_that_move(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 700))
        driver.ask(*rows("a_pk", 1, 0, 700))
    # so short runs ride in the log, and move
    with Driver(folder, Options(appendfsync="always")) as driver:
        layer = driver.store.state.sessions[b"a_pk"].layers[1]
        chunks = Stream(list(layer_chunks(layer, Wanted(0, 700, "STORED", head_major=True))))
        for start in range(0, 700, 20):
            driver.ask(*rows("a_pk", 1, start, 20))
        driver.ask(*rows("a_pv", 0, 0, 20))
        (before,) = driver.store.segments.segments.values()
        driver.ask("KV.PREFIX.MAP", "a")
        assert any(s["path"] == str(before.path.resolve()) for s in driver.map("a")["segments"])
        assert plain(chunks) == noise(("a_pk", 1, 0, 700), 700 * 128)


def test_a_published_file_stays_as_it_is_until_it_goes(folder: Path) -> None:
    with Driver(folder) as driver:
        store_all(driver, "a")
        published = {
            Path(s["path"]): Path(s["path"]).read_bytes() for s in driver.map("a")["segments"]
        }
        driver.ask(*rows("a_pk", 0, 2, 3))
        driver.ask(*rows("a_pk", 1, 500, 200))
        driver.ask("KV.PREFIX.MAP", "a")
        driver.ask("KV.PREFIX.SAVE")
        assert {path: path.read_bytes() for path in published} == published
    with Driver(folder) as driver:
        driver.ask(*rows("a_pk", 0, 2, 3))
        driver.ask("KV.PREFIX.SAVE")
        assert {path: path.read_bytes() for path in published} == published
        driver.ask("KV.PREFIX.DROP", "a")
        assert not any(path.exists() for path in published)
    assert (folder / VSTORE_WAL).stat().st_size > 0
