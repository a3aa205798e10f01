"""What the server refuses, and whom it sends away, when something reaches its limit."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import uvloop

from pion_vllm_mlx.server import commands as commands  # fills the command table
from pion_vllm_mlx.server.binary_commands import OPERATIONS
from pion_vllm_mlx.server.command import TABLE
from pion_vllm_mlx.server.farewell import Farewell
from pion_vllm_mlx.server.memory_limit import limit
from pion_vllm_mlx.server.patience import Patience
from pion_vllm_mlx.server.session import Client, ServerConfig
from tests.conftest import RunningServer, free_port_block
from tests.server.memory.lane import ERROR, FETCH, PING, STORE, Lane, frame, named
from tests.server.wire import Refusal, Wire, refuse, request

OOM = "OOM command not allowed when used memory > 'maxmemory'."
StartServer = Callable[..., RunningServer]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers with flags of a test's choice."""
    started: list[RunningServer] = []

    def start(*flags: str) -> RunningServer:
        folder = tmp_path / f"data{len(started)}"
        folder.mkdir(mode=0o700)
        started.append(RunningServer(free_port_block(), folder, flags))
        return started[-1].start()

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def full(wire: Wire) -> Iterator[Wire]:
    """The shared server over its limit, until the test ends."""
    wire.ok("CONFIG", "SET", "maxmemory", "1")
    yield wire
    wire.ok("CONFIG", "SET", "maxmemory", "0")


# -- memory --------------------------------------------------------------------


def test_a_limit_is_bytes_or_a_share_of_the_machine() -> None:
    assert limit("0") == 0 and limit("10k") == 10240 and limit("2Gb") == 2 << 30
    assert 0 < limit("1%") < limit("50%") < limit("100%")


def test_commands_that_store_are_marked_as_growing() -> None:
    grows = {entry.name for entry in TABLE.values() if entry.grows}
    assert grows >= {
        *("V.STOREBATCH", "V.CREATE", "KV.PREFIX.REGISTER", "SSM.PREFIX.STORE", "STATE.ALLOC"),
        *("STATE.WRITE", "KV.STORE", "ATTEND.CREATE", "ATTEND.STORE", "SET", "APPEND", "HSET"),
        *("RPUSH", "SADD", "ZADD", "MSET", "INCR"),
    }
    freeing = {"DEL", "HDEL", "LPOP", "KV.PREFIX.DROP", "V.DROP", "SSM.PREFIX.DROP", "STATE.FREE"}
    assert not grows & {*freeing, "GET", "PING", "V.FETCH", "EXPIRE", "FLUSHALL", "CONFIG"}
    names = {operation.name for operation in OPERATIONS.values() if operation.grows}
    assert names == {"layer.store", "layer.extend", "attend.create", "attend.store"}


@pytest.mark.parametrize("name", sorted(e.name for e in TABLE.values() if e.grows))
def test_over_the_limit_whatever_grows_is_refused_in_the_words_clients_match(
    full: Wire, name: str
) -> None:
    words = ["1"] * (abs(TABLE[name.encode()].arity) - 1)
    refuse(full, OOM, name, *words)
    assert full.ask(name, *words) == OOM
    # the argument is long enough to be placed before the command is whole
    refuse(full, OOM, name, *words[:-1], b"x" * (9 << 20))


