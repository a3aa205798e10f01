"""Long uploads on a whole server: in order with what is around them, and in nobody's way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from pion_vllm_mlx.server.inbound import IN_FLIGHT_BYTES
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES
from tests.conftest import RunningServer, free_port_block
from tests.hostile.watching import eventually, only_client, segment_files
from tests.server.wire import Refusal, Wire, request

MB = 1 << 20
WIDTH = 512
ROW_BYTES = 2 * WIDTH
PASSWORD = "open sesame"
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
        announced = b"*4\r\n$16\r\nSSM.PREFIX.STORE\r\n$1\r\ns\r\n$1\r\n0\r\n$%d\r\n" % (100 * MB)
        holders = IN_FLIGHT_BYTES // WINDOW_BYTES - 1
        for _ in range(holders):
            holder = stack.enter_context(Wire.tcp(server.port))
            holder.send(announced + bytes(3 * MB))
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
    server = start_server("--timeout", "4")
    rows = rows_of(4, 48 * MB)
    command = store(0, rows)
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        wire.send(command[: 4 * MB])
        enough = threading.Event()
        timer = threading.Timer(5.0, enough.set)
        timer.start()
        at = trickle([wire], command, 4 * MB, enough)
        timer.cancel()
        wire.send(command[at:])
        assert wire.reply() == "OK"
        assert fetched(wire, 0, len(rows)) == rows


def test_clients_that_stop_in_the_middle_hold_nobody_up_and_may_go_on(
    pion_server: RunningServer,
) -> None:
    rows = rows_of(5, 8 * MB)
    command = store(0, rows)
    with ExitStack() as stack:
        wire = stack.enter_context(Wire.tcp(pion_server.port))
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        stopped = [stack.enter_context(Wire.tcp(pion_server.port)) for _ in range(CROWD)]
        for other in stopped:
            other.send(command[: 3 * MB])
        in_flight(wire, CROWD * WINDOW_BYTES)
        for layer in (1, 2):
            wire.send(store(layer, rows) + request("PING"))
            assert [wire.reply(), wire.reply()] == ["OK", "PONG"]
            assert fetched(wire, layer, len(rows)) == rows
        for other in stopped:
            other.send(command[3 * MB :])
            assert other.reply() == "OK"
        assert fetched(wire, 0, len(rows)) == rows
        in_flight(wire, 0)


# -- what is around an upload --------------------------------------------------


def test_a_transaction_around_and_behind_uploads_is_answered_in_order(
    pion_server: RunningServer,
) -> None:
    one, two, state = rows_of(6, 6 * MB), rows_of(7, 5 * MB), rows_of(8, 4 * MB)
    commands = [
        request("KV.PREFIX.REGISTER", "n", WIDTH, "fp16"),
        store(0, one),
        request("MULTI"),
        request("SET", "k", "v"),
        request("GET", "k"),
        request("EXEC"),
        store(1, two),
        request("ECHO", "between"),
        request("SSM.PREFIX.STORE", "n", 0, state),
        request("MULTI"),
        store(2, two),
        request("SET", "k", "other"),
        request("EXEC"),
        request("GET", "k"),
    ]
    with Wire.tcp(pion_server.port) as wire:
        with sending(lambda: wire.send(b"".join(commands))):
            replies = [wire.reply() for _ in commands]
        assert replies[:6] == ["OK", "OK", "OK", "QUEUED", "QUEUED", ["OK", b"v"]]
        assert replies[6:10] == ["OK", b"between", "OK", "OK"]
        assert replies[10] == Refusal("ERR V.STOREBATCH is not allowed in a transaction")
        assert replies[11] == "QUEUED" and replies[12].startswith("EXECABORT")
        assert replies[13] == b"v"
        assert fetched(wire, 0, len(one)) == one and fetched(wire, 1, len(two)) == two
        assert wire.ask("SSM.PREFIX.FETCH", "n", 0) == state
        assert fetched(wire, 2, len(two)) is None
        in_flight(wire, 0)


@pytest.mark.parametrize("end", ["QUIT", "a bulk string over the limit", "no bulk string"])
def test_a_connection_that_ends_behind_an_upload_has_stored_it_and_nothing_after(
    pion_server: RunningServer, end: str
) -> None:
    rows = rows_of(9, 8 * MB)
    ends = {
        "QUIT": request("QUIT"),
        "a bulk string over the limit": b"*2\r\n$3\r\nGET\r\n$536870913\r\n",
        "no bulk string": b"*2\r\n$3\r\nGET\r\n:1\r\n",
    }
    with Wire.tcp(pion_server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        for _ in range(3):
            with Wire.tcp(pion_server.port) as other:
                commands = store(0, rows) + ends[end] + store(1, rows) * 4
                with sending(partial(other.send, commands)):
                    assert other.reply() == "OK"
                    last = other.reply()
                    assert last == "OK" if end == "QUIT" else "Protocol error" in last
                    assert other.closed()
        in_flight(wire, 0)
        assert fetched(wire, 0, len(rows)) == rows and fetched(wire, 1, len(rows)) is None
        assert eventually(lambda: only_client(wire))


def test_an_upload_whose_client_gave_up_its_rights_before_is_refused(
    start_server: StartServer,
) -> None:
    """It was let in: nobody knew yet that the command before it would take the rights away."""
    server = start_server("--requirepass", PASSWORD, "--bind", "127.0.0.1")
    rows = rows_of(10, 8 * MB)
    with Wire.tcp(server.port) as wire:
        wire.ok("AUTH", PASSWORD)
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        with Wire.tcp(server.port) as other:
            other.ok("AUTH", PASSWORD)
            commands = store(0, rows) + request("RESET") + store(1, rows) + request("PING")
            with sending(lambda: other.send(commands)):
                assert [other.reply(), other.reply()] == ["OK", "RESET"]
                refused = other.reply()
                assert isinstance(refused, Refusal)
                if "unauthenticated bulk length" not in refused:
                    assert refused.startswith("NOAUTH") and other.reply().startswith("NOAUTH")
        in_flight(wire, 0)
        assert fetched(wire, 0, len(rows)) == rows and fetched(wire, 1, len(rows)) is None


# -- a stop --------------------------------------------------------------------


def test_a_server_stops_while_uploads_arrive_and_has_none_of_their_rows(
    pion_server: RunningServer,
) -> None:
    rows = rows_of(11, 48 * MB)
    command = store(0, rows)
    with ExitStack() as stack:
        wire = stack.enter_context(Wire.tcp(pion_server.port))
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        wire.send(store(1, rows))
        assert wire.reply() == "OK"
        others = [stack.enter_context(Wire.tcp(pion_server.port)) for _ in range(CROWD)]
        for other in others:
            other.send(command[: 3 * MB])
        in_flight(wire, CROWD * WINDOW_BYTES)
        with sending(lambda: trickle(others, command, 3 * MB, threading.Event())):
            assert pion_server.stop() == 0, pion_server.output()
    assert "Traceback" not in pion_server.output() and "ERROR" not in pion_server.output()
    pion_server.start()
    with Wire.tcp(pion_server.port) as wire:
        assert fetched(wire, 0, len(rows)) is None
        assert fetched(wire, 1, len(rows)) == rows
        in_flight(wire, 0)
        assert wire.ask("KV.PREFIX.DROP", "n") == 1
        assert eventually(lambda: segment_files(pion_server) == [])
