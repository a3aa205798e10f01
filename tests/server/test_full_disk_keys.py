"""Plain keys on a disk without room: what only takes away goes through, and stays gone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Refusal, Wire, Word
from tests.small_disk import fill, small_disk

DISK_BYTES = 24 << 20
LONG = bytes(1 << 20)

#: a key that takes a megabyte, and the command that takes it away
DELETIONS: dict[str, tuple[tuple[Word, ...], tuple[Word, ...]]] = {
    "del": (("SET", "long", LONG), ("DEL", "long")),
    "unlink": (("SET", "long", LONG), ("UNLINK", "long")),
    "expire": (("SET", "long", LONG), ("EXPIRE", "long", -1)),
    "hash": (("HSET", "long", "field", LONG), ("HDEL", "long", "field")),
    "set": (("SADD", "long", LONG), ("DEL", "long")),
    "sorted set": (("ZADD", "long", 1, "m" + "x" * 60_000), ("ZREM", "long", "m" + "x" * 60_000)),
    "left": (("RPUSH", "long", LONG), ("LPOP", "long")),
    "right": (("RPUSH", "long", LONG), ("RPOP", "long")),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    """A server on a disk of 24 MB."""
    with small_disk(tmp_path / "small", DISK_BYTES) as disk:
        running = RunningServer(free_port_block(), disk / "data", ("--appendfsync", "always"))
        running.dir.mkdir()
        try:
            yield running.start()
        finally:
            running.stop()


def free_bytes(server: RunningServer) -> int:
    status = os.statvfs(server.dir)
    return status.f_bavail * status.f_frsize


def ballast(server: RunningServer) -> Path:
    return server.dir.parent / "ballast"


def fill_up(server: RunningServer, wire: Wire) -> None:
    """Leave no room for a record, however short."""
    fill(ballast(server))
    for _ in range(10_000):
        if is_full(wire.ask("SET", "s", "x")):
            return
    raise AssertionError("the disk does not fill up")


def is_full(answer: object) -> bool:
    return isinstance(answer, Refusal) and "No space left" in answer


def test_whatever_deletes_relieves_a_disk_without_any_room(server: RunningServer) -> None:
    with Wire.tcp(server.port) as wire:
        wire.ok("SET", "kept", "v")
        # again and again: others take what each deletion gives back
        for name, (store, delete) in DELETIONS.items():
            assert not isinstance(wire.ask(*store), Refusal), name
            fill_up(server, wire)
            before = free_bytes(server)
            assert is_full(wire.ask("SET", "more", "v")), name
            assert not isinstance(wire.ask(*delete), Refusal), name
            assert wire.ask("EXISTS", "long") == 0
            assert free_bytes(server) >= before + (48 << 10), name
            wire.ok("SET", "more", name)
            ballast(server).unlink()
        fill_up(server, wire)
    server.restart()
    with Wire.tcp(server.port) as wire:
        assert sorted(wire.ask("KEYS", "*")) == [b"kept", b"more", b"s"]
        assert wire.ask("GET", "more") == name.encode()


def test_a_deletion_stays_though_what_lives_is_too_long_to_be_saved_beside_it(
    server: RunningServer,
) -> None:
    names = [f"long{number}" for number in range(8)]
    with Wire.tcp(server.port) as wire:
        for name in names:
            wire.ok("SET", name, LONG)
        fill_up(server, wire)
        assert wire.ask("MULTI") == "OK" and wire.ask("DEL", names[0]) == "QUEUED"
        assert wire.ask("SET", "more", "v") == "QUEUED"
        assert is_full(wire.ask("EXEC")), "what stores has no reserve"
        for name in names[:4]:
            assert wire.ask("DEL", name) == 1
    server.restart()
    with Wire.tcp(server.port) as wire:
        assert wire.ask("EXISTS", *names[:4]) == 0
        assert wire.ask("EXISTS", *names[4:], "s") == 5


def test_the_last_key_that_goes_takes_the_log_along(server: RunningServer) -> None:
    names = [f"long{number}" for number in range(8)]
    with Wire.tcp(server.port) as wire:
        for name in names:
            wire.ok("SET", name, LONG)
        fill_up(server, wire)
        for name in names:
            assert wire.ask("DEL", name) == 1
        assert free_bytes(server) > 7 * len(LONG)
        wire.ok("SET", names[0], LONG)