def test_over_the_limit_reads_and_deletes_work_and_lifting_it_helps_at_once(wire: Wire) -> None:
    row = struct.pack("<4e", 1, 2, 3, 4)
    wire.ok("SET", "k", "v")
    wire.ok("KV.PREFIX.REGISTER", "oom", 4, "fp16")
    wire.ok("V.STOREBATCH", "oom_pk", 0, 0, 1, row, "FMT", "F16")
    wire.ok("SSM.PREFIX.STORE", "oom", 0, b"state")
    wire.ok("CONFIG", "SET", "maxmemory", "1mb")
    assert wire.info("INFO", "memory")["maxmemory_refusing_writes"] == "1"
    assert wire.info("INFO", "memory")["maxmemory"] == str(1 << 20)
    assert wire.together(
        ("PING",),
        ("GET", "k"),
        ("KV.PREFIX.LOOKUP", "oom"),
        ("V.FETCH", "oom_pk", 0, "RANGE", 0, 1, "FMT", "STORED"),
        ("SSM.PREFIX.FETCH", "oom", 0),
        ("SET", "k", "w"),
        ("DEL", "k"),
        ("KV.PREFIX.DROP", "oom"),
        ("CONFIG", "SET", "MAXMEMORY", "0"),
        ("SET", "k", "w"),
        ("DEL", "k"),
    ) == ["PONG", b"v", "HIT", row, b"state", OOM, 1, 1, "OK", "OK", 1]
    assert wire.info("INFO", "memory")["maxmemory_refusing_writes"] == "0"


def test_a_transaction_does_not_slip_through(wire: Wire) -> None:
    wire.ok("MULTI")
    assert wire.ask("SET", "slip", "1") == "QUEUED"
    with ExitStack() as stack:
        other = stack.enter_context(Wire.tcp(wire.sock.getpeername()[1]))
        other.ok("CONFIG", "SET", "maxmemory", "1")
        answer = wire.ask("EXEC")
        other.ok("CONFIG", "SET", "maxmemory", "0")
    assert answer == OOM and wire.ask("EXISTS", "slip") == 0


def test_the_binary_lane_says_so_in_an_error_s_body(full: Wire, shared: RunningServer) -> None:
    with Lane.tcp(shared.port + 1) as lane:
        for body in (named("s", ("H", 0), rest=b"rows"), named("s", ("H", 0), rest=bytes(2 << 20))):
            lane.sock.sendall(frame(STORE, body) + frame(PING))
            assert lane.reply() == (ERROR, OOM.encode())
            assert lane.reply() == (0, b"")
        assert lane.ask(FETCH, named("s", ("H", 0)))[0] == 1
        full.ok("CONFIG", "SET", "maxmemory", "0")
        lane.ok(STORE, named("s", ("H", 0), rest=b"rows"))


def test_wrong_limits_are_refused_and_the_old_one_stays(wire: Wire) -> None:
    for text in ("lots", "-1", "0%", "101%", "", "1kk"):
        refuse(wire, "maxmemory", "CONFIG", "SET", "maxmemory", text)
    refuse(wire, "CONFIG SET is not supported", "CONFIG", "SET", "maxmemory")
    refuse(wire, "CONFIG SET is not supported", "CONFIG", "SET", "port", "1")
    for words in (("FOO",), ("REWRITE",), ("GET",), ("maxmemory", "0")):
        refuse(wire, "unknown subcommand", "CONFIG", *words)
    assert wire.ask("CONFIG", "GET", "[^m]?r?", "max*memor?")[::2] == [b"maxmemory", b"port"]
    assert dict(zip(*[iter(wire.ask("CONFIG", "GET", "maxmemory"))] * 2, strict=True)) == {
        b"maxmemory": b"0"
    }


def test_what_is_deleted_makes_room_and_rows_in_files_need_none(
    start_server: StartServer,
) -> None:
    server = start_server()
    with Wire.tcp(server.port) as wire:
        used = int(wire.info("INFO", "memory")["used_memory_anonymous"])
        wire.ok("CONFIG", "SET", "maxmemory", used + (96 << 20))
        # sent and fetched, so that the page cache holds them
        for number in range(8):
            wire.ok("SSM.PREFIX.STORE", "ns", number, bytes(32 << 20))
            assert len(wire.ask("SSM.PREFIX.FETCH", "ns", number)) == 32 << 20
        wire.ok("SET", "small", "x")
        answer, stored = "OK", 0
        while answer == "OK" and stored < 200:
            # short values: they lie between others, and their allocator keeps what they leave
            names = [f"k{stored}.{number}" for number in range(64)]
            answer = wire.ask("MSET", *(word for name in names for word in (name, bytes(16384))))
            stored += answer == "OK"
            time.sleep(0.006)
        assert answer == OOM and 8 < stored < 200
        for number in range(stored):
            wire.ask("DEL", *(f"k{number}.{item}" for item in range(63 if number else 64)))
        deadline = time.monotonic() + 10
        while wire.ask("SET", "small", "y") == OOM:
            assert time.monotonic() < deadline, "freed memory is never given back"
            time.sleep(0.1)


