"""SAVE: all or nothing between any two steps; what it wrote is the store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pion_vllm_mlx.errors import CommandError, DamagedData
from pion_vllm_mlx.server.store import framing
from tests.recovery.broken import SSM_WAL, VSTORE_WAL, content_of
from tests.recovery.driving import Driver, Options, refused
from tests.recovery.faults import failing
from tests.recovery.material import (
    agrees,
    open_sealed,
    register,
    rows,
    state,
    store_all,
)

MANIFEST, SSM_SNAPSHOT = "pion.vstore.0", "pion.ssm.0"


def _temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith((".tmp", ".new"))]


def _unsaved(folder: Path) -> Driver:
    """A store with a snapshot, and things stored, sealed and overwritten after it."""
    driver = Driver(folder)
    store_all(driver, "a")
    driver.ask("KV.PREFIX.SAVE")
    store_all(driver, "b")
    driver.ask(*rows("a_pk", 1, 3, 30))
    driver.ask(*state("a", 0, 300, salt=1))
    return driver


@pytest.mark.parametrize("forever", [False, True], ids=["one fault", "a full disk"])
@pytest.mark.parametrize("target", [(), ("copy.bin",)], ids=["default", "portable"])
def test_a_save_that_fails_between_any_two_steps_loses_nothing(
    folder: Path, target: tuple[str, ...], forever: bool
) -> None:
    failures = 0
    for fail_at in range(200):
        place = folder / str(fail_at)
        place.mkdir()
        with _unsaved(place) as driver:
            expected = driver.content()
            with failing(fail_at, forever) as faults:
                try:
                    driver.ask("KV.PREFIX.SAVE", *target)
                except CommandError:
                    failures += 1
                    assert faults.failed
                else:
                    assert not faults.failed
            assert driver.content() == expected, (fail_at, faults.failed)
            assert _temporaries(place) == [] or "unlink" in faults.failed
            _crashed_now(place, driver, (fail_at, faults.failed))
            driver.ask(*rows("a_pv", 0, 50, 4))
            extended = driver.content()
        with Driver(place) as again:
            assert again.content() == extended, (fail_at, faults.failed)
            again.ask("KV.PREFIX.SAVE", *target)
            assert again.content() == extended
            open_sealed(again)
            assert _temporaries(place) == []
        if not faults.failed:
            break
    else:
        raise AssertionError("never got through")
    assert failures == fail_at >= 20


def _crashed_now(place: Path, driver: Driver, where: object) -> None:
    """A start on a copy of the folder as it is finds what the running store holds."""
    copy = place.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(place, copy)
    assert content_of(copy) == driver.content(), where


@pytest.mark.parametrize("command", ["store", "map", "drop"])
def test_a_command_that_the_disk_refuses_changes_nothing_and_the_store_goes_on(
    folder: Path, command: str
) -> None:
    words = {
        "store": rows("a_pk", 1, 900, 700),
        "map": ("KV.PREFIX.MAP", "a"),
        "drop": ("KV.PREFIX.DROP", "a"),
    }[command]
    for fail_at in range(100):
        place = folder / str(fail_at)
        place.mkdir()
        with Driver(place) as driver:
            store_all(driver, "a")
            before = driver.content()
            with failing(fail_at) as faults:
                try:
                    driver.ask(*words)
                except CommandError:
                    assert faults.failed
                else:
                    # a drop has room that was kept for it; a file that stays is tried again
                    kept = command == "drop" and faults.failed in (["pwrite"], ["unlink"])
                    assert not faults.failed or kept
                    assert driver.ask("KV.PREFIX.LOOKUP", "a") == "MISS" or command != "drop"
            found = driver.content()
            if faults.failed and command != "drop":
                assert found == before, (fail_at, faults.failed)
            _crashed_now(place, driver, (fail_at, faults.failed))
            driver.ask(*register("later"))
            driver.ask(*rows("later_pk", 0, 0, 600))
            driver.ask("KV.PREFIX.SAVE")
            extended = driver.content()
            open_sealed(driver)
        assert content_of(place) == extended
        if not faults.failed:
            assert fail_at >= 1
            return
    raise AssertionError("never got through")


def test_after_a_save_the_logs_are_empty_and_numbers_go_on(folder: Path) -> None:
    with _unsaved(folder) as driver:
        before = driver.store.vstore_wal.next_lsn, driver.store.ssm_wal.next_lsn
        driver.ask("KV.PREFIX.SAVE")
        for name in (VSTORE_WAL, SSM_WAL):
            assert (folder / name).stat().st_size == 0
        info = dict(line.split(":") for line in driver.ask("KV.PREFIX.INFO").split("\r\n") if line)
        assert info["wal_bytes"] == info["wal_appended"] == "0"
        after = driver.store.vstore_wal.next_lsn, driver.store.ssm_wal.next_lsn
        assert after[0] > before[0] and after[1] == before[1]
    with Driver(folder) as driver:
        assert (driver.store.vstore_wal.next_lsn, driver.store.ssm_wal.next_lsn) == after
        driver.ask(*rows("a_pk", 0, 40, 1))
    found = framing.scan(
        memoryview((folder / VSTORE_WAL).read_bytes()), framing.VSTORE_WAL, VSTORE_WAL
    )
    assert [frame.lsn for frame in found.frames] == [after[0]]


def test_records_that_the_snapshot_holds_are_skipped_after_a_crash_before_truncation(
    folder: Path,
) -> None:
    with _unsaved(folder) as driver:
        driver.ask("KV.PREFIX.MAP", "b")
        logs = {name: (folder / name).read_bytes() for name in (VSTORE_WAL, SSM_WAL)}
        driver.ask("KV.PREFIX.MAP", "a")
        driver.ask("KV.PREFIX.SAVE")
        expected, order = driver.content(), driver.access_order()
    for chosen in (logs, {VSTORE_WAL: logs[VSTORE_WAL]}, {SSM_WAL: logs[SSM_WAL]}):
        for name, data in chosen.items():
            (folder / name).write_bytes(data)
        with Driver(folder) as driver:
            assert driver.content() == expected
            assert driver.access_order() == order
            assert driver.store.replayed.vstore == driver.store.replayed.ssm == 0


def test_a_snapshot_keeps_extents_access_order_and_run_numbers(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "abc":
            driver.ask(*register(name))
            for start, count in ((0, 20), (5, 3), (30, 700), (100, 50), (100, 50), (18, 14)):
                driver.ask(*rows(f"{name}_pk", 0, start, count))
        driver.ask("KV.PREFIX.LOOKUP", "a")
        driver.ask("KV.PREFIX.SAVE")
        expected = driver.content(), driver.access_order(), _extents(driver)
        assert expected[1][-2:] == [b"a_pk", b"a_pv"]
    with Driver(folder) as driver:
        assert (driver.content(), driver.access_order(), _extents(driver)) == expected
        driver.ask(*rows("b_pk", 0, 7, 2))
        driver.ask("KV.PREFIX.SAVE")
        expected = driver.content(), driver.access_order(), _extents(driver)
    with Driver(folder) as driver:
        assert (driver.content(), driver.access_order(), _extents(driver)) == expected
        assert agrees(driver, "a") >= 5


def _extents(driver: Driver) -> dict[tuple[bytes, int], list[tuple[int, ...]]]:
    return {
        (session.sid, layer): [(e.start, e.end, e.row, e.run.run_id) for e in found.extents]
        for session in driver.store.state.sessions.values()
        for layer, found in session.layers.items()
    }


def test_a_portable_copy_alone_restores_everything(folder: Path) -> None:
    source, target = folder / "source", folder / "target"
    source.mkdir()
    target.mkdir()
    with _unsaved(source) as driver:
        driver.ask("KV.PREFIX.SAVE", "copy.bin")
        expected, order = driver.content(), driver.access_order()
        driver.ask("KV.PREFIX.DROP", "a")
    (target / MANIFEST).write_bytes((source / "copy.bin").read_bytes())
    with Driver(target) as driver:
        assert driver.content() == expected and driver.access_order() == order
        assert open_sealed(driver) >= 3
        driver.ask(*rows("a_pk", 0, 70, 3))
        driver.ask("KV.PREFIX.SAVE")
        extended = driver.content()
    assert content_of(target) == extended


def test_a_portable_copy_that_was_cut_short_is_refused_as_such(folder: Path) -> None:
    source, target = folder / "source", folder / "target"
    source.mkdir()
    target.mkdir()
    with _unsaved(source) as driver:
        driver.ask("KV.PREFIX.SAVE", "copy.bin")
    data = (source / "copy.bin").read_bytes()
    manifest = data.index(b"PIONSS01")
    cuts = {0, 5, 31, 32, 33, manifest - 1, manifest + 1, manifest + 8, manifest + 40}
    cuts |= {len(data) // 2, len(data) - 1, len(data) - 24, len(data) - 25}
    for cut in sorted(cuts):
        (target / MANIFEST).write_bytes(data[:cut])
        with pytest.raises(DamagedData) as caught:
            Driver(target)
        text = str(caught.value)
        assert text.startswith(f"{MANIFEST} at "), cut
        assert "the file is cut short; if it is a copy, copy it once more, whole" in text, cut
        assert ("no table of contents at its end" in text) == (cut > manifest), cut
        assert not list((target / "pion.segments.0").glob("*.safetensors"))


def test_a_restore_interrupted_anywhere_is_done_again(folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    with _unsaved(source) as driver:
        driver.ask("KV.PREFIX.SAVE", "copy.bin")
        expected = driver.content()
    for fail_at in range(200):
        target = folder / f"target{fail_at}"
        target.mkdir()
        (target / MANIFEST).write_bytes((source / "copy.bin").read_bytes())
        with failing(fail_at, forever=True) as faults:
            try:
                Driver(target).crash()
            except OSError:
                assert faults.failed
        assert content_of(target) == expected, (fail_at, faults.failed)
        if not faults.failed:
            assert fail_at >= 10
            return
    raise AssertionError("never got through")


def test_without_a_log_only_a_save_keeps_anything(folder: Path) -> None:
    no_log = Options(wal=False)
    with Driver(folder, no_log) as driver:
        store_all(driver, "a")
        assert "WAL" in refused(driver, "KV.PREFIX.COMMIT")
        driver.ask("KV.PREFIX.SAVE")
        saved = driver.content()
        store_all(driver, "b")
        names = set(driver.store.segments.segments)
    with Driver(folder, no_log) as driver:
        assert driver.content() == saved
        assert set(driver.store.segments.segments) < names
    assert content_of(folder) == saved


def test_a_log_from_before_is_never_laid_over_what_was_saved_without_one(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 4))
    with Driver(folder, Options(wal=False)) as driver:
        assert any(sid == b"a_pk" for _, sid, _ in driver.content())
        driver.ask("KV.PREFIX.DROP", "a")
        driver.ask(*register("b"))
        driver.ask("KV.PREFIX.SAVE")
        saved = driver.content()
        driver.ask(*register("c"))
    assert content_of(folder) == saved
