"""The binary lane: framing on a real socket, LAYER.*, ATTEND.*, AUTH."""

from __future__ import annotations

import random
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import RunningServer, free_port_block
from tests.server.memory.lane import (
    ATTEND_STORE,
    AUTH,
    CREATE,
    ERROR,
    EXTEND,
    FETCH,
    FETCH_BATCH,
    FINALIZE,
    MISS,
    OK,
    PING,
    QUERY,
    QUERY_FUSED,
    STORE,
    Lane,
    frame,
    named,
)
from tests.server.wire import Refusal, Wire, settle

MIB = 1 << 20


def layer(sid: str, number: int, rest: bytes = b"") -> bytes:
    return named(sid, ("H", number), rest=rest)


def batch(sid: str, *numbers: int) -> bytes:
    return named(sid, ("H", len(numbers)), *(("H", number) for number in numbers))


# -- framing ---------------------------------------------------------------------------


def test_ping_answers_under_both_numbers(lane: Lane, wire: Wire, shared: RunningServer) -> None:
    assert lane.ask(PING) == lane.ask(0x03) == (OK, b"")
    lane.sock.sendall(bytes.fromhex("5ecaff00000000"))
    assert lane.incoming.read(7) == bytes.fromhex("5eca0000000000")
    assert wire.info("INFO", "server")["binary_port"] == str(shared.port + 1)


def test_pipelined_requests_are_answered_in_order(lane: Lane, ns: str) -> None:
    long = bytes(range(256)) * 4000
    lane.sock.sendall(
        frame(STORE, layer(ns, 1, b"one"))
        + frame(FETCH, layer(ns, 1))
        + frame(STORE, layer(ns, 1, long))
        + frame(0x99)
        + frame(FETCH, layer(ns, 1))
        + frame(QUERY, named("nobody", ("H", 0), ("H", 1), rest=bytes(4)))
        + frame(PING)
    )
    answers = [lane.reply() for _ in range(7)]
    assert [status for status, _ in answers] == [OK, OK, OK, ERROR, OK, MISS, OK]
    assert answers[1][1] == b"one" and answers[4][1] == long


@pytest.mark.parametrize(
    "bad", [b"PING\r\n" * 3, b"*1\r\n$4\r\nPING\r\n", b"\xca\x5e\xff" + bytes(4)]
)
def test_a_bad_magic_closes_after_what_came_before(lane: Lane, bad: bytes) -> None:
    lane.sock.sendall(frame(PING) + bad)
    assert lane.reply() == (OK, b"")
    assert lane.closed()


def test_a_body_over_1_gib_closes(lane: Lane) -> None:
    lane.sock.sendall(b"\x5e\xca\x10" + struct.pack("<I", (1 << 30) + 1))
    assert lane.closed()


@pytest.mark.parametrize("opcode", [0x00, 0x04, 0x14, 0x1F, 0x25, 0x30, 0x38, 0xFE])
@pytest.mark.parametrize("length", [0, 100_000])
def test_an_unknown_opcode_is_refused_and_its_body_skipped(
    lane: Lane, opcode: int, length: int
) -> None:
    lane.refuse("unknown opcode", opcode, bytes(length))


def test_what_is_not_there_says_so(lane: Lane) -> None:
    for opcode in range(0x31, 0x37):
        lane.refuse("UNAVAILABLE", opcode, bytes(20_000 * (opcode & 1)))