def test_attention_that_is_resident_leaves_before_a_write_is_refused(
    start_server: StartServer,
) -> None:
    server = start_server()
    side = bytes(16 << 20)
    with Wire.tcp(server.port) as wire:
        used = int(wire.info("INFO", "memory")["used_memory_anonymous"])
        wire.ok("CONFIG", "SET", "maxmemory", used + (160 << 20))
        for number in range(16):
            wire.ok("ATTEND.PREFIX.STORE", f"a{number}", 0, 8, 4096, 128, side, side)
        time.sleep(0.006)
        wire.ok("SET", "k", "v")
        memory = wire.info("INFO", "memory")
        assert memory["maxmemory_refusing_writes"] == "0"
        assert 0 < int(memory["attend_bytes"]) < 16 * 2 * len(side)
        assert wire.ask("ATTEND.PREFIX.LOOKUP", "a0", 0) == "COLD"
        assert wire.ask("ATTEND.PREFIX.LOOKUP", "a15", 0) == "HIT"
        # plain keys cannot leave: in the end they alone have the room
        answer, stored = "OK", 0
        while answer == "OK" and stored < 60:
            answer = wire.ask("SET", f"k{stored}", bytes(8 << 20))
            stored += answer == "OK"
            time.sleep(0.006)
        assert answer == OOM and stored > 8
        # what would not help stays
        wire.ok("CONFIG", "SET", "maxmemory", 0)
        wire.ok("ATTEND.PREFIX.STORE", "last", 0, 8, 4096, 128, side, side)
        wire.ok("CONFIG", "SET", "maxmemory", 1)
        assert wire.ask("SET", "k", "w") == OOM
        assert wire.ask("ATTEND.PREFIX.LOOKUP", "last", 0) == "HIT"
        wire.ok("CONFIG", "SET", "maxmemory", 0)


# -- connections ---------------------------------------------------------------


def test_a_silent_client_is_closed_and_a_busy_one_is_not(start_server: StartServer) -> None:
    server = start_server("--timeout", "1")
    with Wire.tcp(server.port) as silent, Wire.tcp(server.port) as busy:
        lane = Lane.tcp(server.port + 1)
        assert silent.ask("PING") == "PONG"
        silent.sock.settimeout(0.05)
        for _ in range(400):
            assert busy.ask("PING") == "PONG"
            try:
                assert silent.sock.recv(1) == b""
                break
            except TimeoutError:
                continue
        else:
            pytest.fail("a silent client stays for ever")
        with lane:
            assert lane.closed()
        assert busy.ask("PING") == "PONG"


def test_who_waits_for_the_server_is_not_silent(tmp_path: Path) -> None:
    async def main() -> None:
        config = ServerConfig(tmp_path, idle_seconds=10)
        patience = Patience(config, Client(1, "127.0.0.1:1", True))
        now = asyncio.get_running_loop().time()
        assert not patience.idle(now + 9, now, waits=False)
        assert not patience.idle(now + 20, now, waits=True)
        assert not patience.idle(now + 29, now, waits=False)
        assert patience.idle(now + 31, now, waits=False)

    asyncio.run(main())


