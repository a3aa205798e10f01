"""A connection that only attends is read by the thread that attends, and nobody notices."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pion_vllm_mlx.server.binary_lane import BinaryConnection
from pion_vllm_mlx.server.visit import MOST_BYTES
from pion_vllm_mlx.server.visiting import TRUST
from tests.conftest import RunningServer, running_server
from tests.recovery.driving import Driver
from tests.server.attention.asking import Asking, Floats, connected, flagged, fused_body, normal
from tests.server.memory.lane import (
    AUTH,
    ERROR,
    FETCH,
    MISS,
    OK,
    PING,
    QUERY_FUSED,
    STORE,
    Lane,
    frame,
    named,
)
from tests.server.wire import Wire

KEYS, VALUES = normal(1, 2, 300, 32), normal(2, 2, 300, 32)
SUFFIX = normal(3, 2, 4, 32), normal(4, 2, 4, 32)
MAP = bytes(range(2))
MOST_QUERIES = 1000


def body_of(ask: Asking, q: Floats) -> bytes:
    return fused_body(ask.sid, ask.layer, q, SUFFIX, MAP)


def visiting(ask: Asking, queries: int = 3 * TRUST) -> bytes:
    """Ask so often that the connection is a visitor; the reply to the last query."""
    body = body_of(ask, normal(5, 2, 1, 32))
    return [ask.lane.ok(QUERY_FUSED, body) for _ in range(queries)][-1]


# -- that it happens at all: with the server in this process --------------------------------


class Inside:
    """A connection to a server's lane, and the server's side of it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.made: list[BinaryConnection] = []
        self.lane: Lane

    async def connect(self) -> None:
        def connection() -> BinaryConnection:
            self.made.append(BinaryConnection(self.driver.server))
            return self.made[-1]

        loop = asyncio.get_running_loop()
        self.listener = await loop.create_server(connection, "127.0.0.1", 0)
        self.lane = await asyncio.to_thread(Lane.tcp, self.listener.sockets[0].getsockname()[1])

    @property
    def visits(self) -> bool:
        return bool(self.made) and self.made[0]._visiting.active is not None

    async def ask(self, body: bytes, code: int = QUERY_FUSED) -> tuple[int, bytes]:
        return await asyncio.to_thread(self.lane.ask, code, body)

    async def until_visit(self, body: bytes, wanted: tuple[int, bytes]) -> int:
        """Ask until the connection is a visitor; how often that was.

        Where others have the processor a query may take so long that it counts as the first.
        """
        for asked in range(MOST_QUERIES):
            if self.visits:
                return asked
            assert await self.ask(body) == wanted
        raise AssertionError(f"no visit after {MOST_QUERIES} queries")

    async def close(self) -> None:
        self.lane.__exit__()
        self.listener.close()
        for connection in self.made:
            connection.close()
        while self.visits or self.driver.server.clients:
            await asyncio.sleep(0.001)


@contextmanager
def inside(folder: Path, work: Callable[[Inside, bytes], Awaitable[None]]) -> Iterator[Driver]:
    with Driver(folder) as driver:
        driver.ask("ATTEND.PREFIX.STORE", "s", 0, 2, 300, 32, KEYS.tobytes(), VALUES.tobytes())
        body = fused_body("s", 0, normal(5, 2, 1, 32), SUFFIX, MAP)

        async def run() -> None:
            one = Inside(driver)
            await one.connect()
            try:
                await work(one, body)
            finally:
                await one.close()

        driver.loop.run_until_complete(run())
        yield driver
        driver.server.attention.close()