# -- LAYER.* ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 5, 16 << 10, 4 * MIB - 7, 4 * MIB - 6, 6 * MIB])
def test_a_layer_comes_back_byte_for_byte(lane: Lane, ns: str, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert lane.ok(STORE, layer(ns, 65_535, data)) == b""
    assert lane.ok(FETCH, layer(ns, 65_535)) == data
    assert lane.ok(0x02, layer(ns, 65_535)) == data
    assert lane.ok(0x01, layer(ns, 65_535, data[::-1])) == b""
    assert lane.ok(FETCH, layer(ns, 65_535)) == data[::-1]


def test_what_was_never_stored_is_a_miss(lane: Lane, ns: str) -> None:
    assert lane.ask(FETCH, layer(ns, 0)) == (MISS, b"")
    lane.ok(STORE, layer(ns, 0, b"x"))
    assert lane.ask(FETCH, layer(ns, 1)) == (MISS, b"")
    assert lane.ask(FETCH, layer(ns + "x", 0)) == (MISS, b"")


def test_extending_appends_and_begins_a_layer(lane: Lane, ns: str) -> None:
    parts = [b"a", b"", b"bc", bytes(range(256)) * 1000, b"d" * 10, b"e" * 70_000, b"f"]
    for part in parts:
        lane.ok(EXTEND, layer(ns, 2, part))
    assert lane.ok(FETCH, layer(ns, 2)) == b"".join(parts)
    lane.ok(STORE, layer(ns, 2, b"new"))
    lane.ok(EXTEND, layer(ns, 2, b"er"))
    assert lane.ok(FETCH, layer(ns, 2)) == b"newer"


def test_a_batch_says_for_every_layer_what_is_there(lane: Lane, ns: str) -> None:
    long = bytes(range(256)) * 2000
    lane.ok(STORE, layer(ns, 0, b"zero"))
    lane.ok(STORE, layer(ns, 9, long))
    answer = lane.ok(FETCH_BATCH, batch(ns, 9, 1, 0, 9))
    expected = [(OK, long), (MISS, b""), (OK, b"zero"), (OK, long)]
    assert answer == b"".join(struct.pack("<BI", s, len(body)) + body for s, body in expected)
    assert lane.ok(FETCH_BATCH, batch(ns)) == b""
    assert lane.ok(FETCH_BATCH, batch(ns + "x", 3)) == struct.pack("<BI", MISS, 0)


def test_the_least_recently_used_of_257_sessions_is_a_miss(lane: Lane, ns: str) -> None:
    for n in range(256):
        lane.ok(STORE, layer(f"{ns}.{n}", 0, b"%d" % n))
    assert lane.ok(FETCH, layer(f"{ns}.0", 0)) == b"0"
    lane.ok(EXTEND, layer(f"{ns}.1", 0, b"+"))
    lane.ok(STORE, layer(f"{ns}.256", 0, b"new"))
    assert lane.ask(FETCH, layer(f"{ns}.2", 0)) == (MISS, b"")
    assert lane.ok(FETCH, layer(f"{ns}.0", 0)) == b"0"
    assert lane.ok(FETCH, layer(f"{ns}.1", 0)) == b"1+"


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (STORE, b""),
        (STORE, b"\x01"),
        (STORE, b"\x02\x00s"),
        (STORE, b"\x02\x00s1\x07"),
        (STORE, b"\x00\x00\x07\x00data"),
        (FETCH, b"\x02\x00s1\x07\x00more"),
        (FETCH, bytes(20_000)),
        (FETCH_BATCH, b"\x02\x00s1\x02\x00\x01\x00"),
        (FETCH_BATCH, b"\x02\x00s1\x01\x00\x01\x00\x00"),
        (EXTEND, b"\xff\xffs1\x07\x00"),
        (CREATE, b"\x01\x00s\x04\x00"),
        (CREATE, b"\x01\x00s\x00\x00\x04\x00"),
        (CREATE, b"\x01\x00s\x04\x00\x04\x00\x00"),
        (ATTEND_STORE, b"\x01\x00s\x04\x00\x01\x00\x00"),
        (FINALIZE, b"\x01\x00s\x04"),
        (QUERY, b"\x01\x00s\x04\x00\x01"),
    ],
)
def test_a_body_that_is_not_its_opcode_s_is_refused(lane: Lane, opcode: int, body: bytes) -> None:
    lane.refuse("ERR ", opcode, body)


def test_long_bodies_leave_nothing_in_flight(lane: Lane, wire: Wire, ns: str) -> None:
    data = bytes(3 * MIB)
    lane.ok(STORE, layer(ns, 0))
    before = int(wire.info("INFO", "memory")["memory_store_bytes"])
    lane.ok(STORE, layer(ns, 0, data))
    lane.refuse("unknown opcode", 0x77, data)
    settle(wire)
    assert int(wire.info("INFO", "memory")["memory_store_bytes"]) - before == len(data)


def test_a_store_cut_off_half_way_stores_nothing(shared: RunningServer, wire: Wire) -> None:
    whole = frame(STORE, layer("cut", 0, bytes(2 * MIB)))
    with Lane.tcp(shared.port + 1) as lane:
        lane.sock.sendall(whole[:-1])
    settle(wire)
    with Lane.tcp(shared.port + 1) as lane:
        assert lane.ask(FETCH, layer("cut", 0)) == (MISS, b"")


def test_a_reader_that_stops_blocks_nobody(shared: RunningServer, lane: Lane, ns: str) -> None:
    lane.ok(STORE, layer(ns, 0, bytes(32 * MIB)))
    with Lane.tcp(shared.port + 1) as slow:
        slow.sock.sendall(frame(FETCH, layer(ns, 0)) * 3 + frame(PING))
        time.sleep(0.05)
        assert lane.ok(PING) == b""
        assert lane.ok(FETCH, layer(ns, 0)) == bytes(32 * MIB)
        for _ in range(3):
            assert slow.reply() == (OK, bytes(32 * MIB))
        assert slow.reply() == (OK, b"")
    with Lane.tcp(shared.port + 1) as gone:
        gone.sock.sendall(frame(FETCH, layer(ns, 0)) * 3)
    assert lane.ok(PING) == b""


# -- ATTEND.* --------------------------------------------------------------------------


