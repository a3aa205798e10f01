"""What COMMIT acknowledged outlives a power cut that comes while others store short runs."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.segment import SUFFIX, Segment
from pion_vllm_mlx.server.store.segments import SegmentFolder
from tests.recovery.driving import Driver, Options
from tests.recovery.material import register, rows, state
from tests.recovery.test_save_in_steps import Held
from tests.recovery.test_save_moment import until

#: rows of 128 bytes: a run of 8 KiB
RUN_ROWS = 64


class Disk:
    """What of each file is on stable storage: what it held when it was last flushed."""

    def __init__(self) -> None:
        self.flushed: dict[int, bytes] = {}
        self._real = os.fsync

    def fsync(self, fd: int) -> None:
        """Flush, and remember what the file held before."""
        before = os.fstat(fd)
        held = os.pread(fd, before.st_size, 0) if stat.S_ISREG(before.st_mode) else b""
        self._real(fd)
        self.flushed[before.st_ino] = held

    def cut_power(self, folder: Path) -> None:
        """Rows, headers and records are what they were at their last flush."""
        for path in folder.rglob("*"):
            if path.name.endswith(SUFFIX) or ".wal" in path.name:
                path.write_bytes(self.flushed.get(path.stat().st_ino, b""))


@contextmanager
def storing_behind_each_flush(driver: Driver) -> Iterator[list[int]]:
    """Once segments are flushed, and before anything else is, the next run comes if it can."""
    starts, stored = count(RUN_ROWS, RUN_ROWS), []
    real = SegmentFolder.flush

    def flush(folder: SegmentFolder, segments: Iterable[Segment] | None = None) -> None:
        real(folder, segments)
        if not driver.store.write_lock.locked():  # else it waits for the lock
            stored.append(next(starts))
            turn = driver._ask(rows("a_pk", 0, stored[-1], RUN_ROWS))
            asyncio.run_coroutine_threadsafe(turn, driver.loop).result(60)

    with mock.patch.object(SegmentFolder, "flush", flush):
        yield stored


@contextmanager
def committed(folder: Path) -> Iterator[Driver]:
    """A store whose namespace ``a`` a COMMIT has acknowledged; then the power is cut."""
    disk = Disk()
    with mock.patch.object(os, "fsync", disk.fsync), Driver(folder) as driver:
        driver.ask(*register("a"))
        for side in ("_pk", "_pv"):
            driver.ask(*rows("a" + side, 0, 0, RUN_ROWS))
        assert driver.ask("KV.PREFIX.COMMIT") == "OK"
        yield driver
    disk.cut_power(folder)


def test_a_flushed_log_names_no_rows_that_are_not_flushed(folder: Path) -> None:
    with committed(folder) as driver:
        with storing_behind_each_flush(driver) as stored:
            driver.ask("KV.PREFIX.COMMIT")
        assert stored
        expected = driver.content()
    with Driver(folder) as driver:
        assert not driver.store.replayed.notes
        assert driver.content() == expected


def test_a_log_that_a_save_shortens_names_no_rows_that_are_not_flushed(folder: Path) -> None:
    with committed(folder) as driver:
        driver.store.space.owed = 1  # so that short logs are saved, too
        with storing_behind_each_flush(driver) as stored:
            driver.loop.run_until_complete(driver.store.save_in_steps())
        assert stored and driver.store.paths.vstore.exists()
        expected = driver.content()
    with Driver(folder) as driver:
        assert not driver.store.replayed.notes
        assert driver.content() == expected


def test_a_snapshot_tells_of_no_seal_that_is_not_flushed(folder: Path) -> None:
    with committed(folder) as driver:
        saver = driver.store.saver
        seal_in_steps, publish, flush = saver._seal_in_steps, saver._publish, SegmentFolder.flush

        async def stored_behind_it() -> None:
            await seal_in_steps()
            await driver._ask(rows("a_pk", 0, RUN_ROWS, RUN_ROWS))
            assert await driver._ask(("KV.PREFIX.COMMIT",)) == "OK"

        def mapped_behind_it(folder: SegmentFolder) -> None:
            flush(folder)
            answer = driver._ask(("KV.PREFIX.MAP", "a"))
            asyncio.run_coroutine_threadsafe(answer, driver.loop).result(60)

        def published(*given: Any) -> None:
            with mock.patch.object(SegmentFolder, "flush", mapped_behind_it):
                publish(*given)
            raise OSError("the power is cut")

        with (
            mock.patch.object(saver, "_seal_in_steps", stored_behind_it),
            mock.patch.object(saver, "_publish", published),
            pytest.raises(CommandError),
        ):
            driver.ask("KV.PREFIX.SAVE")
        assert driver.store.paths.vstore.exists()
        assert all(session.published for session in driver.store.state.sessions.values())
        expected = driver.content()
    with Driver(folder) as driver:
        assert driver.content() == expected


@pytest.mark.parametrize("what", ["dropped", "replaced"])
def test_without_logs_a_save_flushes_also_what_goes_while_it_is_written(
    folder: Path, what: str
) -> None:
    disk = Disk()
    with mock.patch.object(os, "fsync", disk.fsync), Driver(folder, Options(wal=False)) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, RUN_ROWS))
        driver.ask("KV.PREFIX.SAVE")
        driver.ask(*state("a", 0, 70_000))
        expected = driver.content()
        driver.ask("SSM.PREFIX.DROP", "a", 0)
        saver = driver.store.saver
        seal_in_steps = saver._seal_in_steps

        async def stored_behind_it() -> None:
            await seal_in_steps()
            await driver._ask(state("a", 0, 70_000))

        async def both() -> None:
            with Held(driver) as held, mock.patch.object(saver, "_seal_in_steps", stored_behind_it):
                saving = asyncio.ensure_future(driver._ask(("KV.PREFIX.SAVE",)))
                await until(held.reached)
                drop = ("SSM.PREFIX.DROP", "a", 0)
                await driver._ask(drop if what == "dropped" else state("a", 0, 70_000, salt=1))
            assert await saving == "OK"

        driver.loop.run_until_complete(both())
        disk.cut_power(folder)
        left = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path, content in left.items():  # what the store did as it ended never reached the disk
        path.write_bytes(content)
    with Driver(folder, Options(wal=False)) as driver:
        assert driver.content() == expected


def test_the_end_of_a_store_leaves_nothing_to_flush(folder: Path) -> None:
    with committed(folder) as driver:
        driver.ask(*rows("a_pk", 0, RUN_ROWS, RUN_ROWS))
        expected = driver.content()
        driver.loop.run_until_complete(driver.store.close())
    with Driver(folder) as driver:
        assert driver.content() == expected
