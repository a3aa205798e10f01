"""Rows from some KiB on are written once, and take no more of a disk than they have bytes."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pion_vllm_mlx.server.chores import QUIET_SECONDS
from pion_vllm_mlx.server.commands import mapping
from pion_vllm_mlx.server.commands.mapping import describe
from pion_vllm_mlx.server.store import sealing
from pion_vllm_mlx.server.store.index import InSegment, Run
from pion_vllm_mlx.server.store.sealing import tensor_name
from pion_vllm_mlx.server.store.segments import SMALL_HEADER_RESERVE
from pion_vllm_mlx.server.store.wal import Inline
from tests.conftest import RunningServer
from tests.recovery.driving import Driver, Options, refused
from tests.recovery.faults import counting
from tests.recovery.material import agrees, open_sealed, register, rows, sealed_tensors
from tests.server.wire import Wire, Word

KIB = 1 << 10
SIDES = ("_pk", "_pv")
HEADS, ROWS = 4, 16

needs_proc = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc")


def _turn(name: str, turn: int, layers: int, run_bytes: int, layout: str) -> list[tuple[Word, ...]]:
    """The commands that store a turn of 16 rows in each layer."""
    blob = os.urandom(run_bytes)
    form: tuple[Word, ...] = ("FMT", "STORED", "LAYOUT", layout)
    return [
        ("V.STOREBATCH", name + side, layer, turn * ROWS, ROWS, blob, *form)
        for layer in range(layers)
        for side in SIDES
    ]


def _written(pid: int) -> int:
    """Bytes that a process has handed to write calls."""
    fields = Path(f"/proc/{pid}/io").read_text().split()
    return int(fields[fields.index("wchar:") + 1])


def _occupied(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def _tidied(wire: Wire) -> None:
    """Wait until the server has copied what it wants to, in a quiet moment."""
    copied, since = "", time.monotonic()
    while time.monotonic() - since < 3 * QUIET_SECONDS:
        found = wire.info("KV.PREFIX.INFO")["vstore_copied_bytes"]
        if found != copied:
            copied, since = found, time.monotonic()
        time.sleep(0.1)


def _registered(wire: Wire, name: str, run_bytes: int) -> None:
    width = run_bytes // ROWS // 2
    assert wire.ask("KV.PREFIX.REGISTER", name, width, "fp16", "HEADS", HEADS) == "OK"


@needs_proc
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("run_bytes", [8 * KIB, 16 * KIB, 32 * KIB])
@pytest.mark.parametrize("apart", [False, True], ids=["one namespace", "a namespace a turn"])
def test_turns_of_8_to_32_kib_runs_are_written_once_and_occupy_what_they_have(
    pion_server: RunningServer, run_bytes: int, layout: str, apart: bool
) -> None:
    turns, layers = 20, 16
    stored = turns * layers * len(SIDES) * run_bytes
    with Wire.tcp(pion_server.port) as wire:
        before, empty = _written(pion_server.pid), _occupied(pion_server.dir)
        for turn in range(turns):
            name = f"n{turn}" if apart else "n"
            if apart or not turn:
                _registered(wire, name, run_bytes)
            first = 0 if apart else turn
            assert set(wire.together(*_turn(name, first, layers, run_bytes, layout))) == {"OK"}
        assert (_written(pion_server.pid) - before) / stored <= 1.2
        assert wire.ask("KV.PREFIX.SAVE") == "OK"
        if not apart:
            _tidied(wire)
        assert (_written(pion_server.pid) - before) / stored <= 1.2
        assert (_occupied(pion_server.dir) - empty) / stored <= 1.2
        assert wire.info("KV.PREFIX.INFO")["vstore_bytes"] == str(stored)


def _only_run(driver: Driver, sid: bytes, layer: int) -> Run:
    (run,) = driver.store.state.sessions[sid].layers[layer].runs()
    return run


def test_runs_from_4_kib_on_go_to_the_segment_dense_and_from_64_kib_on_spaced(
    folder: Path,
) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a", 4))
        for layer, count in enumerate((31, 32, 511, 512)):  # rows of 128 bytes
            driver.ask(*rows("a_pk", layer, 0, count))
        runs = [_only_run(driver, b"a_pk", layer) for layer in range(4)]
        assert [type(run.place) for run in runs] == [Inline, InSegment, InSegment, InSegment]
        assert [run.shape.padded for run in runs] == [31, 32, 511, 576]
        driver.ask(*rows("a_pv", 0, 0, 31))
        driver.ask("KV.PREFIX.MAP", "a")
        assert _only_run(driver, b"a_pk", 0).shape.padded == 31
        assert agrees(driver, "a") == 5


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_once_a_session_has_4_kib_its_shorter_runs_go_to_the_segment_too(
    folder: Path, layout: str
) -> None:
    form = ("FMT", "STORED", "LAYOUT", layout)
    with Driver(folder) as driver:
        driver.ask(*register("a", 4))
        for layer in range(4):
            for turn in range(10):  # 8 rows of 128 bytes
                blob = os.urandom(8 * 128)
                driver.ask("V.STOREBATCH", "a_pk", layer, 8 * turn, 8, blob, *form)
        layers = driver.store.state.sessions[b"a_pk"].layers
        places = [type(run.place) for rows in layers.values() for run in rows.runs()]
        assert places == [Inline] * 3 + [InSegment] * 37
        assert driver.store.vstore_wal.size < 3 * 8 * 128 + 40 * 300
        expected = driver.content()
    with Driver(folder) as driver:
        assert driver.content() == expected
        driver.ask(*rows("a_pv", 0, 0, 8))
        assert agrees(driver, "a") == 41 and driver.content().items() >= expected.items()


def test_short_rows_are_in_their_file_before_the_log_names_them(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 32))
        (segment,) = driver.store.segments.segments.values()
        names = {segment.file.fd: "segment"}
        order: list[str] = []

        def noted(real: Callable[..., int]) -> Callable[..., int]:
            def write(fd: int, *args: Any) -> int:
                order.append(names.get(fd, "log"))
                return real(fd, *args)

            return write

        with (
            mock.patch.object(os, "pwritev", noted(os.pwritev)),
            mock.patch.object(os, "pwrite", noted(os.pwrite)),
        ):
            driver.ask(*rows("a_pk", 0, 32, 32))
        assert order == ["segment", "log"]


@needs_proc
def test_turns_of_2_kib_runs_are_written_once(pion_server: RunningServer) -> None:
    turns, layers, run_bytes = 20, 16, 2 * KIB
    stored = turns * layers * len(SIDES) * run_bytes
    with Wire.tcp(pion_server.port) as wire:
        before = _written(pion_server.pid)
        _registered(wire, "n", run_bytes)
        for turn in range(turns):
            assert set(wire.together(*_turn("n", turn, layers, run_bytes, "HND"))) == {"OK"}
        answer = wire.ask("KV.PREFIX.MAP", "n")
        _tidied(wire)
        # what is answered over a socket is no file
        assert (_written(pion_server.pid) - before - len(answer)) / stored <= 1.2


@needs_proc
@pytest.mark.parametrize("state_bytes", [16 * KIB, 60 * KIB])
def test_states_of_16_kib_and_more_are_written_once_however_often_is_saved(
    pion_server: RunningServer, state_bytes: int
) -> None:
    count = 6 << 20
    names = [f"s{number}" for number in range(count // state_bytes)]
    with Wire.tcp(pion_server.port) as wire:
        before = _written(pion_server.pid)
        for name in names:
            wire.ok("SSM.PREFIX.STORE", name, 0, os.urandom(state_bytes))
        for _ in range(4):
            wire.ok("KV.PREFIX.SAVE")
        assert (_written(pion_server.pid) - before) / (len(names) * state_bytes) <= 1.2


def test_what_a_header_does_not_need_of_its_room_is_a_hole(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        for side in SIDES:
            driver.ask(*rows("a" + side, 0, 0, 64))
        driver.ask("KV.PREFIX.SAVE")
        assert open_sealed(driver) == 1
        (segment,) = driver.store.segments.segments.values()
        assert segment.header_bytes == 512
        names = set(sealed_tensors(segment.path))
        assert names == {"k.0.0-64", "v.0.0-64", "dead.512"}
        assert segment.path.stat().st_size == SMALL_HEADER_RESERVE + 2 * 64 * 128
        assert segment.path.stat().st_blocks * 512 <= 2 * 64 * 128 + 3 * 4096
        assert agrees(driver, "a") == 2


def test_a_group_with_many_runs_needs_few_files(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a", 16))
        for turn in range(10):
            for layer in range(16):
                for side in SIDES:
                    driver.ask(*rows("a" + side, layer, 32 * turn, 32))
        assert len(driver.store.segments.segments) == 2
        assert agrees(driver, "a") == 320
        assert open_sealed(driver) == 2


def test_many_runs_are_sealed_with_one_look_at_each_and_described_off_the_event_loop(
    folder: Path,
) -> None:
    seen: list[str] = []
    threads: list[bool] = []

    def named(*args: Any) -> str:
        seen.append(tensor_name(*args))
        return seen[-1]

    def described(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return describe(*args)

    with Driver(folder) as driver:
        driver.ask(*register("a", 16))
        driver.ask(*rows("a_pv", 0, 0, 32))
        for turn in range(40):
            for layer in range(16):
                driver.ask(*rows("a_pk", layer, 32 * turn, 32))
        files = len(driver.store.segments.segments)
        with (
            mock.patch.object(sealing, "tensor_name", named),
            mock.patch.object(mapping, "describe", described),
        ):
            driver.map("a")
        assert files > 2 and len(seen) == len(set(seen)) == 641 and threads == [False]
        assert agrees(driver, "a") == 641 and open_sealed(driver) == files


def test_short_rows_that_a_disk_refuses_leave_nothing_behind(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 32))
        whole, used = driver.content(), driver.store.space.disk_bytes()
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(os, "pwritev", side_effect=full):
            assert "No space left" in refused(driver, *rows("a_pk", 0, 32, 32))
        assert driver.content() == whole and driver.store.space.disk_bytes() == used
        driver.ask(*rows("a_pk", 0, 32, 32))
        driver.ask(*rows("a_pv", 0, 0, 64))
        assert agrees(driver, "a") == 3 and open_sealed(driver) == 1


def test_the_folder_of_segments_is_flushed_when_files_came_not_each_time(folder: Path) -> None:
    with Driver(folder, Options(appendfsync="always")) as driver:
        inode = driver.store.segments.path.stat().st_ino
        driver.ask(*register("a"))
        flushes = []
        for start in (0, 512, 1024):
            with counting("fsync") as seen:
                driver.ask(*rows("a_pk", 0, start, 512))
            flushes.append(seen.count(inode))
        assert flushes == [1, 0, 0]
        driver.ask(*register("b"))
        with counting("fsync") as seen:
            driver.ask(*rows("b_pk", 0, 0, 512))
        assert seen.count(inode) == 1


def test_where_each_store_is_flushed_short_runs_ride_in_the_log_that_alone_is_flushed(
    folder: Path,
) -> None:
    with Driver(folder, Options(appendfsync="always")) as driver:
        driver.ask(*register("a"))
        with counting("fsync") as seen:
            driver.ask(*rows("a_pk", 0, 0, 511))
        assert seen == [driver.store.paths.vstore_wal.stat().st_ino]
        assert isinstance(_only_run(driver, b"a_pk", 0).place, Inline)


@needs_proc
def test_bytes_on_disk_are_those_of_the_files_while_they_grow(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "ab":
            driver.ask(*register(name))
        for step in range(6):
            driver.ask(*rows("ab"[step % 2] + "_pk", 0, 40 * step, 40 * (step + 1)))
            files = driver.store.segments.path.iterdir()
            found = sum(file.stat().st_blocks * 512 for file in files)
            assert driver.store.space.disk_bytes() == found


@needs_proc
def test_a_sealed_file_that_takes_another_part_of_the_disk_is_looked_at_again(
    folder: Path,
) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 64))
        driver.ask("KV.PREFIX.SAVE")
        (segment,) = driver.store.segments.segments.values()
        before = driver.store.space.disk_bytes()
        os.pwrite(segment.file.fd, bytes(64 * KIB), segment.size)
        segment.resized()
        grown = segment.path.stat().st_blocks * 512
        assert segment.disk_bytes() == grown
        assert driver.store.space.disk_bytes() > before


def test_rows_are_written_to_their_file_off_the_event_loop(folder: Path) -> None:
    """A disk that lets writers wait would stop every other client."""
    seen, real = set(), os.pwritev

    def pwritev(*args: Any) -> int:
        seen.add(threading.current_thread() is threading.main_thread())
        return real(*args)

    with Driver(folder) as driver, mock.patch.object(os, "pwritev", pwritev):
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 64))
        driver.ask(*rows("a_pk", 0, 64, 700))
    assert seen == {False}
