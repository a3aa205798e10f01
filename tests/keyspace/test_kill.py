"""Keys of a whole server that is killed, saved, damaged and repaired."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from tests.conftest import RunningServer
from tests.keyspace.test_durable import WAL, flip
from tests.server.wire import Wire


def test_keys_of_every_kind_survive_a_kill_and_a_save(pion_server: RunningServer) -> None:
    def answers() -> list[Any]:
        with Wire.tcp(pion_server.port) as wire:
            return [
                wire.ask("GET", "s"),
                wire.ask("HGETALL", "h"),
                wire.ask("ZRANGE", "z", 0, -1, "WITHSCORES"),
                sorted(wire.ask("SMEMBERS", "set")),
                wire.ask("LRANGE", "l", 0, -1),
                wire.ask("GET", "x"),
                wire.ask("TTL", "s") > 900,
                wire.ask("DBSIZE"),
            ]

    with Wire.tcp(pion_server.port) as wire:
        wire.ok("SET", "s", b"\x01\x02\xff", "EX", "1000")
        wire.ask("HSET", "h", "f", "v", b"\r\n", b"\0")
        wire.ask("ZADD", "z", "0.1", "a", "-inf", "b")
        wire.ask("SADD", "set", "m", "n")
        wire.ask("RPUSH", "l", "1", "2")
        wire.together(("MULTI",), ("SET", "x", "1"), ("INCR", "x"), ("EXEC",))
    before = answers()
    pion_server.restart()
    assert "keyspace log replayed: 6 records" in pion_server.output()
    assert answers() == before
    with Wire.tcp(pion_server.port) as wire:
        wire.ok("SAVE")
        assert wire.ask("LASTSAVE") > 0
    assert (pion_server.dir / WAL).stat().st_size == 0
    pion_server.restart()
    assert answers() == before
    pion_server.stop()
    pion_server.start()
    assert answers() == before


def test_keys_survive_kills_at_any_moment_of_mixed_writes(pion_server: RunningServer) -> None:
    """Counters of several clients: never behind what was acknowledged, at most one ahead."""
    chance = random.Random(7)
    acknowledged = [0, 0, 0]
    pad = bytes(chance.randrange(256) for _ in range(100_000))

    def work(number: int) -> None:
        try:
            with Wire.tcp(pion_server.port) as wire:
                while True:
                    value = acknowledged[number] + 1
                    wire.together(
                        ("MULTI",),
                        ("SET", f"n{number}", value),
                        ("SET", f"pad{number}", b"%d " % value + pad[: value * 977 % 100_000]),
                        ("HSET", f"h{number}", "f", value),
                        ("EXEC",),
                    )
                    acknowledged[number] = value
                    if number == 0 and value % 20 == 0:
                        wire.ok("SAVE")
        except (OSError, EOFError):
            return

    for _ in range(5):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        threading.Event().wait(chance.uniform(0.05, 0.3))
        pion_server.kill()
        for thread in threads:
            thread.join()
        pion_server.start()
        with Wire.tcp(pion_server.port) as wire:
            for number in range(3):
                value = int(wire.ask("GET", f"n{number}") or 0)
                assert acknowledged[number] <= value <= acknowledged[number] + 1
                if value:
                    assert wire.ask("HGET", f"h{number}", "f") == b"%d" % value
                    assert wire.ask("GET", f"pad{number}").startswith(b"%d " % value)
                acknowledged[number] = value
    assert min(acknowledged) > 5


def test_a_damaged_log_is_refused_by_name_and_repaired_on_demand(
    pion_server: RunningServer,
) -> None:
    with Wire.tcp(pion_server.port) as wire:
        for number in range(3):
            wire.ok("SET", f"k{number}", "v")
    pion_server.kill()
    flip(pion_server.dir / WAL, 60)
    with pytest.raises(RuntimeError, match=f"FATAL {WAL} at 32"):
        pion_server.start()
    pion_server.start("--repair")
    assert "kept as" in pion_server.output()
    with Wire.tcp(pion_server.port) as wire:
        assert wire.ask("KEYS", "*") == []
        wire.ok("SET", "k", "v")
    pion_server.restart()
    with Wire.tcp(pion_server.port) as wire:
        assert wire.ask("GET", "k") == b"v"
