"""Limits on sessions and on disk: who leaves, what goes along, and that it stays gone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Wire, refuse

WIDTH = 256
MEGABYTE = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    one = RunningServer(free_port_block(), tmp_path / "data")
    try:
        yield one
    finally:
        one.stop()


def register(wire: Wire, *names: str) -> None:
    for name in names:
        wire.ok("KV.PREFIX.REGISTER", name, WIDTH, "fp16")


def store(wire: Wire, name: str, megabytes: float) -> bytes:
    """Rows for the K side; both sides exist."""
    register(wire, name)
    rows = int(megabytes * MEGABYTE) // (WIDTH * 2)
    blob = np.random.default_rng(rows).bytes(rows * WIDTH * 2)
    wire.ok("V.STOREBATCH", name + "_pk", 0, 0, rows, blob, "FMT", "F16")
    return blob


def held(wire: Wire, names: str) -> str:
    """Those of the namespaces that are there; looking them up does not touch them."""
    verdicts = {name: json.loads(wire.ask("KV.PREFIX.EXPLAIN", name)) for name in names}
    return "".join(name for name in names if verdicts[name]["verdict"] == "hit")


def test_the_least_recently_used_session_leaves_and_stays_gone(server: RunningServer) -> None:
    server.start("--max-sessions", "6")
    with Wire.tcp(server.port) as wire:
        register(wire, "a", "b", "c")
        for name in "abc":
            wire.ok("SSM.PREFIX.STORE", name, 65_535, b"complete")
            for side in ("_pk", "_pv"):
                wire.ok("V.STOREBATCH", name + side, 0, 0, 1, bytes(WIDTH * 4))
        assert wire.info("KV.PREFIX.INFO")["vstore_max_sessions"] == "6"
        # a LOOKUP hit, a fetch, a store and REGISTER each count as an access
        assert wire.ask("KV.PREFIX.LOOKUP", "a") == "HIT"
        register(wire, "d")
        assert held(wire, "abcd") == "acd"
        assert wire.info("KV.PREFIX.INFO")["vstore_evictions"] == "2"
        assert wire.ask("SSM.PREFIX.FETCH", "b", 65_535) is None
        for sid in ("c_pk", "c_pv"):
            assert wire.ask("V.FETCH", sid, 0, "RANGE", 0, 1) == bytes(WIDTH * 4)
        register(wire, "e")
        assert held(wire, "acde") == "cde"
        register(wire, "d")
        for sid in ("c_pk", "c_pv"):
            wire.ok("V.STOREBATCH", sid, 0, 0, 1, bytes(WIDTH * 4))
        register(wire, "f")
        assert held(wire, "cdef") == "cdf"
        assert "evicted" in json.loads(wire.ask("KV.PREFIX.EXPLAIN", "e"))["reason"]
        # one side alone is no hit
        assert wire.ask("V.CREATE", "one", 4) >= 0
        assert held(wire, "cdf") == "cf"
    server.restart("--max-sessions", "6")
    with Wire.tcp(server.port) as wire:
        assert held(wire, "abcdef") == "cf"
        assert wire.ask("SSM.PREFIX.FETCH", "b", 65_535) is None
        assert int(wire.info("KV.PREFIX.INFO")["vstore_sessions"]) == 6


def test_a_full_table_never_refuses(server: RunningServer) -> None:
    server.start("--max-sessions", "2")
    with Wire.tcp(server.port) as wire:
        for number in range(50):
            register(wire, f"n{number}")
            wire.ok("V.STOREBATCH", f"n{number}_pk", 0, 0, 1, bytes(WIDTH * 4))
            wire.ok("V.STOREBATCH", f"n{number}_pv", 0, 0, 1, bytes(WIDTH * 4))
            assert wire.ask("KV.PREFIX.LOOKUP", f"n{number}") == "HIT"
        info = wire.info("KV.PREFIX.INFO")
        assert info["vstore_sessions"] == "2" and info["vstore_evictions"] == "98"


def test_the_disk_budget_holds_and_what_left_stays_gone(server: RunningServer) -> None:
    budget = 10 * MEGABYTE
    flags = ("--disk-budget", f"{budget}b")
    server.start(*flags)
    with Wire.tcp(server.port) as wire:
        for number in range(12):
            name = "abcdefghijkl"[number]
            store(wire, name, 2.5)
            wire.ok("SSM.PREFIX.STORE", name, 65_535, b"complete")
            assert wire.ask("KV.PREFIX.LOOKUP", "a") == "HIT"
            assert int(wire.info("KV.PREFIX.INFO")["vstore_disk_bytes"]) <= budget + MEGABYTE
        there = held(wire, "abcdefghijkl")
        assert there.startswith("a") and there.endswith("l") and 3 <= len(there) <= 4
        gone = [name for name in "abcdefghijkl" if name not in there]
        for name in gone:
            assert wire.ask("SSM.PREFIX.FETCH", name, 65_535) is None
        assert "evicted" in json.loads(wire.ask("KV.PREFIX.EXPLAIN", gone[0]))["reason"]
    server.restart(*flags)
    with Wire.tcp(server.port) as wire:
        assert held(wire, "abcdefghijkl") == there
        for name in gone:
            assert wire.ask("SSM.PREFIX.FETCH", name, 65_535) is None


def test_the_disk_budget_counts_all_of_a_file_that_was_sealed_after_several_runs(
    server: RunningServer,
) -> None:
    budget, runs = 4 * MEGABYTE, 4
    server.start("--disk-budget", str(budget))
    with Wire.tcp(server.port) as wire:
        rows = MEGABYTE // 8 // (WIDTH * 2)
        for index in range(16):
            name = f"n{index}"
            register(wire, name)
            for run in range(runs):
                blob = np.random.default_rng(run).bytes(rows * WIDTH * 2)
                sid = name + ("_pk", "_pv")[run % 2]
                wire.ok("V.STOREBATCH", sid, 0, run // 2 * rows, rows, blob, "FMT", "F16")
            assert wire.ask("KV.PREFIX.MAP", name)  # seals
            files = server.dir.rglob("*.safetensors")
            assert sum(path.stat().st_blocks * 512 for path in files) <= budget
        assert wire.info("KV.PREFIX.INFO")["vstore_evictions"] != "0"


@pytest.mark.parametrize("megabytes", [4.5, 11])
def test_what_can_never_fit_is_refused_and_evicts_nobody(
    server: RunningServer, megabytes: float
) -> None:
    server.start("--disk-budget", "4m")
    with Wire.tcp(server.port) as wire:
        kept = store(wire, "a", 1)
        register(wire, "b")
        rows = int(megabytes * MEGABYTE) // (WIDTH * 2)
        blob = bytes(rows * WIDTH * 2)
        refuse(wire, "budget", "V.STOREBATCH", "b_pk", 0, 0, rows, blob, "FMT", "F16")
        refuse(wire, "budget", "V.STOREBATCH", "b_pk", 0, 0, rows, blob * 2)
        refuse(wire, "budget", "SSM.PREFIX.STORE", "b", 0, blob)
        rows = len(kept) // (WIDTH * 2)
        assert wire.ask("V.FETCH", "a_pk", 0, "RANGE", 0, rows, "FMT", "NATIVE") == kept
        assert wire.ask("V.FETCH", "b_pk", 0, "RANGE", 0, 1) is None
        assert wire.info("KV.PREFIX.INFO")["vstore_evictions"] == "0"


def test_after_a_start_with_fewer_sessions_allowed_the_oldest_leave(
    server: RunningServer,
) -> None:
    server.start("--max-sessions", "20")
    with Wire.tcp(server.port) as wire:
        for number in range(10):
            wire.ok("KV.PREFIX.REGISTER", f"n{number}", 4, "fp32")
        assert wire.ask("KV.PREFIX.LOOKUP", "n0") == "HIT"
    server.restart("--max-sessions", "4")
    with Wire.tcp(server.port) as wire:
        ends_at = time.monotonic() + 20
        while wire.info("KV.PREFIX.INFO")["vstore_sessions"] != "4":
            assert time.monotonic() < ends_at
            time.sleep(0.02)
    server.restart("--max-sessions", "20")
    with Wire.tcp(server.port) as wire:
        hits = [n for n in range(10) if wire.ask("KV.PREFIX.LOOKUP", f"n{n}") == "HIT"]
        assert hits == [8, 9]


def test_an_export_goes_with_its_evicted_session(server: RunningServer) -> None:
    server.start("--max-sessions", "2")
    with Wire.tcp(server.port) as wire:
        store(wire, "a", 0.1)
        wire.ok("V.STOREBATCH", "a_pv", 0, 0, 1, bytes(WIDTH * 4))
        answer = wire.ask("V.EXPORT", "a_pk", "a_pv", 0, 1, 1, 4, WIDTH // 4)
        path = Path(answer.decode())
        assert path.exists()
        register(wire, "b")
        assert not path.exists()
