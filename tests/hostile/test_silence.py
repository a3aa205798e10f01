"""Clients that stop in the middle: others are served, nothing stays behind."""

from __future__ import annotations

import resource
import socket
import time

import numpy as np
import pytest

from tests.hostile.conftest import Connect, StartServer
from tests.hostile.watching import (
    anonymous_bytes,
    eventually,
    needs_proc,
    only_client,
    open_files,
    segment_files,
)
from tests.server.wire import Wire, request, settle

WIDTH = 256
ROW_BYTES = WIDTH * 2
MEMORY_LIMIT = 200 << 20


def half_store(sid: str, rows: int, share: float, *, as_float32: bool = False) -> bytes:
    """The first bytes of a V.STOREBATCH of ``rows`` fp16 rows."""
    blob = bytes(rows * ROW_BYTES * (2 if as_float32 else 1))
    whole = request("V.STOREBATCH", sid, 0, 0, rows, blob)
    return whole[: int(len(whole) * share)]


HALVES = {
    "no line end": b"*3\r\n$4\r\nECH",
    "inline": b"PING",
    "missing arguments": b"*3\r\n$4\r\nECHO\r\n",
    "in memory": half_store("a_pk", 1_000, 0.5),
    "streamed": half_store("a_pk", 40_000, 0.5),
    "spooled": half_store("a_pk", 40_000, 0.5, as_float32=True),
    "state": request("SSM.PREFIX.STORE", "a", 0, bytes(20 << 20))[: 9 << 20],
    "refused": request("NO.SUCH", bytes(20 << 20))[: 9 << 20],
    "last line end": request("V.STOREBATCH", "a_pk", 0, 0, 40_000, bytes(40_000 * ROW_BYTES))[:-2],
}


def test_half_a_command_is_given_up_and_others_are_served_meanwhile(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server("--stall-timeout", "1")
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "a", WIDTH, "fp16")
        wire.ok("V.STOREBATCH", "a_pk", 1, 0, 3, bytes(3 * WIDTH * 4))  # rides in the log
        files = segment_files(server)
        idle = connect(server)
        holders = {name: connect(server) for name in HALVES}
        for name, holder in holders.items():
            holder.send(HALVES[name])
        # more of them than fit what may be in flight
        crowd = [connect(server) for _ in range(40)]
        for holder in crowd:
            holder.send(HALVES["streamed"])
        for _ in range(20):
            assert wire.ask("PING") == "PONG"
            assert wire.ask("V.FETCH", "a_pk", 1, 0) == bytes(WIDTH * 4)
        rows = bytes(9_000 * ROW_BYTES)
        wire.ok("V.STOREBATCH", "a_pk", 2, 0, 9_000, rows, "FMT", "F16")
        for name, holder in holders.items():
            assert holder.closed(), name
        for holder in crowd:
            assert holder.closed()
            holder.close()
        for holder in holders.values():
            holder.close()
        assert idle.ask("PING") == "PONG"
        idle.close()
        settle(wire)
        assert wire.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 1) is None
        assert wire.ask("SSM.PREFIX.FETCH", "a", 0) is None
        assert wire.ask("KV.PREFIX.DROP", "a") == 1
        assert eventually(lambda: segment_files(server) == files == [])


