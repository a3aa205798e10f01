"""Plain keys on a disk without room: what only takes away goes through, and stays gone."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.keyspace.changes import Verb, change
from tests.conftest import RunningServer, free_port_block
from tests.keyspace.test_durable import Keys
from tests.server.wire import Refusal, Wire, Word, request
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


@pytest.mark.parametrize("padding", [0, 5])
def test_when_deletions_have_used_up_their_room_flushing_gives_everything_back(
    server: RunningServer, padding: int
) -> None:
    names = [f"{'x' * padding}{number:06}" for number in range(4000)]
    with Wire.tcp(server.port) as wire:
        wire.send(b"".join(request("SET", name, bytes(1000)) for name in names))
        assert [wire.reply() for _ in names] == ["OK"] * len(names)
        fill_up(server, wire)
        gone = 0
        while (answer := wire.ask("DEL", names[gone])) == 1:
            gone += 1
        assert is_full(answer) and gone > 1000
        wire.ok("FLUSHALL")
        assert free_bytes(server) > 3 << 20
        wire.ok("SET", "more", "v")
    server.restart()
    with Wire.tcp(server.port) as wire:
        assert wire.ask("KEYS", "*") == [b"more"]


def test_what_is_deleted_is_answered_though_the_disk_cannot_be_asked_for_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: object) -> os.statvfs_result:
        raise OSError(errno.EIO, "Input/output error")

    saves: list[bool] = []
    with small_disk(tmp_path / "small", 4 << 20) as disk:
        (disk / "data").mkdir()
        with Keys(disk / "data") as keys:
            keys.keyspace.on_saved = lambda: saves.append(True)
            keys.do([change(Verb.SET, b"%d" % number, LONG[:1000]) for number in range(1000)])
            fill(disk / "ballast")
            with pytest.raises(CommandError, match="No space left"):
                for _ in range(10_000):
                    keys.do([change(Verb.SET, b"s", b"x")])
            with monkeypatch.context() as patch:
                patch.setattr(os, "statvfs", refused)
                for number in range(500):
                    keys.do([change(Verb.DELETE, b"%d" % number)])
            for number in range(500, 900):
                keys.do([change(Verb.DELETE, b"%d" % number)])
            assert not saves, "what lives did not fit, and nothing was saved"
            keys.do([change(Verb.FLUSH)])
            assert saves == [True]
