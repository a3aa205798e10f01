"""A call brings the server's reply, or ends by its deadline with StoreUnavailable."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.errors import (
    CommandError,
    ConfigError,
    DeadlineExceeded,
    StoreUnavailable,
    WrongPassword,
)
from tests.redis_server import RealRedis, running_redis

SHORT = 0.2
# Far above SHORT, for machines that are busy: it tells "ended" from "hung".
HUNG = 10.0

# The tests fork on purpose; newer Pythons warn where there are threads.
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

Script = Callable[[socket.socket], None]


class ScriptedServer:
    """A real listening socket whose every connection follows the next script."""

    def __init__(self, *scripts: Script) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(port=self.listener.getsockname()[1])
        self.accepted = 0
        self.stopped = threading.Event()
        self._scripts = list(scripts)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for script in self._scripts:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.accepted += 1
            with sock:
                sock.settimeout(HUNG)
                try:
                    script(sock)
                except OSError:
                    continue

    def close(self) -> None:
        self.stopped.set()
        try:
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.listener.close()
        self._thread.join(HUNG)
        assert not self._thread.is_alive()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def start(*scripts: Script) -> ScriptedServer:
        servers.append(ScriptedServer(*scripts))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def says(*pieces: bytes, pause: float = 0.0) -> Script:
    """Answer one command with these pieces, then wait for the client to go."""

    def script(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(pause)
        while sock.recv(1 << 16):
            pass

    return script


def says_and_closes(data: bytes) -> Script:
    def script(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(data)

    return script


def every(reply: bytes) -> Script:
    """Answer whatever arrives at once with the same reply, again and again."""

    def script(sock: socket.socket) -> None:
        while sock.recv(1 << 16):
            sock.sendall(reply)

    return script


# -- against a server of another make -----------------------------------------


@pytest.fixture(scope="module")
def real_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRedis]:
    with running_redis(tmp_path_factory.mktemp("r")) as real:
        yield real


@pytest.fixture(params=["tcp", "unix"])
def redis(request: pytest.FixtureRequest, real_redis: RealRedis) -> Iterator[RespConnection]:
    unix = Address(path=str(real_redis.socket))
    address = Address(port=real_redis.port) if request.param == "tcp" else unix
    with RespConnection(address, deadline_seconds=HUNG) as connection:
        connection.command("FLUSHALL")
        yield connection


def test_replies_come_in_three_forms(redis: RespConnection) -> None:
    assert redis.command("SET", "a", 5) == "OK"
    assert redis.command("INCRBY", "a", 2) == 7
    assert redis.command("GET", b"a") == b"7"
    assert redis.command("GET", "none") is None
    assert redis.call("PING") == b"+PONG\r\n"
    assert redis.call("GET", "a") == b"$1\r\n7\r\n"
    assert redis.call("NOSUCH").startswith(b"-ERR unknown command")
    assert redis.call_array("MGET", "a", "none") == [b"7", None]
    assert redis.call_array("GET", "none") == [None]


def test_a_refusal_is_raised_and_the_connection_goes_on(redis: RespConnection) -> None:
    with pytest.raises(CommandError, match="unknown command"):
        redis.command("NOSUCH")
    with pytest.raises(CommandError, match="unknown command"):
        redis.fetch_into(["NOSUCH"])
    with pytest.raises(CommandError, match="unknown command"):
        redis.call_array("NOSUCH")
    client = redis.command("CLIENT", "ID")
    assert redis.command("CLIENT", "ID") == client


def test_a_pipeline_has_one_outcome_a_command(redis: RespConnection) -> None:
    replies = redis.pipeline([["SET", "a", "1"], ["NOSUCH"], ["GET", "a"], ["LPUSH", "a", "x"]])
    assert replies[0] == "OK"
    assert isinstance(replies[1], CommandError)
    assert replies[2] == b"1"
    assert isinstance(replies[3], CommandError)
    assert redis.pipeline([]) == []


def test_a_large_value_goes_and_comes_back(redis: RespConnection) -> None:
    rows = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    redis.command("SET", "rows", rows)
    assert redis.command("GET", "rows") == rows.tobytes()
    assert redis.call("GET", "rows") == b"$%d\r\n%b\r\n" % (rows.nbytes, rows.tobytes())
    (fresh,) = redis.fetch_into(["GET", "rows"])
    assert fresh is not None
    assert (fresh.view(np.float32).reshape(rows.shape) == rows).all()
    assert fresh.ctypes.data % 64 == 0
    assert fresh.flags.writeable


def test_items_are_received_into_the_buffers_given(redis: RespConnection) -> None:
    first = np.arange(300_000, dtype=np.float32)
    second = np.arange(7, dtype=np.uint8)
    redis.pipeline([["SET", "a", first], ["SET", "b", second], ["SET", "empty", b""]])
    into_first, into_second = np.zeros((3, 100_000), np.float32), bytearray(7)
    untouched = np.full(4, 9, np.uint8)
    items = redis.fetch_into(
        ["MGET", "a", "none", "b", "empty"],
        [into_first, untouched, into_second, np.empty(0, np.float32)],
    )
    assert (into_first.reshape(-1) == first).all()
    assert into_second == second.tobytes()
    assert (untouched == 9).all()
    assert items[0] is not None
    assert np.shares_memory(items[0], into_first)
    assert items[1] is None
    assert items[3] is not None
    assert items[3].nbytes == 0


@pytest.mark.parametrize("sizes", [[3, 4, 1], [4, 3], [4], [4, 4, 4], [0, 4]])
def test_items_of_another_size_or_number_are_refused(
    redis: RespConnection, sizes: list[int]
) -> None:
    redis.command("MSET", "a", "1234", "b", "5678")
    with pytest.raises(StoreUnavailable):
        redis.fetch_into(["MGET", "a", "b"], [np.zeros(size, np.uint8) for size in sizes])
    assert redis.command("GET", "a") == b"1234"


def test_a_reply_without_rows_is_not_taken_for_rows(redis: RespConnection) -> None:
    for command in (["PING"], ["DBSIZE"], ["COMMAND", "INFO", "GET"]):
        with pytest.raises(StoreUnavailable):
            redis.fetch_into(command)
    assert redis.command("PING") == "PONG"


def test_a_buffer_that_cannot_be_written_is_a_type_error(redis: RespConnection) -> None:
    fixed = np.zeros(4, np.uint8)
    fixed.flags.writeable = False
    for buffer in (fixed, np.zeros((4, 4), np.uint8)[:, ::2]):
        with pytest.raises(TypeError):
            redis.fetch_into(["GET", "a"], [buffer])


def test_a_pipeline_larger_than_all_socket_buffers_ends(redis: RespConnection) -> None:
    blob = np.zeros(1 << 20, np.uint8)
    redis.command("SET", "big", blob)
    commands = [part for _ in range(16) for part in (["SET", "x", blob], ["GET", "big"])]
    replies = redis.pipeline(commands)
    assert replies[0::2] == ["OK"] * 16
    assert all(reply == blob.tobytes() for reply in replies[1::2])


def test_threads_share_a_connection(redis: RespConnection) -> None:
    def work(i: int) -> bool:
        value = bytes([i]) * 50_000
        redis.command("SET", f"k{i}", value)
        return redis.command("GET", f"k{i}") == value

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert redis.command("CLIENT", "ID") == redis.command("CLIENT", "ID")


@FORKS
def test_a_forked_child_uses_a_connection_of_its_own(redis: RespConnection) -> None:
    before = redis.command("CLIENT", "ID")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(redis.command("CLIENT", "ID")).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        in_child = int(pipe.read())
    os.waitpid(child, 0)
    assert in_child != before
    assert redis.command("CLIENT", "ID") == before


@FORKS
def test_an_idle_child_holds_no_connection_of_its_parent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = RespConnection(Address(port=listener.getsockname()[1]))
        thread = threading.Thread(target=connection.command, args=("PING",))
        thread.start()
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(100)
            accepted.sendall(b"+PONG\r\n")
            thread.join()
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            try:
                connection.close()
                accepted.settimeout(5)
                assert accepted.recv(100) == b""
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


@FORKS
def test_a_child_forked_during_a_call_is_not_held_up_by_its_lock(redis: RespConnection) -> None:
    waiting = threading.Thread(target=redis.command, args=("BLPOP", "never", "1"))
    waiting.start()
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        signal.alarm(int(HUNG))
        answered = False
        try:
            answered = redis.command("PING") == "PONG"
        finally:
            os._exit(0 if answered else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    waiting.join()


def test_a_connection_that_the_server_closed_is_opened_again(redis: RespConnection) -> None:
    first = redis.command("CLIENT", "ID")
    with RespConnection(redis.address) as other:
        other.command("CLIENT", "KILL", "ID", int(str(first)))
    assert redis.command("CLIENT", "ID") != first


def test_a_closed_connection_opens_when_used(redis: RespConnection) -> None:
    first = redis.command("CLIENT", "ID")
    redis.close()
    redis.close()
    assert redis.command("CLIENT", "ID") != first


# -- against servers that misbehave -------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x15\x03\x01\x00\x02\x02",
        b"$99999999999\r\n",
        b"$5\r\nabcdefgh\r\n",
        b"*2\r\n*99999999999\r\n",
        b"+OK\r\n+OK\r\n",
        b"*1\r\n" * 100,
        b":12x\r\n",
    ],
)
@pytest.mark.parametrize("how", ["command", "call", "call_array", "fetch_into"])
def test_garbage_is_the_store_being_unavailable(
    scripted: Callable[..., ScriptedServer], reply: bytes, how: str
) -> None:
    server = scripted(says(reply))
    with RespConnection(server.address, deadline_seconds=HUNG) as connection:
        call: Callable[..., object] = getattr(connection, how)
        with pytest.raises(StoreUnavailable):
            call(["GET", "a"]) if how == "fetch_into" else call("GET", "a")


def test_a_silent_server_is_given_up_long_before_a_large_transfers_deadline(
    scripted: Callable[..., ScriptedServer],
) -> None:
    # after HUNG the server itself would close, and that is another error
    server = scripted(says(b"$100000000\r\nsome of it"))
    with RespConnection(server.address, deadline_seconds=100 * HUNG, silence_seconds=SHORT) as it:
        with pytest.raises(DeadlineExceeded):
            it.fetch_into(["GET", "a"])


def test_a_long_reply_that_comes_in_small_pieces_comes_whole(
    scripted: Callable[..., ScriptedServer],
) -> None:
    data = os.urandom(700_000)
    pieces = [data[at : at + 70_000] for at in range(0, len(data), 70_000)]
    server = scripted(says(b"$700000\r\n", *pieces, b"\r\n", pause=0.01))
    with RespConnection(server.address, deadline_seconds=HUNG) as connection:
        (array,) = connection.fetch_into(["GET", "a"])
        assert array is not None and array.tobytes() == data


def test_a_long_reply_slower_than_silence_allows_for_all_of_it_comes_whole(
    scripted: Callable[..., ScriptedServer],
) -> None:
    """What has come counts, though less than is waited for."""
    pieces = [bytes(1000)] * 12
    server = scripted(says(b"$12000\r\n", *pieces, b"\r\n", pause=SHORT / 3))
    with RespConnection(server.address, deadline_seconds=HUNG, silence_seconds=SHORT) as it:
        assert it.fetch_into(["GET", "a"]) is not None


@pytest.mark.parametrize("cut", range(len(b"*2\r\n$3\r\nabc\r\n:1\r\n")))
def test_half_a_reply_and_a_closed_socket_is_unavailable(
    scripted: Callable[..., ScriptedServer], cut: int
) -> None:
    server = scripted(says_and_closes(b"*2\r\n$3\r\nabc\r\n:1\r\n"[:cut]))
    with (
        RespConnection(server.address, deadline_seconds=HUNG) as connection,
        pytest.raises(StoreUnavailable, match="closed|reset"),
    ):
        connection.command("GET", "a")


@pytest.mark.parametrize(
    "reply", [b"", b"+", b"$10\r\nabc", b"$100000\r\n" + b"x" * 50_000, b"*2\r\n:1\r\n"]
)
def test_silence_ends_at_the_deadline(
    scripted: Callable[..., ScriptedServer], reply: bytes
) -> None:
    server = scripted(says(reply))
    with (
        RespConnection(server.address, deadline_seconds=SHORT) as connection,
        pytest.raises(DeadlineExceeded),
    ):
        connection.command("GET", "a")


def test_a_trickle_ends_at_the_deadline_too(scripted: Callable[..., ScriptedServer]) -> None:
    # who waits for the whole trickle gets a whole reply
    server = scripted(says(b"$1000\r\n", *[b"x"] * 1000, b"\r\n", pause=0.02))
    with (
        RespConnection(server.address, deadline_seconds=SHORT) as connection,
        pytest.raises(DeadlineExceeded),
    ):
        connection.command("GET", "a")


def test_a_flood_without_a_reply_ends_at_the_deadline(
    scripted: Callable[..., ScriptedServer],
) -> None:
    def flood(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        for _ in range(200):
            sock.sendall(b">1\r\n:1\r\n" * 5_000)

    server = scripted(flood)
    with (
        RespConnection(server.address, deadline_seconds=SHORT) as connection,
        pytest.raises(DeadlineExceeded),
    ):
        connection.command("GET", "a")


def test_a_server_that_does_not_read_ends_at_the_deadline(
    scripted: Callable[..., ScriptedServer],
) -> None:
    go = threading.Event()
    server = scripted(lambda sock: bool(go.wait(HUNG)) and None)
    blob = np.zeros(64 << 20, np.uint8)
    try:
        with (
            RespConnection(server.address, deadline_seconds=SHORT) as connection,
            pytest.raises(DeadlineExceeded),
        ):
            connection.command("SET", "a", blob)
    finally:
        go.set()


def test_a_listener_that_never_accepts_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = Address(port=listener.getsockname()[1])
        with (
            RespConnection(address, deadline_seconds=SHORT) as connection,
            pytest.raises(DeadlineExceeded),
        ):
            connection.command("PING")


def test_no_server_is_unavailable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for address in (
        Address(port=port),
        Address(path=str(tmp_path / "none")),
        Address(path="x" * 500),
        Address(host="x" * 70 + ".invalid"),
    ):
        with (
            RespConnection(address, deadline_seconds=HUNG) as connection,
            pytest.raises(StoreUnavailable),
        ):
            connection.command("PING")


def test_after_a_failure_the_next_call_opens_a_new_connection(
    scripted: Callable[..., ScriptedServer],
) -> None:
    server = scripted(says(b"$5\r\nab"), says(b"garbage"), every(b"+OK\r\n"))
    with RespConnection(server.address, deadline_seconds=SHORT) as connection:
        with pytest.raises(DeadlineExceeded):
            connection.command("GET", "a")
        with pytest.raises(StoreUnavailable):
            connection.command("GET", "a", deadline_seconds=HUNG)
        assert connection.command("PING", deadline_seconds=HUNG) == "OK"
        assert connection.command("PING", deadline_seconds=HUNG) == "OK"
    assert server.accepted == 3


def test_a_late_reply_is_never_the_reply_of_the_next_call(
    scripted: Callable[..., ScriptedServer],
) -> None:
    def late(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        time.sleep(3 * SHORT)
        sock.sendall(b"+LATE\r\n")

    server = scripted(late, every(b"+OK\r\n"))
    with RespConnection(server.address, deadline_seconds=SHORT) as connection:
        with pytest.raises(DeadlineExceeded):
            connection.command("GET", "a")
        assert connection.command("PING", deadline_seconds=HUNG) == "OK"


def test_an_unasked_reply_in_between_is_never_taken(
    scripted: Callable[..., ScriptedServer],
) -> None:
    more = threading.Event()

    def unasked(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(b"+FIRST\r\n")
        more.wait(HUNG)
        sock.sendall(b"+STALE\r\n")
        while sock.recv(1 << 16):
            pass

    server = scripted(unasked, every(b"+SECOND\r\n"))
    with RespConnection(server.address, deadline_seconds=HUNG) as connection:
        assert connection.command("PING") == "FIRST"
        more.set()
        time.sleep(0.1)
        assert connection.command("PING") == "SECOND"


def test_a_refusal_sent_before_the_command_was_read_is_seen(
    scripted: Callable[..., ScriptedServer],
) -> None:
    go = threading.Event()

    def refuse(sock: socket.socket) -> None:
        sock.recv(100)
        sock.sendall(b"-ERR Protocol error: invalid bulk length\r\n")
        go.wait(HUNG)
        while sock.recv(1 << 20):
            pass

    server = scripted(refuse, every(b"+OK\r\n"))
    blob = np.zeros(64 << 20, np.uint8)
    with RespConnection(server.address, deadline_seconds=HUNG) as connection:
        with pytest.raises(CommandError, match="invalid bulk length"):
            connection.command("SET", "a", blob)
        go.set()
        assert connection.command("PING") == "OK"
    assert server.accepted == 2


def test_a_call_waits_for_another_threads_call_only_until_its_deadline(
    scripted: Callable[..., ScriptedServer],
) -> None:
    go = threading.Event()

    def held(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        go.wait(HUNG)
        sock.sendall(b"+OK\r\n")

    server = scripted(held)
    with RespConnection(server.address, deadline_seconds=HUNG) as connection:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(connection.command, "PING")
            while not server.accepted:
                time.sleep(0.01)
            with pytest.raises(DeadlineExceeded, match="another call"):
                connection.command("PING", deadline_seconds=SHORT)
            go.set()
            assert first.result() == "OK"


def test_a_block_has_one_deadline_for_all_its_calls(
    scripted: Callable[..., ScriptedServer],
) -> None:
    def slow(sock: socket.socket) -> None:
        while sock.recv(1 << 16):
            time.sleep(0.1)
            sock.sendall(b"+OK\r\n")

    server = scripted(slow)
    with RespConnection(server.address, deadline_seconds=HUNG) as connection:
        answered = 0
        with pytest.raises(DeadlineExceeded), connection.deadline(0.55):
            with connection.deadline(HUNG):  # an inner block cannot give more time
                for _ in range(100):
                    connection.command("PING", deadline_seconds=HUNG)
                    answered += 1
        assert answered < 6


def test_a_block_may_give_more_time_than_the_default(
    scripted: Callable[..., ScriptedServer],
) -> None:
    server = scripted(says(b"$4\r\n", b"abcd", b"\r\n", pause=0.15))
    with RespConnection(server.address, deadline_seconds=0.01) as connection:
        with connection.deadline(HUNG):
            assert connection.command("GET", "a") == b"abcd"


def test_the_password_is_sent_once_a_connection(scripted: Callable[..., ScriptedServer]) -> None:
    heard: list[bytes] = []

    def listen(sock: socket.socket) -> None:
        while data := sock.recv(1 << 16):
            heard.append(data)
            sock.sendall(b"+OK\r\n")

    server = scripted(listen)
    with RespConnection(server.address, password="pw", username="tenant") as connection:
        connection.command("PING")
        connection.command("PING")
    auth = b"*3\r\n$4\r\nAUTH\r\n$6\r\ntenant\r\n$2\r\npw\r\n"
    assert heard == [auth, b"*1\r\n$4\r\nPING\r\n", b"*1\r\n$4\r\nPING\r\n"]


def test_a_wrong_password_is_refused_by_name_on_every_call(
    scripted: Callable[..., ScriptedServer],
) -> None:
    refusal = says(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")
    server = scripted(refusal, refusal)
    with RespConnection(server.address, password="pw", deadline_seconds=HUNG) as connection:
        for _ in range(2):
            with pytest.raises(WrongPassword):
                connection.command("PING")


def test_a_port_that_is_none_is_a_config_error() -> None:
    for port in (0, -1, 65536):
        with pytest.raises(ConfigError):
            Address(port=port)
