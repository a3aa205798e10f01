"""A disk without room: a refusal in words, nothing half-visible, and room again afterwards."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import RunningServer, free_port_block
from tests.hostile.conftest import StartServer
from tests.hostile.watching import eventually
from tests.server.wire import Refusal, Wire, fingerprint, settle
from tests.small_disk import fill

DISK_BYTES = 24 << 20
WIDTH = 256
ROW_BYTES = WIDTH * 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 24 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def random_rows(megabytes: float) -> tuple[int, bytes]:
    rows = int(megabytes * (1 << 20)) // ROW_BYTES
    return rows, np.random.default_rng(rows).bytes(rows * ROW_BYTES)


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def refused_for_want_of_space(wire: Wire, *words: bytes | str | int) -> None:
    before = fingerprint(wire)
    answer, pong = wire.together(words, ("PING",))
    assert isinstance(answer, Refusal) and answer.startswith("ERR "), (words[:4], answer)
    assert "No space left" in answer or "space" in answer.lower(), answer
    assert pong == "PONG"
    assert fingerprint(wire) == before


def test_a_store_that_does_not_fit_is_refused_and_leaves_no_trace(
    start_server: StartServer, small_disk: Path
) -> None:
    server = start_server(folder=small_disk / "data")
    with Wire.tcp(server.port) as wire:
        for ns in ("a", "b"):
            wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, "fp16", "HEADS", 4)
        kept_rows, kept = random_rows(10)
        wire.ok("V.STOREBATCH", "a_pk", 0, 0, kept_rows, kept, "FMT", "F16")
        settle(wire)
        room = free_bytes(small_disk)
        rows, blob = random_rows(30)
        for sid in ("a_pk", "b_pk"):
            store = ("V.STOREBATCH", sid, 1, 0, rows, blob)
            # straight into its segment, after a wrong guess at the layout, through a spool
            refused_for_want_of_space(wire, *store, "FMT", "STORED", "LAYOUT", "HND")
            refused_for_want_of_space(wire, *store, "FMT", "F16")
            half, floats = rows // 2, blob
            refused_for_want_of_space(wire, "V.STOREBATCH", sid, 1, 0, half, floats)
            assert wire.ask("V.FETCH", sid, 1, "RANGE", 0, 1) is None
        refused_for_want_of_space(wire, "SSM.PREFIX.STORE", "b", 0, blob)
        assert wire.ask("SSM.PREFIX.FETCH", "b", 0) is None
        assert eventually(lambda: free_bytes(small_disk) >= room - (1 << 20)), (
            room,
            free_bytes(small_disk),
        )
        # the server lives, and what fits is stored
        rows, blob = random_rows(8)
        wire.ok("V.STOREBATCH", "b_pk", 1, 0, rows, blob, "FMT", "F16")
        assert wire.ask("V.FETCH", "b_pk", 1, "RANGE", 0, rows, "FMT", "NATIVE") == blob
        assert wire.ask("V.FETCH", "a_pk", 0, "RANGE", 0, kept_rows, "FMT", "NATIVE") == kept
        assert wire.ask("KV.PREFIX.DROP", "a") == 1
        wire.ok("V.STOREBATCH", "b_pk", 2, 0, rows, blob, "FMT", "F16")
    server.restart()
    with Wire.tcp(server.port) as wire:
        assert wire.ask("V.FETCH", "b_pk", 2, "RANGE", 0, rows, "FMT", "NATIVE") == blob
        assert wire.ask("KV.PREFIX.LOOKUP", "a") == "MISS"


def test_a_log_that_cannot_grow_refuses_and_recovers(
    start_server: StartServer, small_disk: Path
) -> None:
    server = start_server(folder=small_disk / "data")
    ballast = small_disk / "ballast"
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "a", WIDTH, "fp16")
        row = np.random.default_rng(0).bytes(ROW_BYTES * 7)
        for start in range(0, 28, 7):
            wire.ok("V.STOREBATCH", "a_pk", 0, start, 7, row, "FMT", "F16")
        with ballast.open("wb") as out:
            out.write(bytes(free_bytes(small_disk) - 8192))
        stored = 0
        while True:
            answer = wire.ask("V.STOREBATCH", "a_pk", 1, stored, 7, row, "FMT", "F16")
            if isinstance(answer, Refusal):
                break
            stored += 7
        for _ in range(3):
            refused_for_want_of_space(
                wire, "V.STOREBATCH", "a_pk", 1, stored, 7, row, "FMT", "F16"
            )
            refused_for_want_of_space(wire, "SSM.PREFIX.STORE", "a", 0, row)
        for words in (("KV.PREFIX.SAVE",), ("KV.PREFIX.MAP", "a")):
            answer = wire.ask(*words)
            assert isinstance(answer, Refusal), answer
        answer = wire.ask("V.EXPORT", "a_pk", "a_pk", 0, 28, 1, 1, WIDTH)
        assert isinstance(answer, Refusal) and "space" in answer.lower()
        assert wire.ask("V.FETCH", "a_pk", 0, 5) is not None
        assert wire.ask("KV.PREFIX.LOOKUP", "a") == "HIT"
        ballast.unlink()
        wire.ok("V.STOREBATCH", "a_pk", 1, stored, 7, row, "FMT", "F16")
        wire.ok("KV.PREFIX.SAVE")
        assert isinstance(wire.ask("KV.PREFIX.MAP", "a"), bytes)
    server.restart()
    with Wire.tcp(server.port) as wire:
        expected = row * (stored // 7 + 1)
        count = stored + 7
        assert wire.ask("V.FETCH", "a_pk", 1, "RANGE", 0, count, "FMT", "NATIVE") == expected


def until_nothing_is_logged(wire: Wire, name: str) -> None:
    """No record as short as this one fits any more."""
    for words in itertools.cycle((("KV.PREFIX.PIN", name), ("KV.PREFIX.UNPIN", name))):
        answer = wire.ask(*words)
        if isinstance(answer, Refusal):
            assert "No space left" in answer
            return


@pytest.mark.parametrize("flags", [(), ("-w", "2", "--independent-workers")], ids=["one", "two"])
def test_dropping_relieves_a_disk_without_any_room(small_disk: Path, flags: tuple[str]) -> None:
    server = RunningServer(free_port_block(), small_disk / "data", flags)
    server.dir.mkdir()
    names = [f"n{number}" for number in range(8)]
    rows, blob = random_rows(0.5)
    try:
        server.start()
        with Wire.tcp(server.port + 2) as wire:
            for name in names:
                wire.ok("KV.PREFIX.REGISTER", name, WIDTH, "fp16")
                wire.ok("V.STOREBATCH", f"{name}_pk", 0, 0, rows, blob, "FMT", "F16")
                wire.ok("SSM.PREFIX.STORE", name, 65535, b"complete")
            for name in names[:6]:
                # again and again: others take what each drop gives back
                fill(small_disk / f"ballast {name}")
                until_nothing_is_logged(wire, names[-1])
                refused_for_want_of_space(wire, "KV.PREFIX.REGISTER", "new", WIDTH, "fp16")
                before = free_bytes(small_disk)
                assert wire.ask("KV.PREFIX.DROP", name) == 1
                assert wire.ask("KV.PREFIX.LOOKUP", name) == "MISS"
                assert free_bytes(small_disk) > before + len(blob) // 2
            wire.ok("KV.PREFIX.REGISTER", "new", WIDTH, "fp16")
        server.kill()
        for ballast in small_disk.glob("ballast*"):
            ballast.unlink()
        server.start()
        with Wire.tcp(server.port + 2) as wire:
            for name in names[:6]:
                assert wire.ask("KV.PREFIX.LOOKUP", name) == "MISS"
                assert wire.ask("SSM.PREFIX.FETCH", name, 65535) is None
            for name in (*names[6:], "new"):
                assert wire.ask("KV.PREFIX.LOOKUP", name) == "HIT"
        assert not list(server.dir.glob("*.tmp"))
    finally:
        server.stop()