def test_queries_in_a_row_make_a_visit_and_anything_else_ends_it(tmp_path: Path) -> None:
    async def work(one: Inside, body: bytes) -> None:
        first = await one.ask(body)
        assert not one.visits and first[0] == OK
        for _ in range(2):
            queries = await one.until_visit(body, first)
            assert queries >= TRUST
            asked.append(queries)
            assert await one.ask(b"", PING) == (OK, b"")
            assert not one.visits
        asked.append(await one.until_visit(body, first))
        engine = one.driver.server.attention.engine
        assert await engine.call(lambda: "others come first") == "others come first"
        while one.visits:
            await asyncio.sleep(0.001)
        assert await one.ask(body) == first

    asked: list[int] = []
    with inside(tmp_path, work) as driver:
        assert driver.server.attention.engine.queries == sum(asked) + 2
        assert driver.server.commands_total >= sum(asked) + 4


def test_a_visit_ends_by_itself_and_the_counters_are_told(tmp_path: Path) -> None:
    async def work(one: Inside, body: bytes) -> None:
        first = await one.ask(body)
        asked = 1 + await one.until_visit(body, first)
        before = one.driver.server.commands_total
        assert before <= asked
        await one.ask(body)
        while one.visits:  # nobody asks: it rests, and is over
            await asyncio.sleep(0.005)
        assert one.driver.server.commands_total == asked + 1
        assert not one.driver.server.attention.slots._touched

    with inside(tmp_path, work):
        pass


def test_a_reply_of_which_the_socket_takes_a_part_arrives_whole(tmp_path: Path) -> None:
    async def work(one: Inside, body: bytes) -> None:
        first = await one.ask(body)
        big = fused_body("s", 0, normal(6, 2, 200, 32), SUFFIX, MAP)
        wanted = await one.ask(big)
        visiting, left = one.made[0]._visiting, list[int]()
        told = visiting._told

        def noted(unsent: bytes, goes_on: bool) -> None:
            left.append(len(unsent))
            told(unsent, goes_on)

        visiting._told = noted
        near, far = one.made[0]._direct.own_socket(), one.lane.sock
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        for _ in range(100):
            await one.until_visit(body, first)
            unread = await asked_until_it_is_over(one, frame(QUERY_FUSED, big))
            for _ in range(unread):
                assert await asyncio.to_thread(one.lane.reply) == wanted
            assert await one.ask(body) == first
            if any(left):
                return
        raise AssertionError("the socket took every reply whole")

    with inside(tmp_path, work):
        pass


async def asked_until_it_is_over(one: Inside, query: bytes) -> int:
    """Ask, one query at a time and without reading, while a visit goes on; how often."""
    visit, asked = one.made[0]._visiting._visit, 0
    while visit is not None and one.made[0]._visiting._visit is visit:
        answered = visit.answered
        await asyncio.to_thread(one.lane.sock.sendall, query)
        asked += 1
        while visit.answered == answered and one.made[0]._visiting._visit is visit:
            await asyncio.sleep(0.001)
    return asked


def test_a_connection_that_rests_holds_no_buffer_of_its_last_visit(tmp_path: Path) -> None:
    async def work(one: Inside, body: bytes) -> None:
        first = await one.ask(body)
        crowd = frame(QUERY_FUSED, body) + frame(PING)
        for more in (b"", crowd):
            await one.until_visit(body, first)
            one.lane.sock.sendall(more)
            for wanted in [first, (OK, b"")] if more else []:
                assert await asyncio.to_thread(one.lane.reply) == wanted
            while one.visits:
                await asyncio.sleep(0.005)
            held = one.made[0]._visiting._received
            assert held.nbytes == 0 and bytes(held.obj) == b""

    with inside(tmp_path, work):
        pass


# -- that nobody notices: with a server of its own ------------------------------------------


def test_replies_of_a_visit_are_those_of_resp_byte_for_byte(ask: Asking) -> None:
    ask.store(KEYS, VALUES)
    for n in range(40):
        q = normal(100 + n, 2, 1 + n % 3, 32)
        assert ask.lane.ok(QUERY_FUSED, body_of(ask, q)) == ask.fused(q, *SUFFIX)
    visiting(ask)
    for n in range(40):
        q = normal(100 + n, 2, 1 + n % 3, 32)
        found = ask.lane.ok(QUERY_FUSED, body_of(ask, q))
        if n % 4 == 0:
            assert found == ask.fused(q, *SUFFIX)


