"""What COMMIT acknowledged outlives a power cut that comes while others store short runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from unittest import mock

from pion_vllm_mlx.server.store.segment import SUFFIX, Segment
from pion_vllm_mlx.server.store.segments import SegmentFolder
from tests.recovery.driving import Driver
from tests.recovery.material import register, rows

#: rows of 128 bytes: a run of 8 KiB
RUN_ROWS = 64


class Disk:
    """How much of each file is on stable storage: what it had when it was last flushed."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._real = os.fsync

    def fsync(self, fd: int) -> None:
        """Flush, and remember how long the file was before."""
        before = os.fstat(fd)
        self._real(fd)
        self.sizes[before.st_ino] = before.st_size

    def cut_power(self, folder: Path) -> None:
        """Rows and records end where they ended at their last flush."""
        for path in folder.rglob("*"):
            if path.name.endswith(SUFFIX) or ".wal" in path.name:
                found = path.stat()
                os.truncate(path, min(found.st_size, self.sizes.get(found.st_ino, 0)))


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


def test_the_end_of_a_store_leaves_nothing_to_flush(folder: Path) -> None:
    with committed(folder) as driver:
        driver.ask(*rows("a_pk", 0, RUN_ROWS, RUN_ROWS))
        expected = driver.content()
        driver.loop.run_until_complete(driver.store.close())
    with Driver(folder) as driver:
        assert driver.content() == expected
