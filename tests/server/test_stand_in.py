"""Who comes to a worker that is down is told so; nobody who comes costs others anything."""

from __future__ import annotations

import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from pion_vllm_mlx.server.stand_in import StandIn


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def client_of(door: socket.socket) -> socket.socket:
    """A client that has connected."""
    client = socket.create_connection(door.getsockname(), timeout=10)
    assert select.select([door], [], [], 10)[0]
    return client


@contextmanager
def without_descriptors() -> Iterator[None]:
    """No file or socket can be opened until the block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/dev/fd"))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def test_who_is_told_and_sends_nothing_is_let_go_of_after_a_while(door: socket.socket) -> None:
    stand_in = StandIn(3, [door])
    with client_of(door) as client:
        stand_in.attend(door)
        assert client.recv(1000).startswith(b"-LOADING worker 3 is down: ")
        (told,) = stand_in.leaving
        stand_in.tidy(stand_in.due - 0.001)
        assert told in stand_in.sockets
        stand_in.tidy(stand_in.due)
        assert told.fileno() == -1 and stand_in.sockets == (door,)
        assert stand_in.due == float("inf")


def test_who_sends_has_read_and_is_let_go_of(door: socket.socket) -> None:
    stand_in = StandIn(3, [door])
    with client_of(door) as client:
        stand_in.attend(door)
        client.sendall(b"PING\r\n")
        (told,) = stand_in.leaving
        assert select.select([told], [], [], 10)[0]
        stand_in.attend(told)
        assert told.fileno() == -1 and stand_in.sockets == (door,)
        assert client.recv(1000).startswith(b"-LOADING") and client.recv(1) == b""


def test_however_many_come_few_are_kept(door: socket.socket) -> None:
    stand_in = StandIn(3, [door])
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(client_of(door))
            stand_in.attend(door)
            first = next(iter(stand_in.leaving))
        assert len(stand_in.leaving) == 16
        stand_in.tidy(stand_in.due)
        assert first.fileno() == -1
        stand_in.attend(first)
        assert door in stand_in.sockets
        stand_in.close()
        assert not stand_in.leaving


def test_without_a_descriptor_the_door_is_not_looked_at_for_a_while(door: socket.socket) -> None:
    stand_in = StandIn(3, [door])
    with client_of(door) as client:
        with without_descriptors():
            stand_in.attend(door)
        assert stand_in.sockets == () and stand_in.due < float("inf")
        stand_in.tidy(stand_in.due)
        assert stand_in.sockets == (door,)
        stand_in.attend(door)
        assert client.recv(1000).startswith(b"-LOADING")
        stand_in.close()