def test_a_slow_command_that_goes_on_is_not_given_up(start_server: StartServer) -> None:
    server = start_server("--stall-timeout", "1")
    with Wire.tcp(server.port) as wire:
        data = request("SSM.PREFIX.STORE", "a", 0, b"x" * 300_000)
        for at in range(0, len(data), len(data) // 7):
            wire.send(data[at : at + len(data) // 7])
            time.sleep(0.3)
        assert wire.reply() == "OK"


def test_a_trickle_does_not_hold_a_window_for_ever(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server("--stall-timeout", "1")
    trickle = connect(server)
    trickle.send(half_store("a_pk", 1_000, 0.5))
    deadline = time.monotonic() + 20
    closed = False
    while not closed and time.monotonic() < deadline:
        try:
            trickle.send(b"x")
        except ConnectionError:
            closed = True
        time.sleep(0.05)
    assert closed
    with Wire.tcp(server.port) as wire:
        settle(wire)


@needs_proc
def test_short_arguments_without_end_are_given_up(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server()
    flood = connect(server)
    with Wire.tcp(server.port) as wire:
        before = anonymous_bytes(server)
        word = b"$60000\r\n" + b"x" * 60_000 + b"\r\n"
        flood.send(b"*1000000\r\n$14\r\nKV.PREFIX.DROP\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(5_000):
                flood.send(word)
        assert wire.ask("PING") == "PONG"
        assert anonymous_bytes(server) - before < 96 << 20


@needs_proc
def test_readers_that_stop_cost_little_and_others_are_served(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server()
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "a", WIDTH, "fp16")
        rows = (64 << 20) // ROW_BYTES
        data = np.arange(rows * WIDTH, dtype="<u4").astype("<u2").tobytes()
        for layer in range(2):
            wire.ok("V.STOREBATCH", "a_pk", layer, 0, rows, data, "FMT", "F16")
        settle(wire)
        files = open_files(server)
        fetches = [
            ("V.FETCH", "a_pk", "BATCH", 0, rows),  # converted: 256 MB
            ("V.FETCH", "a_pk", "BATCH", 0, rows, "FMT", "STORED"),  # from the files: 128 MB
            ("V.FETCH", "a_pk", 0, "RANGE", 0, 1_900_000, "FMT", "NATIVE"),  # zeros: 900 MB
        ]
        stopped = []
        for _ in range(3):
            for words in fetches:
                reader = connect(server)
                reader.send(request(*words) + request("PING"))
                assert reader.sock.recv(1)
                stopped.append(reader)
        for _ in range(20):
            assert wire.ask("PING") == "PONG"
            assert wire.ask("V.FETCH", "a_pk", 0, 1) is not None
        wire.ok("V.STOREBATCH", "a_pk", 2, 0, rows, data, "FMT", "F16")
        assert wire.ask("V.FETCH", "a_pk", 2, "RANGE", 0, rows, "FMT", "NATIVE") == data
        assert anonymous_bytes(server) < MEMORY_LIMIT
        # one of them goes on after all, and gets everything
        late = stopped.pop(1)
        rest = late.incoming.read(len("*2\r\n$67108864\r\n") - 1)
        assert rest.endswith(b"$%d\r\n" % len(data))
        assert late.incoming.read(len(data)) == data
        late.close()
        # DROP does not wait for readers
        assert wire.ask("KV.PREFIX.DROP", "a") == 1
        for reader in stopped:
            reader.close()
        assert eventually(lambda: only_client(wire))
        assert eventually(lambda: open_files(server) <= files)
        assert segment_files(server) == []


@needs_proc
def test_a_thousand_idle_connections_cost_little(
    start_server: StartServer, connect: Connect
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1_200:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1_200), hard))
    server = start_server()
    with Wire.tcp(server.port) as wire:
        before = anonymous_bytes(server)
        idle = [connect(server) for _ in range(1_000)]
        assert idle[-1].ask("PING") == "PONG"
        assert wire.info("INFO", "clients")["connected_clients"] == "1001"
        assert wire.ask("PING") == "PONG"
        assert anonymous_bytes(server) - before < 64 << 20
        assert [one.ask("PING") for one in idle] == ["PONG"] * 1_000
        for one in idle:
            one.close()
        assert eventually(lambda: only_client(wire))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["streamed", "spooled", "state", "in memory", "last line end"])
def test_a_client_that_leaves_in_the_middle_of_a_store_leaves_nothing(
    start_server: StartServer, kind: str
) -> None:
    server = start_server()
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "a", WIDTH, "fp16")
        before = wire.info("KV.PREFIX.INFO")
        for _ in range(3):
            with Wire.tcp(server.port) as leaver:
                leaver.send(HALVES[kind])
        with Wire.tcp(server.port) as leaver:
            leaver.send(half_store("a_pk", (64 << 20) // ROW_BYTES, 0.9))
            if kind == "streamed":  # a reset instead of an orderly end
                linger = (1).to_bytes(4, "little") + bytes(4)
                leaver.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert eventually(lambda: only_client(wire))
        settle(wire)
        assert eventually(lambda: wire.info("KV.PREFIX.INFO") == before)
        assert eventually(lambda: segment_files(server) == [])
        assert wire.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 1) is None
        assert wire.ask("SSM.PREFIX.FETCH", "a", 0) is None
