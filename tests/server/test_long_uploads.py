"""Long uploads on a whole server: in order with what is around them, and in nobody's way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from pion_vllm_mlx.server.inbound import IN_FLIGHT_BYTES
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES
from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Wire, request

MB = 1 << 20
WIDTH = 512
ROW_BYTES = 2 * WIDTH
#: more than the server has threads that receive
CROWD = 6
PIECE_BYTES = 4096

StartServer = Callable[..., RunningServer]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server with the flags that a test asks for."""
    started: list[RunningServer] = []

    def start(*flags: str) -> RunningServer:
        folder = tmp_path / "data"
        folder.mkdir(mode=0o700)
        started.append(RunningServer(free_port_block(), folder, flags))
        return started[-1].start()

    try:
        yield start
    finally:
        for server in started:
            server.stop()


def rows_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def store(layer: int, rows: bytes) -> bytes:
    """V.STOREBATCH of rows as they are stored."""
    count = len(rows) // ROW_BYTES
    return request("V.STOREBATCH", "n_pk", layer, 0, count, rows, "FMT", "STORED")


def fetched(wire: Wire, layer: int, nbytes: int) -> object:
    end = nbytes // ROW_BYTES
    return wire.ask("V.FETCH", "n_pk", layer, "RANGE", 0, end, "FMT", "STORED")


@contextmanager
def sending(work: Callable[[], None]) -> Iterator[None]:
    """Do ``work`` beside the body, until it ends or its connection does."""

    def run() -> None:
        with suppress(OSError):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(30)
        assert not thread.is_alive(), "nobody takes what is sent"


def in_flight(wire: Wire, nbytes: int) -> None:
    """Wait until so many bytes of windows are held."""
    deadline = time.monotonic() + 20
    while (held := int(wire.info("INFO", "clients")["in_flight_bytes"])) != nbytes:
        assert time.monotonic() < deadline, f"{held} bytes are held instead of {nbytes}"
        time.sleep(0.005)


# -- order ---------------------------------------------------------------------


def test_rows_that_had_to_wait_for_the_command_before_them_come_in_order(
    start_server: StartServer,
) -> None:
    """Their first bytes came when no window was left, and the command before gave one back."""
    server = start_server("--stall-timeout", "3600")
    rows, echoed = rows_of(1, 8 * MB), rows_of(2, MB - 10)
    with ExitStack() as stack:
        wire = stack.enter_context(Wire.tcp(server.port))
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        holders = IN_FLIGHT_BYTES // WINDOW_BYTES - 1
        for _ in range(holders):
            holder = stack.enter_context(Wire.tcp(server.port))
            holder.send(request("SSM.PREFIX.STORE", "s", 0, bytes(100 * MB))[: 3 * MB])
        in_flight(wire, holders * WINDOW_BYTES)
        uploader = stack.enter_context(Wire.tcp(server.port))
        commands = request("ECHO", echoed) + store(0, rows) + request("PING")
        with sending(lambda: uploader.send(commands)):
            assert uploader.reply() == echoed
            assert [uploader.reply(), uploader.reply()] == ["OK", "PONG"]
        assert fetched(wire, 0, len(rows)) == rows


# -- slow senders --------------------------------------------------------------


def trickle(wires: list[Wire], data: bytes, at: int, stop: threading.Event) -> int:
    """Send on to each from ``at``, little at a time, never with a long pause; how far it came."""
    while not stop.is_set() and at < len(data) - PIECE_BYTES:
        for wire in wires:
            wire.send(data[at : at + PIECE_BYTES])
        at += PIECE_BYTES
        time.sleep(0.001)
    return at


def test_senders_that_become_slow_keep_no_thread_from_others(start_server: StartServer) -> None:
    server = start_server()
    rows = rows_of(3, 32 * MB)
    command = store(0, rows)
    stop = threading.Event()
    with ExitStack() as stack:
        wire = stack.enter_context(Wire.tcp(server.port))
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        slow = [stack.enter_context(Wire.tcp(server.port)) for _ in range(CROWD)]
        came: list[int] = []

        def work() -> None:
            for other in slow:
                other.send(command[: 4 * MB])
            came.append(trickle(slow, command, 4 * MB, stop))

        with sending(work):
            try:
                for layer in range(1, 4):
                    wire.send(store(layer, rows))
                    assert wire.reply() == "OK"
                    assert fetched(wire, layer, len(rows)) == rows
            finally:
                stop.set()
        for other in slow:
            other.send(command[came[0] :])
            assert other.reply() == "OK"
        assert fetched(wire, 0, len(rows)) == rows


def test_an_upload_that_goes_on_is_not_silent_however_long_it_takes(
    start_server: StartServer,
) -> None:
    server = start_server("--timeout", "1")
    rows = rows_of(4, 48 * MB)
    command = store(0, rows)
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        wire.send(command[: 4 * MB])
        enough = threading.Event()
        timer = threading.Timer(2.5, enough.set)
        timer.start()
        at = trickle([wire], command, 4 * MB, enough)
        timer.cancel()
        wire.send(command[at:])
        assert wire.reply() == "OK"
        assert fetched(wire, 0, len(rows)) == rows
