"""Under a disk budget the whole folder stays within it: logs, snapshots and keys count."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pion_vllm_mlx.server.main import BUDGET_OF_LOGS, LEAST_LOG_BYTES
from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Refusal, Wire
from tests.small_disk import fill, small_disk

MEGABYTE = 1 << 20
WIDTH = 256
ROW_BYTES = WIDTH * 2


def du(folder: Path) -> int:
    """Bytes on disk of everything in a folder, but for what a save is about to replace."""
    total = 0
    for path in folder.rglob("*"):
        if path.name.endswith(".tmp"):
            continue
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:  # a save replaces files
            pass
    return total


def log_bytes(budget: int) -> int:
    """How long a log may get in a busy time."""
    return 4 * max(LEAST_LOG_BYTES, budget // BUDGET_OF_LOGS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    one = RunningServer(free_port_block(), tmp_path / "data")
    try:
        yield one
    finally:
        one.stop()


def store(wire: Wire, name: str, rows: int, seed: int) -> object:
    """K rows of a new prefix; the reply of the store."""
    wire.ok("KV.PREFIX.REGISTER", name, WIDTH, "fp16")
    blob = np.random.default_rng(seed).bytes(rows * ROW_BYTES)
    return wire.ask("V.STOREBATCH", name + "_pk", 0, 0, rows, blob, "FMT", "F16")


#: all below 64 KiB rides in the logs then.
FLUSHED = ("--appendfsync", "always")


@pytest.mark.parametrize(
    ("rows", "times", "flags"),
    [(100, 700, ()), (100, 700, FLUSHED), (4000, 60, ())],
    ids=["short", "in the log", "long"],
)
def test_the_folder_stays_within_the_budget_and_one_log(
    server: RunningServer, rows: int, times: int, flags: tuple[str, ...]
) -> None:
    budget = 24 * MEGABYTE
    server.start("--disk-budget", str(budget), "--max-sessions", "65536", *flags)
    highest = 0
    with Wire.tcp(server.port) as wire:
        for number in range(times):
            assert store(wire, f"n{number}", rows, number) == "OK"
            wire.ok("SSM.PREFIX.STORE", f"n{number}", 65_535, bytes(500))
            wire.ok("SET", f"key{number}", bytes(1000))
            if number % 20 == 0:
                highest = max(highest, du(server.dir))
        highest = max(highest, du(server.dir))
        info = wire.info("INFO", "persistence")
        assert abs(int(info["disk_used_bytes"]) - du(server.dir)) < MEGABYTE
        assert info["disk_budget_bytes"] == str(budget)
        assert wire.info("KV.PREFIX.INFO")["vstore_evictions"] != "0"
        held = int(wire.info("KV.PREFIX.INFO")["vstore_bytes"])
    assert highest <= budget + log_bytes(budget)
    # nor is more thrown out than has to be
    assert held >= budget // 2


@pytest.mark.parametrize("flags", [(), FLUSHED], ids=["in segments", "in the log"])
def test_states_alone_do_not_throw_out_more_than_their_bytes(
    server: RunningServer, flags: tuple[str, ...]
) -> None:
    """Evicted ones may lie in a snapshot until the next save: they are not evicted for twice."""
    budget = 16 * MEGABYTE
    server.start("--disk-budget", str(budget), "--max-sessions", "65536", *flags)
    with Wire.tcp(server.port) as wire:
        for number in range(600):
            name = f"n{number}"
            wire.ok("KV.PREFIX.REGISTER", name, WIDTH, "fp16")
            wire.ok("SSM.PREFIX.STORE", name, 0, np.random.default_rng(number).bytes(50_000))
            if number == 200:
                wire.ok("KV.PREFIX.SAVE")
        prefixes = int(wire.info("KV.PREFIX.INFO")["registered_prefixes"])
        assert 120 <= prefixes <= 340
        assert du(server.dir) <= budget + log_bytes(budget)
        wire.ok("KV.PREFIX.SAVE")
        assert int(wire.info("KV.PREFIX.INFO")["registered_prefixes"]) == prefixes
        assert du(server.dir) <= budget + log_bytes(budget)  # what was sealed got its headers
        wire.ok("SSM.PREFIX.STORE", "n599", 1, bytes(5_000))
        assert du(server.dir) <= budget
        assert int(wire.info("KV.PREFIX.INFO")["registered_prefixes"]) >= 0.9 * prefixes


def begun(name: str, rows: int, sent: int) -> bytes:
    """A store of rows, broken off after ``sent`` bytes of them."""
    words = (b"V.STOREBATCH", name.encode(), b"0", b"0", b"%d" % rows)
    head = b"*8\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    return head + b"$%d\r\n" % (rows * ROW_BYTES) + bytes(sent)


def test_an_upload_makes_room_while_it_arrives(server: RunningServer) -> None:
    budget, window = 64 * MEGABYTE, 8 * MEGABYTE
    server.start("--disk-budget", str(budget))
    rows = 24 * MEGABYTE // ROW_BYTES
    with Wire.tcp(server.port) as wire, Wire.tcp(server.port) as other:
        for name in ("a", "b"):
            assert store(wire, name, rows, 1) == "OK"
        other.ok("KV.PREFIX.REGISTER", "c", WIDTH, "fp16")
        other.send(begun("c_pk", 2 * rows, 44 * MEGABYTE))
        deadline = time.monotonic() + 20
        while wire.ask("KV.PREFIX.LOOKUP", "a") == "HIT":
            assert time.monotonic() < deadline, "nobody made room"
            assert du(server.dir) <= budget + window
            time.sleep(0.01)
        assert du(server.dir) <= budget + window
        other.send(bytes(4 * MEGABYTE) + b"\r\n" + b"$3\r\nFMT\r\n$3\r\nF16\r\n")
        assert other.reply() == "OK"
        assert du(server.dir) <= budget
        assert wire.ask("KV.PREFIX.LOOKUP", "c") == "HIT"


def test_uploads_at_once_are_none_of_them_refused(server: RunningServer) -> None:
    budget, clients = 48 * MEGABYTE, 4
    server.start("--disk-budget", str(budget), "--max-sessions", "65536")
    rows = 10 * MEGABYTE // ROW_BYTES

    def work(client: int) -> list[object]:
        with Wire.tcp(server.port) as wire:
            return [store(wire, f"c{client}n{number}", rows, client) for number in range(4)]

    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for found in pool.map(work, range(clients)) for answer in found]
    assert answers == ["OK"] * 4 * clients
    assert du(server.dir) <= budget


def test_no_pinned_prefix_leaves_for_uploads_under_way(server: RunningServer) -> None:
    server.start("--disk-budget", str(64 * MEGABYTE))
    rows = 36 * MEGABYTE // ROW_BYTES
    with Wire.tcp(server.port) as wire, Wire.tcp(server.port) as other:
        assert store(wire, "kept", 24 * MEGABYTE // ROW_BYTES, 1) == "OK"
        assert wire.ask("KV.PREFIX.PIN", "kept") == 1
        other.ok("KV.PREFIX.REGISTER", "c", WIDTH, "fp16")
        other.send(begun("c_pk", rows, 32 * MEGABYTE))
        deadline = time.monotonic() + 20
        while du(server.dir) < 56 * MEGABYTE:
            assert time.monotonic() < deadline, "the upload stands still"
            time.sleep(0.01)
        answer = store(wire, "d", 8 * MEGABYTE // ROW_BYTES, 2)
        assert isinstance(answer, Refusal) and "disk budget" in answer
        assert wire.ask("KV.PREFIX.LOOKUP", "kept") == "HIT"
        other.send(bytes(4 * MEGABYTE) + b"\r\n" + b"$3\r\nFMT\r\n$3\r\nF16\r\n")
        assert other.reply() == "OK"
        assert store(wire, "d", 8 * MEGABYTE // ROW_BYTES, 2) == "OK"
        assert wire.ask("V.INFO", "c_pk") is None
        assert wire.ask("KV.PREFIX.LOOKUP", "kept") == "HIT"


def test_who_announces_much_and_sends_nothing_throws_nobody_out(server: RunningServer) -> None:
    server.start("--disk-budget", str(16 * MEGABYTE))
    rows = 4 * MEGABYTE // ROW_BYTES
    with Wire.tcp(server.port) as wire, Wire.tcp(server.port) as other:
        for name in ("a", "b"):
            assert store(wire, name, rows, 1) == "OK"
        other.ok("KV.PREFIX.REGISTER", "c", WIDTH, "fp16")
        other.send(begun("c_pk", 3 * rows, 1000))
        assert wire.ask("PING") == "PONG"
        assert store(wire, "d", 100, 2) == "OK"
        assert [wire.ask("KV.PREFIX.LOOKUP", name) for name in ("a", "b")] == ["HIT", "HIT"]
        assert wire.info("KV.PREFIX.INFO")["vstore_evictions"] == "0"


def test_plain_keys_make_prefixes_leave_and_are_refused_when_none_is_left(
    server: RunningServer,
) -> None:
    budget = 8 * MEGABYTE
    server.start("--disk-budget", str(budget))
    with Wire.tcp(server.port) as wire:
        assert store(wire, "a", 4 * MEGABYTE // ROW_BYTES, 1) == "OK"
        answers = []
        for number in range(12):
            answers.append(wire.ask("SET", f"k{number}", os.urandom(MEGABYTE)))
        assert wire.ask("KV.PREFIX.LOOKUP", "a") == "MISS"
        assert answers[0] == "OK" and isinstance(answers[-1], Refusal)
        assert "disk budget" in answers[-1]
        wire.ok("MULTI")
        assert wire.ask("SET", "x", os.urandom(MEGABYTE)) == "QUEUED"
        assert "disk budget" in wire.ask("EXEC")
        assert wire.ask("EXEC") == "ERR EXEC without MULTI"
        assert du(server.dir) <= budget + log_bytes(budget)
        # what was stored stays, and deleting makes room once it is saved
        assert wire.ask("STRLEN", "k0") == MEGABYTE
        assert wire.ask("DEL", *(f"k{number}" for number in range(12))) == answers.count("OK")
        wire.ok("SAVE")
        wire.ok("SET", "k0", os.urandom(MEGABYTE))


def test_an_export_counts_and_goes_before_any_prefix(server: RunningServer) -> None:
    budget = 18 * MEGABYTE
    server.start("--disk-budget", str(budget))
    rows = 4 * MEGABYTE // ROW_BYTES
    with Wire.tcp(server.port) as wire:
        for name in ("a", "b", "c"):
            assert store(wire, name, rows, 1) == "OK"
        blob = bytes(rows * ROW_BYTES // 4)
        wire.ok("V.STOREBATCH", "c_pv", 0, 0, rows // 4, blob, "FMT", "F16")
        path = wire.ask("V.EXPORT", "c_pk", "c_pv", 0, rows // 4, 1, 1, WIDTH)
        assert isinstance(path, bytes) and Path(path.decode()).exists()
        assert store(wire, "d", rows - 100, 1) == "OK"
        assert not Path(path.decode()).exists()
        assert wire.info("KV.PREFIX.INFO")["vstore_evictions"] == "0"
        assert du(server.dir) <= budget
        again = wire.ask("V.EXPORT", "c_pk", "c_pv", 0, 100, 1, 1, WIDTH)
        assert Path(again.decode()).exists()


def test_deleted_and_overwritten_keys_give_their_room_to_prefixes(server: RunningServer) -> None:
    budget = 30 * MEGABYTE
    server.start("--disk-budget", str(budget))
    with Wire.tcp(server.port) as wire:
        assert store(wire, "first", 4 * MEGABYTE // ROW_BYTES, 1) == "OK"
        for delete in (("FLUSHALL",), ("DEL", *(f"k{number}" for number in range(5)))):
            for number in range(5):
                wire.ok("SET", f"k{number}", os.urandom(4 * MEGABYTE))
            wire.ask(*delete)
            assert store(wire, "after", 10 * MEGABYTE // ROW_BYTES, 2) == "OK"
            assert wire.ask("KV.PREFIX.DROP", "after") == 1
        assert wire.info("KV.PREFIX.INFO")["vstore_evictions"] == "0"
        assert wire.ask("V.INFO", "first_pk") is not None
        # what is overwritten again and again takes its room once
        for _ in range(12):
            wire.ok("SET", "same", os.urandom(4 * MEGABYTE))
        assert wire.info("KV.PREFIX.INFO")["vstore_evictions"] == "0"
        assert wire.ask("V.INFO", "first_pk") is not None
        assert len(wire.ask("GET", "same")) == 4 * MEGABYTE
    server.restart()
    with Wire.tcp(server.port) as wire:
        assert len(wire.ask("GET", "same")) == 4 * MEGABYTE
        assert wire.ask("GET", "k0") is None


@pytest.mark.parametrize("rows", [100, 1024, 4096], ids=["50 KiB", "512 KiB", "2 MiB"])
def test_rows_that_were_overwritten_go_before_anybody_s_prefix(
    server: RunningServer, rows: int
) -> None:
    server.start("--disk-budget", str(32 * MEGABYTE))
    names = [f"n{number}" for number in range(6)]
    with Wire.tcp(server.port) as wire:
        for number, name in enumerate(names):
            assert store(wire, name, 4096, number) == "OK"
        wire.ok("KV.PREFIX.REGISTER", "hot", WIDTH, "fp16")
        for number in range(40 * MEGABYTE // (rows * ROW_BYTES)):
            values = np.random.default_rng(number).standard_normal(rows * WIDTH).astype("<f2")
            words = ("V.STOREBATCH", "hot_pk", 0, 0, rows, values.tobytes(), "FMT", "F16")
            assert wire.ask(*words) == "OK"
        assert [name for name in names if wire.ask("V.INFO", f"{name}_pk") is None] == []
        assert wire.ask("V.FETCH", "hot_pk", 0, "RANGE", 0, rows) == values.astype("<f4").tobytes()


def test_states_of_no_namespace_leave_in_their_turn(server: RunningServer) -> None:
    budget = 24 * MEGABYTE
    server.start("--disk-budget", str(budget))
    state = np.random.default_rng(0).bytes(MEGABYTE)
    rows = 2 * MEGABYTE // ROW_BYTES
    with Wire.tcp(server.port) as wire:
        assert store(wire, "first", rows, 1) == "OK"
        wire.ok("SSM.PREFIX.STORE", "first@9", 0, state)
        for number in range(60):
            wire.ok("SSM.PREFIX.STORE", f"stray{number}@7", 0, state)
            assert wire.ask("KV.PREFIX.LOOKUP", "first") == "HIT"
            # one that is used stays, too
            assert wire.ask("SSM.PREFIX.FETCH", "stray0@7", 0) == state
        assert wire.ask("SSM.PREFIX.FETCH", "stray1@7", 0) is None
        assert wire.ask("SSM.PREFIX.FETCH", "stray59@7", 0) == state
        for number in range(20):
            assert store(wire, f"n{number}", rows, 2 + number) == "OK"
            assert wire.ask("KV.PREFIX.LOOKUP", "first") == "HIT"
        assert wire.ask("SSM.PREFIX.FETCH", "first@9", 0) == state
        assert wire.ask("SSM.PREFIX.FETCH", "stray59@7", 0) is None
        assert du(server.dir) <= budget + log_bytes(budget)


def test_after_a_restart_states_of_no_namespace_leave_before_prefixes(
    server: RunningServer,
) -> None:
    budget = 24 * MEGABYTE
    server.start("--disk-budget", str(budget))
    rows = 2 * MEGABYTE // ROW_BYTES
    with Wire.tcp(server.port) as wire:
        assert store(wire, "first", rows, 1) == "OK"
        for number in range(15):
            wire.ok("SSM.PREFIX.STORE", f"stray{number}", 0, os.urandom(MEGABYTE))
    server.restart("--disk-budget", str(budget))
    with Wire.tcp(server.port) as wire:
        for number in range(8):
            assert store(wire, f"n{number}", rows, 2 + number) == "OK"
        assert wire.ask("KV.PREFIX.LOOKUP", "first") == "HIT"
        assert wire.ask("SSM.PREFIX.FETCH", "stray0", 0) is None


def test_a_budget_on_a_small_disk_leaves_half_as_much_free_and_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 64 * MEGABYTE) as disk:
        one = RunningServer(free_port_block(), disk / "data")
        one.dir.mkdir()
        one.log = tmp_path / "server.log"
        one.start("--disk-budget", str(40 * MEGABYTE))
        rows = 4 * MEGABYTE // ROW_BYTES
        try:
            with Wire.tcp(one.port) as wire:
                for number in range(15):
                    assert store(wire, f"n{number}", rows, number) == "OK"
                held = int(wire.info("KV.PREFIX.INFO")["vstore_bytes"])
                assert 28 * MEGABYTE <= held <= 40 * MEGABYTE
                answers: list[object] = ["OK"]
                while answers[-1] == "OK" and len(answers) < 10:
                    fill(disk / f"others{len(answers)}")
                    answers.append(store(wire, f"more{len(answers)}", rows, 1))
                assert isinstance(answers[-1], Refusal)
                assert "it leaves 20 MB of the disk free, and only " in answers[-1]
                for others in disk.glob("others*"):
                    others.unlink()
                assert store(wire, "n", rows, 1) == "OK"
        finally:
            one.stop()


def test_an_embedded_server_keeps_all_at_a_start_on_a_full_disk_and_stores_again_when_it_is_not(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", 64 * MEGABYTE) as disk:
        embedded = RunningServer(free_port_block(), disk / "data")
        try:
            embedded.start("--embedded")
            with Wire.tcp(embedded.port) as wire:
                for number in range(4):
                    assert store(wire, f"n{number}", 2000, number) == "OK"
                wire.ok("KV.PREFIX.SAVE")
            embedded.stop()
            fill(disk / "filler")
            embedded.start("--embedded")
            with Wire.tcp(embedded.port) as wire:
                for number in range(4):
                    assert wire.ask("KV.PREFIX.LOOKUP", f"n{number}") == "HIT"
                refused = wire.ask("KV.PREFIX.REGISTER", "more", WIDTH, "fp16")
                assert isinstance(refused, Refusal) and "No space left" in refused
                (disk / "filler").unlink()
                ends_at = time.monotonic() + 30
                while wire.ask("KV.PREFIX.REGISTER", "more", WIDTH, "fp16") != "OK":
                    assert time.monotonic() < ends_at
                    time.sleep(0.5)
                while store(wire, "more", 1000, 9) != "OK":
                    assert time.monotonic() < ends_at
                    time.sleep(0.5)
                for number in range(4):
                    assert wire.ask("KV.PREFIX.LOOKUP", f"n{number}") == "HIT"
        finally:
            embedded.stop()