def test_who_reads_a_long_reply_slowly_may_ask_again(start_server: StartServer) -> None:
    server = start_server("--timeout", "4")
    with Wire.tcp(server.port) as wire:
        wire.ok("SSM.PREFIX.STORE", "s", 0, bytes(64 << 20))
        wire.send(request("SSM.PREFIX.FETCH", "s", 0))
        # until most of it is on its way, and none of it waits in the server
        for _ in range(56 * 16):
            assert len(wire.incoming.read(1 << 16)) == 1 << 16
            time.sleep(0.005)
        wire.incoming.read((8 << 20) + len("$67108864\r\n\r\n"))
        time.sleep(0.5)
        assert wire.ask("PING") == "PONG"


def test_without_a_timeout_a_silent_client_stays(wire: Wire) -> None:
    time.sleep(1.2)
    assert wire.ask("PING") == "PONG"


def test_one_connection_too_many_is_told_so(start_server: StartServer) -> None:
    server = start_server("--maxclients", "2")
    deadline = time.monotonic() + 10
    with Wire.tcp(server.port) as one, Wire.tcp(server.port) as two:
        # the one that asked whether the server runs may still be counted
        while "max number" in str(one.ask("PING")) and time.monotonic() < deadline:
            one = Wire.tcp(server.port)
        assert one.ask("PING") == "PONG" and two.ask("PING") == "PONG"
        with Wire.tcp(server.port) as three:
            assert three.reply() == Refusal("ERR max number of clients reached")
            assert three.closed()
        assert one.info("INFO", "clients")["maxclients"] == "2"
    for _ in range(100):
        with Wire.tcp(server.port) as again:
            if again.ask("PING") == "PONG":
                break
        time.sleep(0.02)
    else:
        pytest.fail("the places of those who left stay taken")


def stopped_reader(port: int, *words: str) -> Wire:
    """A client that asks and does not read, its own buffer small."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", port))
    wire = Wire(sock)
    wire.send(request(*words))
    return wire


def address(wire: Wire) -> str:
    """A client as CLIENT LIST names it."""
    host, port = wire.sock.getsockname()
    return f"{host}:{port}"


def disappears(watching: Wire, who: str) -> bool:
    """Whether a client leaves the list within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if f"addr={who} " not in watching.ask("CLIENT", "LIST").decode():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("kind", ["in memory", "from a file"])
def test_who_reads_nothing_of_a_reply_is_closed(start_server: StartServer, kind: str) -> None:
    server = start_server("--output-timeout", "1")
    with Wire.tcp(server.port) as wire:
        wire.ok("SSM.PREFIX.STORE", "ns", 0, bytes(48 << 20))
        for number in range(24):
            wire.ok("SET", f"k{number}", bytes(1 << 20))
        words = ("SSM.PREFIX.FETCH", "ns", "0")
        if kind == "in memory":
            words = ("MGET", *(f"k{number}" for number in range(24)))
        with stopped_reader(server.port, *words) as stopped:
            assert disappears(wire, address(stopped))
        with stopped_reader(server.port, *words) as slow:
            # slow, but it reads: it stays
            for _ in range(30):
                assert slow.sock.recv(1 << 18)
                time.sleep(0.1)
            assert address(slow) in wire.ask("CLIENT", "LIST").decode()


def test_a_reply_that_waits_past_the_output_limit_closes_its_reader(
    start_server: StartServer,
) -> None:
    server = start_server("--client-output-limit", "8mb")
    with Wire.tcp(server.port) as wire:
        for number in range(24):
            wire.ok("SET", f"k{number}", bytes(1 << 20))
        names = [f"k{number}" for number in range(24)]
        with stopped_reader(server.port, "MGET", *names) as stopped:
            assert disappears(wire, address(stopped))
        with stopped_reader(server.port, "MGET", "k0") as short:
            assert short.reply() == [bytes(1 << 20)]


def test_a_last_reply_past_the_output_limit_ends_the_connection_once() -> None:
    """QUIT after replies that nobody reads: the transport is gone when its farewell begins."""

    async def last_reply() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            transport.write(bytes(8 << 20))
            transport.abort()
            await asyncio.sleep(0)  # closed from now on
            Farewell(transport).received(1)
            assert theirs.recv(1 << 20) != b"+OK\r\n"

    with closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(last_reply())
