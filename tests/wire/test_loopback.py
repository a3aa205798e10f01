"""What stays on one machine is not paced; what leaves it is left to the system."""

from __future__ import annotations

import socket
import sys

import pytest

from pion_vllm_mlx.wire.loopback import is_loopback, unpaced

linux = pytest.mark.skipif(sys.platform != "linux", reason="congestion control is set on Linux")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::12", False),
        ("10.127.0.1", False),
        ("192.168.1.7", False),
        ("fe80::1", False),
        ("", False),
    ],
)
def test_only_loopback_addresses_are_local(address: str, local: bool) -> None:
    assert is_loopback(address) is local


@linux
def test_a_socket_that_stays_on_the_machine_sends_unpaced() -> None:
    with socket.socket() as sock:
        unpaced(sock)
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"reno"


def test_a_socket_that_knows_nothing_of_it_stays_usable() -> None:
    one, other = socket.socketpair()
    with one, other:
        unpaced(one)
        one.sendall(b"x")
        assert other.recv(1) == b"x"
