"""Staying at a quick client's socket: in order, never for long, and never at others' cost."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pion_vllm_mlx.server.linger import TRUST_AGAIN, Linger, Moments
from tests.conftest import RunningServer
from tests.server.memory.lane import ERROR, FETCH, OK, PING, STORE, Lane, frame, named
from tests.server.wire import Wire

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux was measured")
#: every client is quick, nothing is ever too late, and who has asked is forgotten at once.
LONG = Moments(wait=60.0, turn=60.0, quick=60.0, alone=0.0)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


def trusted(linger: Linger, asked: int = 0) -> Linger:
    """After as many quick requests as it takes, with nobody else about."""
    linger.left(asked)
    answers = [linger.arrived(asked) for _ in range(TRUST_AGAIN + 1)]
    assert answers[-1] and not any(answers[: TRUST_AGAIN - 1])
    return linger


@on_linux
def test_it_stays_for_a_client_that_was_quick_for_a_while(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    linger = trusted(Linger(pair[0].fileno(), LONG))
    late = threading.Timer(0.02, pair[1].sendall, (b"late",))
    late.start()
    window = memoryview(bytearray(10))
    assert linger.receive(window) == 4 and window[:4] == b"late"
    linger.close()


@on_linux
def test_a_slow_client_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    linger = Linger(pair[0].fileno(), replace(LONG, quick=0.0))
    linger.left(0)
    assert not any(linger.arrived(0) for _ in range(3 * TRUST_AGAIN))


@on_linux
def test_whoever_else_asks_ends_it_for_a_while(pair: tuple[socket.socket, socket.socket]) -> None:
    patient = replace(LONG, alone=60.0)
    linger = trusted(Linger(pair[0].fileno(), patient))
    assert linger.arrived(0)
    assert not linger.arrived(1)
    linger.left(1)
    assert not any(linger.arrived(1) for _ in range(3 * TRUST_AGAIN))
    forgetful = trusted(Linger(pair[0].fileno(), LONG))
    forgetful.arrived(1)
    trusted(forgetful, 1)


@on_linux
def test_a_turn_has_an_end_whatever_is_there(pair: tuple[socket.socket, socket.socket]) -> None:
    linger = Linger(pair[0].fileno(), replace(LONG, turn=-1.0))
    trusted(linger)
    pair[1].sendall(b"more")
    assert linger.receive(memoryview(bytearray(10))) == 0
    assert pair[0].recv(10) == b"more"
    assert linger.arrived(0)


@on_linux
def test_a_busy_machine_costs_the_client_its_place(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    linger = trusted(Linger(pair[0].fileno(), replace(LONG, turn=-1.0, wait=0.001)))
    assert linger.receive(memoryview(bytearray(10))) == 0
    assert not linger.arrived(0)


@on_linux
def test_waiting_in_vain_costs_the_client_its_place(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    linger = Linger(pair[0].fileno(), replace(LONG, wait=0.001))
    trusted(linger)
    assert linger.receive(memoryview(bytearray(10))) == 0
    assert not linger.arrived(0)
    linger.close()


@on_linux
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_has_gone_is_left_to_the_transport(
    pair: tuple[socket.socket, socket.socket], reset: bool
) -> None:
    linger = trusted(Linger(pair[0].fileno(), LONG))
    if reset:
        pair[0].sendall(b"unread")  # closing with unread input resets the connection
    pair[1].close()
    assert linger.receive(memoryview(bytearray(10))) == 0
    linger.close()


# -- at the server -------------------------------------------------------------------


def quickly(lane: Lane, times: int = 200) -> None:
    """Make the server stay at this connection, as far as the machine lets it."""
    for _ in range(times):
        assert lane.ask(PING) == (OK, b"")


def test_what_comes_while_it_stays_is_answered_in_order(lane: Lane, ns: str) -> None:
    long = bytes(range(256)) * 4000
    body = named(ns, ("H", 1))
    for size in (0, 1, 300, 16 << 10, 70_000, len(long)):
        quickly(lane)
        lane.sock.sendall(frame(STORE, body + long[:size]))
        lane.sock.sendall(frame(FETCH, body) + frame(0x99) + frame(PING))
        answers = [lane.reply() for _ in range(4)]
        assert [status for status, _ in answers] == [OK, OK, ERROR, OK]
        assert answers[1][1] == long[:size]


def test_half_a_frame_is_waited_for_by_the_event_loop(lane: Lane, wire: Wire, ns: str) -> None:
    whole = frame(STORE, named(ns, ("H", 1), rest=bytes(1000)))
    for cut in (1, 6, 7, 500, len(whole) - 1):
        quickly(lane)
        lane.sock.sendall(whole[:cut])
        assert wire.ask("PING") == "PONG"
        lane.sock.sendall(whole[cut:])
        assert lane.reply() == (OK, b"")


def test_what_is_no_frame_closes_after_what_came_before(lane: Lane) -> None:
    quickly(lane)
    lane.sock.sendall(frame(PING) + b"PING\r\n\r\n")
    assert lane.reply() == (OK, b"")
    assert lane.closed()


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_is_forgotten(shared: RunningServer, wire: Wire, reset: bool) -> None:
    for _ in range(5):
        with Lane.tcp(shared.port + 1) as gone:
            quickly(gone)
            if reset:
                gone.sock.sendall(frame(PING) * 50)
    deadline = time.monotonic() + 10.0
    while wire.info("INFO", "clients")["connected_clients"] != "1":
        assert time.monotonic() < deadline


def test_quick_clients_keep_nobody_from_being_answered(
    shared: RunningServer, wire: Wire, ns: str
) -> None:
    over = threading.Event()
    failed: list[BaseException] = []

    def hurry() -> None:
        try:
            with Lane.tcp(shared.port + 1) as lane:
                while not over.is_set():
                    quickly(lane, 20)
        except (AssertionError, OSError) as error:
            failed.append(error)

    others = [threading.Thread(target=hurry) for _ in range(2)]
    for other in others:
        other.start()
    with Lane.tcp(shared.port + 1) as lane:
        for n in range(20):
            assert wire.ask("PING") == "PONG"
            lane.ok(STORE, named(ns, ("H", n), rest=bytes(n)))
            wire.ok("SET", ns, bytes(300_000))
    over.set()
    for other in others:
        other.join()
    assert not failed
