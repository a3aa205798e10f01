"""INFO counts what is asked for, and keys with deadlines without looking at each."""

from __future__ import annotations

import random

from pion_vllm_mlx.server.keyspace.changes import Verb, change
from pion_vllm_mlx.server.keyspace.data import Data, Entry
from tests.server.wire import Wire


def test_keys_and_deadlines_are_counted_as_looking_at_each_would() -> None:
    rng = random.Random(3)
    data, names = Data(), [b"%d" % number for number in range(12)]
    for _ in range(5000):
        key, other = rng.sample(names, 2)
        there = key in data.entries
        match rng.randrange(9):
            case 0 | 1:
                data.apply(change(Verb.SET, key, b"v"))
            case 2 | 3 | 4 if there:
                deadline = rng.choice([0, rng.randrange(1, 200)])
                data.apply(change(Verb.DEADLINE, key, b"%d" % deadline))
            case 5:
                data.apply(change(Verb.DELETE, key, other))
            case 6 if there:
                data.apply(change(Verb.RENAME, key, other))
            case 7 if not there:
                data.apply(change(Verb.SADD, key, b"m"))
                data.apply(change(Verb.DEADLINE, key, b"150"))
                data.apply(change(Verb.SREM, key, b"m"))
            case 8 if rng.random() < 0.02:
                data.apply(change(Verb.FLUSH))
        now = rng.randrange(200)
        entries = list(data.entries.values())
        assert data.size(now) == sum(entry.alive(now) for entry in entries)
        assert data.timed(now) == sum(entry.deadline > now for entry in entries)
        if rng.random() < 0.2:
            for dead in data.expired(now, 3):
                data.apply(change(Verb.DELETE, dead))


class _Counted(dict[bytes, Entry]):
    looked_at = 0

    def __getitem__(self, key: bytes) -> Entry:
        self.looked_at += 1
        return super().__getitem__(key)


def test_deadlines_that_are_not_over_are_counted_without_a_look_at_them() -> None:
    data = Data()
    for number in range(1000):
        data.apply(change(Verb.SET, b"%d" % number, b"v"))
        data.apply(change(Verb.DEADLINE, b"%d" % number, b"%d" % (5 if number < 3 else 100)))
    counted = _Counted(data.entries)
    data.entries = counted
    assert data.timed(50) == 997
    assert counted.looked_at < 20


def test_info_of_a_section_is_that_section(wire: Wire) -> None:
    wire.ok("SET", "k", "v", "EX", 100)
    wire.ok("SET", "l", "v")
    assert wire.info("INFO", "keyspace") == {"db0": "keys=2,expires=1,avg_ttl=0"}
    assert "db0" not in wire.info("INFO", "server")
    assert wire.info("INFO")["db0"] == "keys=2,expires=1,avg_ttl=0"
