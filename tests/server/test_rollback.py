"""V.SNAPSHOT, V.RESTORE, V.COMMIT on the wire."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import RunningServer
from tests.server.wire import Wire, refuse

WIDTH = 32


def rows(n: int, scale: float = 1, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal((n, WIDTH)) * scale
    return values.astype(np.float32).tobytes()


@pytest.fixture
def sid(wire: Wire, ns: str) -> str:
    """A session with ten rows in layer 0 and four in layer 2."""
    wire.ask("V.CREATE", ns, WIDTH)
    wire.ok("V.STOREBATCH", ns, 0, 0, 10, rows(10))
    wire.ok("V.STOREBATCH", ns, 2, 0, 4, rows(4, seed=1))
    return ns


def test_a_restore_takes_back_what_came_since(wire: Wire, sid: str) -> None:
    before = wire.ask("V.FETCH", sid, "BATCH", 0, 20)
    point = wire.ask("V.SNAPSHOT", sid)
    wire.ok("V.STOREBATCH", sid, 0, 10, 5, rows(5, seed=2))
    wire.ok("V.STOREBATCH", sid, 1, 0, 5, rows(5, seed=3))
    wire.ok("V.RESTORE", sid, point)
    info = wire.info("V.INFO", sid)
    assert (info["layer_0_tokens"], info["layer_2_tokens"]) == ("10", "4")
    assert "layer_1_tokens" not in info
    assert wire.ask("V.FETCH", sid, "BATCH", 0, 20) == before
    assert wire.ask("V.FETCH", sid, 0, 10, 11, 14) is None
    assert wire.ask("V.FETCH", sid, 1, "RANGE", 0, 5) is None
    tail = wire.ask("V.FETCH", sid, 0, "RANGE", 10, 15)
    assert tail == bytes(5 * WIDTH * 4)


def test_rows_written_after_a_restore_replace_the_old_ones_completely(wire: Wire, sid: str) -> None:
    point = wire.ask("V.SNAPSHOT", sid)
    wire.ok("V.STOREBATCH", sid, 0, 10, 50, rows(50, seed=2))
    wire.ok("V.RESTORE", sid, point)
    wire.ok("V.STOREBATCH", sid, 0, 10, 2, rows(2, seed=4))
    assert wire.info("V.INFO", sid)["layer_0_tokens"] == "12"
    wire.ask("V.CREATE", f"{sid}-x", WIDTH)
    wire.ok("V.STOREBATCH", f"{sid}-x", 0, 0, 10, rows(10))
    wire.ok("V.STOREBATCH", f"{sid}-x", 0, 10, 2, rows(2, seed=4))
    both = [wire.ask("V.FETCH", name, 0, "RANGE", 0, 70) for name in (sid, f"{sid}-x")]
    assert both[0] == both[1]


def test_int8_rows_keep_their_precision_over_a_batch_of_a_larger_range(
    wire: Wire, sid: str
) -> None:
    point = wire.ask("V.SNAPSHOT", sid)
    wire.ok("V.STOREBATCH", sid, 0, 10, 5, rows(5, scale=1000, seed=2))
    wire.ok("V.RESTORE", sid, point)
    found = np.frombuffer(wire.ask("V.FETCH", sid, 0, "RANGE", 0, 10), np.float32)
    assert np.abs(found - np.frombuffer(rows(10), np.float32)).max() < 0.02


def test_a_restore_never_grows_a_layer_and_its_point_stays(wire: Wire, sid: str) -> None:
    early = wire.ask("V.SNAPSHOT", sid)
    wire.ok("V.STOREBATCH", sid, 0, 10, 5, rows(5, seed=2))
    late = wire.ask("V.SNAPSHOT", sid)
    for point, count in ((late, "15"), (early, "10"), (late, "10"), (early, "10")):
        wire.ok("V.RESTORE", sid, point)
        assert wire.info("V.INFO", sid)["layer_0_tokens"] == count
    wire.ok("V.STOREBATCH", sid, 0, 10, 5, rows(5, seed=2))
    wire.ok("V.RESTORE", sid, early)
    assert wire.info("V.INFO", sid)["layer_0_tokens"] == "10"


def test_a_commit_makes_a_branch_final(wire: Wire, sid: str) -> None:
    point = wire.ask("V.SNAPSHOT", sid)
    wire.ok("V.STOREBATCH", sid, 0, 10, 5, rows(5, seed=2))
    assert wire.info("V.INFO", sid)["snapshots"] == "1"
    assert wire.ask("V.COMMIT", sid, point) == 1
    assert wire.ask("V.COMMIT", sid, point) == 0
    assert wire.info("V.INFO", sid)["snapshots"] == "0"
    refuse(wire, "unknown snap_id", "V.RESTORE", sid, point)
    assert wire.info("V.INFO", sid)["layer_0_tokens"] == "15"


def test_sixteen_points_live_and_their_numbers_only_grow(wire: Wire, sid: str) -> None:
    points = [wire.ask("V.SNAPSHOT", sid) for _ in range(16)]
    assert points == sorted(set(points)) and points[0] > 0
    refuse(wire, "no free snapshot slot", "V.SNAPSHOT", sid)
    assert wire.ask("V.COMMIT", sid, points[3]) == 1
    assert wire.ask("V.SNAPSHOT", sid) > points[-1]
    wire.ask("V.DROP", sid)
    wire.ask("V.CREATE", sid, WIDTH)
    assert wire.info("V.INFO", sid)["snapshots"] == "0"
    refuse(wire, "unknown snap_id", "V.RESTORE", sid, points[0])
    assert wire.ask("V.SNAPSHOT", sid) > points[-1] + 1


@pytest.mark.parametrize("command", ["V.RESTORE", "V.COMMIT"])
def test_numbers_and_sessions_that_cannot_be_are_refused(
    wire: Wire, sid: str, command: str
) -> None:
    for bad in (0, -1, "abc", "1e3", 99_999_999_999_999_999_999, ""):
        refuse(wire, "snap_id", command, sid, bad)
    refuse(wire, "session not found", command, f"{sid}-never", 1)
    refuse(wire, "session not found", "V.SNAPSHOT", f"{sid}-never")
    refuse(wire, "wrong number of arguments", command, sid)
    refuse(wire, "wrong number of arguments", "V.SNAPSHOT", sid, 1)
    refuse(wire, "unknown snap_id", "V.RESTORE", sid, 1)
    assert wire.ask("V.COMMIT", sid, 1) == 0


def test_commands_sent_together_take_effect_in_their_order(wire: Wire, sid: str) -> None:
    before = wire.ask("V.FETCH", sid, 0, "RANGE", 0, 12)
    (point,) = wire.together(("V.SNAPSHOT", sid))
    long = ("V.STOREBATCH", sid, 0, 10, 5000, rows(5000, seed=5))
    replies = wire.together(
        long,
        ("V.SNAPSHOT", sid),
        ("V.RESTORE", sid, point),
        ("V.FETCH", sid, 0, "RANGE", 0, 12),
        ("V.COMMIT", sid, point),
        ("V.RESTORE", sid, point),
    )
    assert (replies[0], replies[2], replies[4]) == ("OK", "OK", 1)
    assert replies[3] == before
    assert "unknown snap_id" in replies[5]


def test_an_export_of_what_was_taken_back_is_gone(wire: Wire, ns: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, "fp16")
    for side in ("_pk", "_pv"):
        wire.ok("V.STOREBATCH", ns + side, 0, 0, 4, rows(4))
    points = [wire.ask("V.SNAPSHOT", ns + side) for side in ("_pk", "_pv")]
    for side in ("_pk", "_pv"):
        wire.ok("V.STOREBATCH", ns + side, 0, 4, 4, rows(4, seed=1))
    words = ("V.EXPORT", f"{ns}_pk", f"{ns}_pv", 0, 8, 1, 1, WIDTH)
    exported = Path(wire.ask(*words).decode())
    assert exported.exists()
    wire.ok("V.RESTORE", f"{ns}_pk", points[0])
    assert not exported.exists()
    refuse(wire, "only 4 rows", *words)


def test_a_point_is_gone_after_a_restart_and_its_number_is_not_used_again(
    pion_server: RunningServer,
) -> None:
    with Wire.tcp(pion_server.port) as wire:
        wire.ask("V.CREATE", "s", WIDTH)
        wire.ok("V.STOREBATCH", "s", 0, 0, 4, rows(4))
        point = wire.ask("V.SNAPSHOT", "s")
        assert abs(point / 1e6 - time.time()) < 600
        wire.ok("V.STOREBATCH", "s", 0, 4, 4, rows(4))
        wire.ok("V.RESTORE", "s", point)
        kept = wire.ask("V.FETCH", "s", 0, "RANGE", 0, 8)
    pion_server.restart()
    with Wire.tcp(pion_server.port) as wire:
        assert wire.info("V.INFO", "s")["layer_0_tokens"] == "4"
        assert wire.ask("V.FETCH", "s", 0, "RANGE", 0, 8) == kept
        refuse(wire, "unknown snap_id", "V.RESTORE", "s", point)
        assert wire.ask("V.SNAPSHOT", "s") > point