def test_both_lanes_answer_a_query_with_the_same_bytes(lane: Lane, wire: Wire, ns: str) -> None:
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((500, width)).astype("<f4") for width in (24, 40))
    slot = struct.unpack("<I", lane.ok(CREATE, named(ns, ("H", 24), ("H", 40))))[0]
    assert wire.ask("ATTEND.CREATE", ns, 24, 40) == slot
    for at in (0, 250):
        rows = keys[at : at + 250].tobytes() + values[at : at + 250].tobytes()
        lane.ok(ATTEND_STORE, named(ns, ("H", 5), ("I", 250), rest=rows))
    for k in (1, 40, 4096):
        for query in keys[:3].tobytes(), rng.standard_normal(24).astype("<f4").tobytes():
            one = query[:96]
            binary = lane.ok(QUERY, named(ns, ("H", 5), ("H", k), rest=one))
            assert binary == wire.ask("ATTEND.QUERY", ns, 5, k, one)
            assert len(binary) == min(k, 500) * 160
    lane.ok(FINALIZE, named(ns, ("H", 5)))
    assert lane.ok(QUERY, named(ns, ("H", 5), ("H", 4), rest=one)) == wire.ask(
        "ATTEND.QUERY", ns, 5, 4, one
    )


def test_what_an_index_refuses_or_lacks(lane: Lane, wire: Wire, ns: str) -> None:
    lane.ok(CREATE, named(ns, ("H", 4), ("H", 2)))
    lane.ok(ATTEND_STORE, named(ns, ("H", 0), ("I", 1), rest=bytes(24)))
    before = wire.ask("ATTEND.INFO")
    for rest in (bytes(12), bytes(20), b""):
        lane.refuse("query must be", QUERY, named(ns, ("H", 0), ("H", 1), rest=rest))
    for k in (0, 4097, 65_535):
        lane.refuse("k must be", QUERY, named(ns, ("H", 0), ("H", k), rest=bytes(16)))
        lane.refuse("k must be", QUERY, named("nobody", ("H", 0), ("H", k), rest=bytes(16)))
    for length in (0, 16, 20, 28):
        lane.refuse("must be", ATTEND_STORE, named(ns, ("H", 0), ("I", 1), rest=bytes(length)))
    lane.refuse("count", ATTEND_STORE, named(ns, ("H", 0), ("I", 0)))
    lane.refuse("already exists", CREATE, named(ns, ("H", 5), ("H", 2)))
    for opcode, body in (
        (QUERY, named("nobody", ("H", 0), ("H", 1), rest=bytes(16))),
        (QUERY, named(ns, ("H", 1), ("H", 1), rest=bytes(16))),
        (ATTEND_STORE, named("nobody", ("H", 0), ("I", 1), rest=bytes(24))),
        (FINALIZE, named("nobody", ("H", 0))),
    ):
        assert lane.ask(opcode, body) == (MISS, b"")
    assert wire.ask("ATTEND.INFO") == before