def test_what_is_refused_to_a_visitor_is_refused_as_ever(ask: Asking) -> None:
    ask.store(KEYS, VALUES)
    q = normal(5, 2, 1, 32)
    wanted = visiting(ask)
    other = fused_body("nobody", 0, q, SUFFIX, MAP)
    wide = fused_body(
        ask.sid, ask.layer, normal(5, 2, 1, 64), (np.zeros((2, 0, 64), "<f4"),) * 2, MAP
    )
    short = body_of(ask, q)[:-1]
    for code, body, status, text in (
        (QUERY_FUSED, other, MISS, b""),
        (QUERY_FUSED, wide, ERROR, b"shape mismatch"),
        (QUERY_FUSED, short, ERROR, b"blob size"),
        (QUERY_FUSED, b"", ERROR, b"malformed body"),
        (0x7E, b"?", ERROR, b"unknown opcode"),
        (AUTH, b"pw", ERROR, b"AUTH"),
    ):
        assert visiting(ask) == wanted
        found, said = ask.lane.ask(code, body)
        assert found == status and text in said
    assert visiting(ask) == wanted
    ask.lane.sock.sendall(b"no frame at all")
    assert ask.lane.closed()


def test_frames_of_a_visitor_may_come_in_pieces_and_in_crowds(ask: Asking) -> None:
    ask.store(KEYS, VALUES)
    wanted = visiting(ask)
    one = frame(QUERY_FUSED, body_of(ask, normal(5, 2, 1, 32)))
    for cut in (1, 6, 7, 8, len(one) - 1):
        visiting(ask)
        ask.lane.sock.sendall(one[:cut])
        time.sleep(0.01)
        ask.lane.sock.sendall(one[cut:])
        assert ask.lane.reply() == (OK, wanted)
    visiting(ask)
    rows = bytes(100_000)
    store = frame(STORE, named(ask.sid, ("H", 0), rest=rows))
    fetch = frame(FETCH, named(ask.sid, ("H", 0)))
    ask.lane.sock.sendall((one + frame(PING)) * 3 + one + store + one + fetch + one[:20])
    for _ in range(3):
        assert ask.lane.reply() == (OK, wanted) and ask.lane.reply() == (OK, b"")
    assert ask.lane.reply() == (OK, wanted) and ask.lane.reply() == (OK, b"")
    assert ask.lane.reply() == (OK, wanted) and ask.lane.reply() == (OK, rows)
    ask.lane.sock.sendall(one[20:])
    assert ask.lane.reply() == (OK, wanted)


