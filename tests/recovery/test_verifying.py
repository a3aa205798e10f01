"""Rows are verified once, and what comes to them later is, too."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from pion_vllm_mlx.server.store.index import InSegment, Session
from pion_vllm_mlx.server.store.records import Record
from pion_vllm_mlx.server.store.sharing import Pair
from tests.recovery.driving import Driver, refused
from tests.recovery.material import rows, store_all
from tests.recovery.twins import prefix

FETCH = ("V.FETCH", "a_pk", 0, "RANGE", 0, 8, "FMT", "STORED")


def _never(*_: object) -> NoReturn:
    raise AssertionError("looked at what was verified")


def test_a_session_that_was_verified_is_not_looked_at_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Driver(folder) as driver:
        store_all(driver, "a")
    with Driver(folder) as driver:
        first = [driver.ask(*FETCH) for _ in range(2)]
        with monkeypatch.context() as patched:
            patched.setattr(Session, "runs", _never)
            patched.setattr(Session, "segments", _never)
            assert [driver.ask(*FETCH) for _ in range(2)] == first
        driver.ask(*rows("a_pk", 0, 13, 5))
        assert driver.ask("V.FETCH", "a_pk", 0, "RANGE", 13, 18, "FMT", "STORED", "LAYOUT", "HND")


def test_rows_of_another_file_that_come_to_a_verified_session_are_verified(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "ab":
            prefix(driver, name)
            driver.ask("KV.PREFIX.MAP", name)
    with Driver(folder) as driver:
        state = driver.store.state
        of_a, of_b = state.sessions[b"a_pk"], state.sessions[b"b_pk"]
        for _ in range(2):
            driver.ask("V.FETCH", "b_pk", 0, "RANGE", 0, 8, "FMT", "STORED")
        (run,), (original,) = of_b.layers[0].runs(), of_a.layers[0].runs()

        def build() -> list[Record]:
            return list(Pair(0, of_b, run, of_a, original).effect(state))

        driver.loop.run_until_complete(driver.store.commit(build, copied=True))
        assert isinstance(original.place, InSegment)
        with original.place.segment.path.open("r+b") as file:
            file.seek(8)
            file.write(b"?")
        assert "did not verify" in refused(
            driver, "V.FETCH", "b_pk", 0, "RANGE", 0, 8, "FMT", "STORED"
        )
