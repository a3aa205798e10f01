"""What a server does by itself goes on after a bug in it, which is told and counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pion_vllm_mlx.server import chores
from pion_vllm_mlx.server.commands.server_info import section_text
from pion_vllm_mlx.tools.stats import added_up, report_lines
from tests.recovery.driving import Driver
from tests.recovery.material import store_all

LIMIT_SECONDS = 20.0


class Buggy:
    """Work with a bug that shows ``times`` times."""

    def __init__(self, work: Callable[[], object], times: int) -> None:
        self.work, self.left = work, times

    def __call__(self) -> object:
        if self.left:
            self.left -= 1
            raise ZeroDivisionError("a bug")
        return self.work()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chores, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(chores, "BUG_REST_SECONDS", 0.05)


def run_until(driver: Driver, reached: Callable[[], bool]) -> bool:
    """Have the server keep house until something is so; whether it came to be."""

    async def run() -> bool:
        tasks = chores.begin(driver.server)
        deadline = time.monotonic() + LIMIT_SECONDS
        while not reached() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        ended = any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return reached() and not ended

    return driver.loop.run_until_complete(run())


def over(driver: Driver, name: str) -> None:
    """A namespace and a key that are past their deadlines, and not dropped yet."""
    driver.ask("KV.PREFIX.REGISTER", name, 4, "fp16")
    driver.ask("KV.PREFIX.EXPIRE", name, 0)
    driver.ask("SET", name, "v", "PX", 1)
    time.sleep(0.005)


@pytest.mark.usefixtures("hurry")
def test_a_duty_that_a_bug_has_ended_is_taken_up_again_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Driver(tmp_path) as driver, caplog.at_level(logging.ERROR):
        server = driver.server
        over(driver, "n")
        monkeypatch.setattr(driver.store, "expire", Buggy(driver.store.expire, 2))
        monkeypatch.setattr(server.keyspace, "reap", Buggy(server.keyspace.reap, 1))
        assert run_until(
            driver, lambda: not (driver.store.state.sessions or server.keyspace.data.entries)
        )
        assert server.housekeeping_errors == 3
        assert "housekeeping_errors:3\r\n" in driver.ask("INFO", "stats")
    told = [record for record in caplog.records if record.exc_info]
    assert [record.levelno for record in told] == [logging.ERROR] * 3
    assert all("ZeroDivisionError: a bug" in caplog.text for _ in told)
    assert "internal error: dropping old prefixes failed" in caplog.text


@pytest.mark.usefixtures("hurry")
def test_a_bug_in_one_duty_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chores, "QUIET_SECONDS", 0.01)
    with Driver(tmp_path) as driver, caplog.at_level(logging.CRITICAL):
        over(driver, "n")
        for name in ("close_retired", "flush_soon", "flush"):
            monkeypatch.setattr(driver.store, name, Buggy(getattr(driver.store, name), 1 << 30))
        monkeypatch.setattr(driver.store.saver, "due", Buggy(lambda: False, 1 << 30))
        driver.store.state.untidy[b"n"] = None
        assert run_until(
            driver, lambda: not (driver.store.state.sessions or driver.store.state.untidy)
        )


class Standing:
    """A connection; ``bug``: looking at it fails."""

    def __init__(self, stalled: bool, bug: bool = False) -> None:
        self._stalled, self._bug, self.aborted = stalled, bug, 0

    def stalled(self, now: float) -> bool:
        if self._bug:
            raise ZeroDivisionError("a bug")
        return self._stalled

    def abort(self) -> None:
        self.aborted += 1


@pytest.mark.usefixtures("hurry")
def test_a_bug_in_the_look_at_one_connection_closes_it_and_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buggy, late, lively = Standing(False, bug=True), Standing(True), Standing(False)
    with Driver(tmp_path) as driver, caplog.at_level(logging.ERROR):
        connections: dict[int, Any] = driver.server.connections
        connections.update({-3: buggy, -2: late, -1: lively})
        assert run_until(driver, lambda: bool(buggy.aborted and late.aborted))
        for number in (-3, -2, -1):
            del connections[number]
        assert driver.server.housekeeping_errors >= 1 and not lively.aborted
    assert "internal error: a connection is closed" in caplog.text


def test_the_bugs_of_all_workers_are_added_up_and_shown() -> None:
    def stats(count: int) -> dict[str, str]:
        text = section_text("Stats", [("workers", 2), ("housekeeping_errors", count)])
        return dict(line.split(":") for line in text.split("\r\n") if ":" in line)

    total = added_up([stats(1), stats(2)])
    assert any("3 times by a bug" in line for line in report_lines("url", total, {}))
    total = added_up([stats(0), stats(0)])
    assert not any("by a bug" in line for line in report_lines("url", total, {}))


@pytest.mark.usefixtures("hurry")
def test_a_file_that_the_disk_kept_goes_by_itself_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chores, "_MEND_SECONDS", 0.01)
    with Driver(tmp_path) as driver:
        store_all(driver, "a")
        with mock.patch("os.unlink", side_effect=OSError(1, "operation not permitted")):
            driver.ask("KV.PREFIX.DROP", "a")
        space, segments = driver.store.space, driver.store.segments
        assert space.disk_bytes() and list(segments.path.iterdir())
        assert run_until(driver, lambda: not list(segments.path.iterdir()))
        assert not segments.undeleted and space.disk_bytes() == 0