@pytest.mark.parametrize("tokens", [500, 2 * MOST_BYTES // (2 * 32 * 8)])
def test_a_long_suffix_of_a_visitor_is_answered(ask: Asking, tokens: int) -> None:
    ask.store(KEYS, VALUES)
    q = normal(5, 2, 1, 32)
    longer = normal(8, 2, tokens, 32), normal(9, 2, tokens, 32)
    body = fused_body(ask.sid, ask.layer, q, longer, MAP)
    wanted = ask.fused(q, *longer)
    short = visiting(ask)
    for _ in range(2):
        assert ask.lane.ok(QUERY_FUSED, body) == wanted
        assert visiting(ask) == short


def test_a_long_reply_and_one_that_is_not_read_reach_a_visitor(ask: Asking) -> None:
    ask.store(KEYS, VALUES)
    visiting(ask)
    many = normal(6, 2, 600, 32)
    body = fused_body(ask.sid, ask.layer, many, SUFFIX, MAP)
    assert ask.lane.ok(QUERY_FUSED, body) == ask.fused(many, *SUFFIX)
    wanted = visiting(ask)
    one = frame(QUERY_FUSED, body_of(ask, normal(5, 2, 1, 32)))
    for _ in range(3000):
        ask.lane.sock.sendall(one)
        if _ % 100 == 99:
            assert [ask.lane.reply() for _ in range(100)] == [(OK, wanted)] * 100


def test_others_are_served_while_a_visitor_rests(ask: Asking, shared: RunningServer) -> None:
    ask.store(KEYS, VALUES)
    q = normal(7, 2, 1, 32)
    with connected(shared, ask.sid) as other:
        there = other.at(layer=ask.layer)
        for _ in range(5):
            wanted = visiting(ask)
            assert there.fused(normal(5, 2, 1, 32), *SUFFIX) == wanted
            visiting(ask)
            assert there.framed_ok(normal(5, 2, 1, 32), SUFFIX, MAP) == wanted
            assert other.wire.ask("PING") == "PONG"
            assert there.fused(q, *SUFFIX) == ask.framed_ok(q, SUFFIX, MAP)


def test_what_a_visitor_attends_to_may_change_and_go(ask: Asking) -> None:
    ask.store(KEYS, VALUES)
    before = visiting(ask)
    ask.store(VALUES, KEYS)
    after = visiting(ask)
    assert before != after == ask.fused(normal(5, 2, 1, 32), *SUFFIX)
    assert ask.info()["sdpa_queries"] > 6 * TRUST


def test_a_visitor_that_leaves_is_gone(ask: Asking, shared: RunningServer) -> None:
    ask.store(KEYS, VALUES)
    for reset in (False, True):
        before = int(ask.wire.info("INFO", "clients")["connected_clients"])
        with connected(shared, ask.sid) as other:
            visiting(other.at(layer=ask.layer))
            if reset:
                linger = struct.pack("ii", 1, 0)
                other.lane.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            other.lane.sock.sendall(frame(QUERY_FUSED, b"half")[:-2])
        until = time.monotonic() + 20
        while int(ask.wire.info("INFO", "clients")["connected_clients"]) > before:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_idle_visitors_and_half_frames_are_closed_in_time(tmp_path: Path) -> None:
    with flagged(tmp_path / "data", "--timeout", "1", "--stall-timeout", "1") as server:
        for half in (b"", frame(QUERY_FUSED, bytes(500))[:100]):
            with connected(server) as ask:
                ask.store(KEYS, VALUES)
                visiting(ask)
                ask.lane.sock.sendall(half)
                assert ask.lane.closed()


def test_a_server_stops_under_its_visitor(tmp_path: Path) -> None:
    with running_server(tmp_path / "data") as server, connected(server) as ask:
        ask.store(KEYS, VALUES)
        wanted = visiting(ask)
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        one = frame(QUERY_FUSED, body_of(ask, normal(5, 2, 1, 32)))
        try:
            for _ in range(100_000):
                ask.lane.sock.sendall(one)
                assert ask.lane.reply() == (OK, wanted)
        except (EOFError, ConnectionError):
            pass
        else:
            raise AssertionError("the server went on")
        assert server.process.wait(20) == 0


def test_a_password_is_asked_of_whoever_may_visit_later(tmp_path: Path) -> None:
    with flagged(tmp_path / "data", "--requirepass", "secret") as server:
        with Wire.tcp(server.port) as wire, Lane.tcp(server.port + 1) as lane:
            assert wire.ask("AUTH", "secret") == "OK"
            ask = Asking(wire, lane, "s", 0)
            ask.store(KEYS, VALUES)
            for _ in range(3 * TRUST):
                status, said = lane.ask(QUERY_FUSED, body_of(ask, normal(5, 2, 1, 32)))
                assert status == ERROR and said.startswith(b"NOAUTH")
            assert lane.ask(AUTH, b"secret") == (OK, b"")
            assert visiting(ask) == ask.fused(normal(5, 2, 1, 32), *SUFFIX)
