"""Who announces much and sends little, and who reads slowly, keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pion_vllm_mlx.server.inbound import WindowPool
from pion_vllm_mlx.server.listening import connections_allowed
from pion_vllm_mlx.server.long_arguments import FIRST_BYTES, STEP_BYTES, LongArguments
from tests.conftest import RunningServer, free_port_block, running_server
from tests.server.wire import Refusal, Wire, request

MB = 1 << 20
LIMIT = 200


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[RunningServer]:
    """A server that waits longer than any test for one that stands still."""
    folder = tmp_path / "patient"
    folder.mkdir(mode=0o700)
    server = RunningServer(free_port_block(), folder, ("--stall-timeout", "3600"))
    try:
        yield server.start()
    finally:
        server.stop()


def half(*words: bytes, announced: int, sent: int) -> bytes:
    """A command whose last argument stops in the middle."""
    whole = request(*words, b"")
    return whole.removesuffix(b"$0\r\n\r\n") + b"$%d\r\n" % announced + bytes(sent)


def stopped(stack: ExitStack, port: int, data: bytes) -> Wire:
    """A client that has sent ``data``, or as much of it as is taken, and stops."""
    wire = stack.enter_context(Wire.tcp(port, timeout=0.3))
    try:
        wire.send(data)
    except TimeoutError:
        pass
    return wire


def test_announced_bytes_take_no_room_from_others(patient: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(600):
            upload = half(b"SET", b"k", announced=512 * MB, sent=1000)
            stopped(stack, patient.port, upload)
        wire = stack.enter_context(Wire.tcp(patient.port))
        for nbytes in (70_000, 3 * MB):
            wire.ok("SET", "z", bytes(nbytes))
            assert wire.ask("GET", "z") == bytes(nbytes)
        assert wire.info("INFO", "clients")["connected_clients"] == "601"


@pytest.mark.parametrize("first", [b"SSM.PREFIX.STORE", b"HSET"])
def test_half_uploads_that_hold_all_windows_give_way(
    patient: RunningServer, first: bytes
) -> None:
    with ExitStack() as stack:
        for _ in range(70):
            stopped(stack, patient.port, half(first, b"s", b"0", announced=500 * MB, sent=3 * MB))
        wire = stack.enter_context(Wire.tcp(patient.port))
        wire.ok("SSM.PREFIX.STORE", "s", 0, bytes(MB))
        assert wire.ask("SSM.PREFIX.FETCH", "s", 0) == bytes(MB)


# -- the budget ----------------------------------------------------------------


async def turn() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_uploads_that_together_are_too_long_all_come_through() -> None:
    """None of them can wait for another that waits for it, whatever the order."""

    async def main() -> None:
        budget = LongArguments(FIRST_BYTES + STEP_BYTES)
        done: list[int] = []
        targets = []

        def going_on(number: int) -> Callable[[], None]:
            def receive() -> None:
                target = targets[number]
                window = target.buffer()
                if window is not None:
                    target.advance(len(window))
                    asyncio.get_running_loop().call_soon(again, number)

            return receive

        def again(number: int) -> None:
            if left[number]:
                left[number] -= 1
                wakes[number]()
                return
            targets[number].release()
            done.append(number)

        left = [1] * 8
        wakes = [going_on(number) for number in range(8)]
        targets += [budget.open(FIRST_BYTES + STEP_BYTES, wake) for wake in wakes]
        for wake in wakes:
            wake()
        for _ in range(20):
            await turn()
        assert sorted(done) == list(range(8)) and budget.held == 0 and not budget.wanted

    asyncio.run(main())


def test_commands_sent_ahead_do_not_pass_the_budget() -> None:
    async def main() -> None:
        budget = LongArguments(FIRST_BYTES + STEP_BYTES)

        def mine() -> None:
            pass

        one, two = (budget.open(FIRST_BYTES + STEP_BYTES, mine) for _ in range(2))
        for _ in range(2):
            window = one.buffer()
            assert window is not None
            one.advance(len(window))
        assert two.buffer() is None
        one.release()
        await turn()
        assert two.buffer() is not None
        two.release()

    asyncio.run(main())


def test_only_those_are_woken_for_whom_there_is_room() -> None:
    async def main() -> None:
        pool = WindowPool(100)
        first = pool.take(100, lambda: None)
        assert first is not None
        woken: list[int] = []

        def waiter(number: int) -> Callable[[], None]:
            def wake() -> None:
                woken.append(number)
                assert pool.take(50, wake) is not None or number == 2

            return wake

        for number in range(50):
            assert pool.take(50, waiter(number)) is None
        pool.give_back(first)
        await turn()
        # two windows are there; nobody behind them is asked
        assert woken == [0, 1]

    asyncio.run(main())


# -- replies -------------------------------------------------------------------


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True)
    return int(done.stdout) * 1024


def slow_reader(stack: ExitStack, port: int, *words: str) -> Wire:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", port))
    wire = stack.enter_context(Wire(sock))
    wire.send(request(*words))
    assert wire.sock.recv(1) in b"*%~"
    return wire


@pytest.mark.parametrize("command", ["MGET", "EXEC", "HGETALL"])
def test_slow_readers_of_long_replies_cost_no_copies(
    patient: RunningServer, command: str
) -> None:
    with ExitStack() as stack:
        wire = stack.enter_context(Wire.tcp(patient.port))
        wire.ok("SET", "big", bytes(4 * MB))
        for number in range(40):
            pairs = [word for at in range(100) for word in (f"{number}.{at}", bytes(5000))]
            wire.ask("HSET", "h", *pairs)
        before = resident(patient.pid)
        for _ in range(8):
            if command == "EXEC":
                queued = request("MULTI") + request("MGET", *["big"] * 25) + request("EXEC")
                reader = stack.enter_context(Wire.tcp(patient.port))
                reader.send(queued)
                assert [reader.reply(), reader.reply()] == ["OK", "QUEUED"]
            else:
                words = ["h"] if command == "HGETALL" else ["big"] * 25
                slow_reader(stack, patient.port, command, *words)
        wire.ask("PING")
        assert resident(patient.pid) - before < 60 * MB
        assert wire.ask("GET", "big") == bytes(4 * MB)


@pytest.mark.parametrize("proto", ["2", "3"])
def test_a_long_reply_says_the_same_as_short_ones(wire: Wire, ns: str, proto: str) -> None:
    wire.ask("HELLO", proto)
    fields = {f"f{at}".encode(): bytes([at % 251]) * (at * 7) for at in range(600)}
    wire.ask("HSET", ns, *(word for pair in fields.items() for word in pair))
    wire.ok("SET", f"{ns}b", b"b" * MB)
    answer = wire.ask("HGETALL", ns)
    if proto == "2":
        answer = dict(zip(*[iter(answer)] * 2, strict=True))
    assert dict(answer) == fields
    replies = wire.together(
        ("MGET", f"{ns}b", "none", f"{ns}b"), ("PING",), ("HVALS", ns), ("ECHO", "end")
    )
    assert replies == [[b"b" * MB, None, b"b" * MB], "PONG", list(fields.values()), b"end"]


def test_a_transaction_s_reply_has_the_limit_of_any_other(wire: Wire, ns: str) -> None:
    wire.ok("SET", ns, bytes(8 * MB))
    wire.ok("MULTI")
    for _ in range(130):
        assert wire.ask("GET", ns) == "QUEUED"
    assert wire.ask("SET", f"{ns}new", "1") == "QUEUED"
    answer = wire.ask("EXEC")
    assert isinstance(answer, Refusal) and "1 GiB" in answer
    assert wire.ask("EXISTS", f"{ns}new") == 0
    wire.ask("DEL", ns)


# -- descriptors ---------------------------------------------------------------


def test_clients_leave_descriptors_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
        assert connections_allowed(10_000) == (LIMIT - 64) // 2
        assert connections_allowed(5) == 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[RunningServer]:
    """A server that may open few files."""
    folder = tmp_path / "narrow"
    folder.mkdir(mode=0o700)
    server = RunningServer(free_port_block(), folder)
    command = [sys.executable, "-m", "pion_vllm_mlx", "server", "--kvcache"]
    command += ["-p", str(server.port), "--dir", str(folder)]
    with server.log.open("ab") as log:
        server.process = subprocess.Popen(
            ["sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh", *command], stdout=log, stderr=log
        )
    waiting = threading.Event()
    try:
        for _ in range(400):
            if server.answers():
                break
            waiting.wait(0.05)
        yield server
    finally:
        server.stop()


def test_with_more_clients_than_descriptors_stores_and_fetches_go_on(
    narrow: RunningServer,
) -> None:
    with ExitStack() as stack:
        wire = stack.enter_context(Wire.tcp(narrow.port))
        wire.ok("SSM.PREFIX.STORE", "before", 0, bytes(2 * MB))
        others = [stack.enter_context(Wire.tcp(narrow.port)) for _ in range(400)]
        refused = 0
        for other in others:
            other.send(request("PING"))
            try:
                refused += other.reply() != "PONG"
            except (EOFError, ConnectionError):
                refused += 1
        assert refused >= 400 - (LIMIT - 64) // 2
        for number in range(4):
            wire.ok("SSM.PREFIX.STORE", f"n{number}", 0, bytes(2 * MB))
            assert wire.ask("SSM.PREFIX.FETCH", f"n{number}", 0) == bytes(2 * MB)
        assert wire.ask("SSM.PREFIX.FETCH", "before", 0) == bytes(2 * MB)
    assert "Traceback" not in narrow.output() and "--maxclients" in narrow.output()


def test_a_running_server_names_the_clients_it_lets_in(tmp_path: Path) -> None:
    with running_server(tmp_path / "data") as server, Wire.tcp(server.port) as wire:
        allowed = connections_allowed(10_000)
        assert int(wire.info("INFO", "clients")["maxclients"]) >= allowed


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")
def test_a_read_without_a_descriptor_is_refused_in_words(patient: RunningServer) -> None:
    with Wire.tcp(patient.port) as wire:
        wire.ok("SSM.PREFIX.STORE", "s", 0, bytes(2 * MB))
    patient.stop()
    patient.start()
    with Wire.tcp(patient.port) as wire:
        assert wire.ask("PING") == "PONG"
        soft, hard = resource.prlimit(patient.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(patient.pid, resource.RLIMIT_NOFILE, (3, hard))
        refused = Refusal("ERR SSM.PREFIX.FETCH: Too many open files")
        assert wire.ask("SSM.PREFIX.FETCH", "s", 0) == refused
        resource.prlimit(patient.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert wire.ask("SSM.PREFIX.FETCH", "s", 0) == bytes(2 * MB)
    assert "Traceback" not in patient.output()