# -- ports and passwords ---------------------------------------------------------------


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[RunningServer]:
    """A server with a password."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o700)
    flags = ("--requirepass", "pass word", "--bind", "127.0.0.1")
    server = RunningServer(free_port_block(), folder, flags)
    try:
        yield server.start()
    finally:
        server.stop()


def test_nothing_but_auth_is_answered_before_the_password(locked: RunningServer) -> None:
    with Lane.tcp(locked.port + 1) as lane:
        long = bytes(100_000)
        for opcode in (PING, 0x03, STORE, FETCH, CREATE, QUERY_FUSED, 0x31, 0x99):
            for body in (b"", layer("s", 0, long)):
                status, text = lane.ask(opcode, body)
                assert status == ERROR and text.startswith(b"NOAUTH"), hex(opcode)
        for wrong in (b"", b"pass", b"pass word ", b"\x09\x00pass wor", b"default", long):
            status, text = lane.ask(AUTH, wrong)
            assert status == ERROR and text.startswith(b"WRONGPASS")
        assert lane.ask(PING)[0] == ERROR
        lane.sock.sendall(frame(AUTH, b"pass word") + frame(STORE, layer("s", 0, long)))
        assert [lane.reply()[0] for _ in range(2)] == [OK, OK]
        assert lane.ok(FETCH, layer("s", 0)) == long
        assert lane.ask(AUTH, b"no")[0] == ERROR
        assert lane.ok(PING) == b""
    with Lane.tcp(locked.port + 1) as lane:
        assert lane.ask(FETCH, layer("s", 0))[0] == ERROR
        assert lane.ok(AUTH, b"\x09\x00pass word") == b""
        assert lane.ok(FETCH, layer("s", 0)) == long


def test_auth_without_a_password_set_is_refused(lane: Lane) -> None:
    lane.refuse("without any password", AUTH, b"x")


def test_half_a_frame_and_then_silence_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    server = RunningServer(free_port_block(), folder, ("--stall-timeout", "1")).start()
    try:
        with Lane.tcp(server.port + 1) as idle, Lane.tcp(server.port + 1) as half:
            half.sock.sendall(frame(STORE, layer("s", 0, bytes(MIB)))[:-5])
            assert half.closed()
            assert idle.ok(PING) == b""
    finally:
        assert server.stop() == 0


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[Wire]:
    """A connection to a server with exactly these flags, on any free port."""
    command = [sys.executable, "-m", "pion_vllm_mlx", "server", "--dir", str(folder), *flags]
    with subprocess.Popen(
        [*command, "-p", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ready = re.search(r"ready on [\d.]+:(\d+)", process.stdout.readline())
            assert ready is not None
            with Wire.tcp(int(ready[1])) as wire:
                yield wire
        finally:
            process.terminate()


def test_beside_any_free_port_the_lane_takes_any_free_port(tmp_path: Path) -> None:
    with started(tmp_path, "--kvcache", "--ns-prefix", "mine:") as wire:
        with Lane.tcp(int(wire.info("INFO", "server")["binary_port"])) as lane:
            assert lane.ok(PING) == b""
            lane.ok(CREATE, named("any", ("H", 4), ("H", 4)))
        assert wire.ask("ATTEND.CREATE", "any", 4, 4) == 0
        wire.ok("STATE.ALLOC", "any", 4)


def test_an_embedded_server_has_no_lane(tmp_path: Path) -> None:
    with started(tmp_path, "--kvcache", "--embedded") as wire:
        assert wire.info("INFO", "server")["binary_port"] == "0"


def test_without_the_kv_cache_only_blobs_by_embedding_are_kept(tmp_path: Path) -> None:
    with started(tmp_path) as wire:
        assert wire.info("INFO", "server")["binary_port"] == "0"
        state = "ERR state cache not enabled (use --kvcache)"
        attend = "ERR attention index not enabled (use --kvcache)"
        for expected, words in (
            (state, ("STATE.INFO",)),
            (state, ("STATE.ALLOC", "a", 4)),
            (state, ("STATE.WRITE", "a", 0, bytes(100_000))),
            (attend, ("ATTEND.INFO",)),
            (attend, ("ATTEND.CREATE", "a", 4, 4)),
            (attend, ("ATTEND.STORE", "a", 0, 1, bytes(100_000), bytes(100_000))),
            (attend, ("ATTEND.QUERYBATCH", 1, 1, 1, 1, bytes(4), bytes(4), bytes(4))),
        ):
            refusal = wire.ask(*words)
            assert (refusal, type(refusal)) == (expected, Refusal)
        vector = np.ones(768, "<f4").tobytes()
        wire.ok("KV.STORE", "x", vector, b"blob")
        assert wire.ask("KV.FETCH", vector) == b"blob"
        assert wire.info("KV.INFO")["enabled"] == "1"


def test_a_lane_whose_port_is_taken_is_named(tmp_path: Path) -> None:
    port = free_port_block()
    command = [sys.executable, "-m", "pion_vllm_mlx", "server", "--kvcache"]
    command += ["--dir", str(tmp_path), "-p"]
    with socket.create_server(("127.0.0.1", port + 1)):
        done = subprocess.run([*command, str(port)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "FATAL" in done.stderr and str(port + 1) in done.stderr


# -- any bytes -------------------------------------------------------------------------


def test_mutated_frames_never_take_the_server_down(shared: RunningServer, lane: Lane) -> None:
    """Random frames and damaged ones: each gets one reply or the connection ends."""
    rng = random.Random(7)
    opcodes = [0x01, 0x02, 0x03, *range(0x10, 0x14), *range(0x20, 0x25), 0x31, 0x37, 0xFF, 0x42]
    replies = closed = 0
    for _ in range(300):
        data = bytearray()
        for _ in range(rng.randrange(1, 6)):
            sid = rng.choice(("f", "g", "fuzz" * 9))
            fields = [(rng.choice("HI"), rng.randrange(1 << 16)) for _ in range(rng.randrange(4))]
            fields = [(code, value % 9) for code, value in fields]
            body = named(sid, *fields, rest=rng.randbytes(rng.randrange(99)))
            data += frame(rng.choice(opcodes), body)
        for _ in range(rng.choice((0, 0, 1, 3))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with Lane.tcp(shared.port + 1) as victim:
            victim.sock.sendall(data)
            victim.sock.shutdown(socket.SHUT_WR)
            try:
                while True:
                    status, _ = victim.reply()
                    assert status in (OK, MISS, ERROR)
                    replies += 1
            except EOFError:
                closed += 1
    assert replies > 300 and closed == 300
    assert lane.ok(PING) == b""
    assert "Traceback" not in shared.output()
