"""Who has not given the password may ask for as much as redis lets it, and holds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Refusal, Wire, request

PASSWORD = "open sesame"
MANY = "ERR Protocol error: unauthenticated multibulk length"
LONG = "ERR Protocol error: unauthenticated bulk length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("locked") / "data"
    folder.mkdir(mode=0o700)
    flags = ("--requirepass", PASSWORD, "--bind", "127.0.0.1")
    one = RunningServer(free_port_block(), folder, flags)
    try:
        yield one.start()
    finally:
        one.stop()


@pytest.mark.parametrize(
    ("before", "data", "text"),
    [
        ("", b"*1000000\r\n", MANY),
        ("", b"*11\r\n$4\r\nPING\r\n", MANY),
        ("", b"*2\r\n$4\r\nAUTH\r\n$16385\r\n", LONG),
        ("", b"*1\r\n$536870912\r\n", LONG),
        ("NOAUTH", request("PING") + b"*11\r\n", MANY),
        ("WRONGPASS", request("AUTH", "no") + b"*2\r\n$3\r\nSET\r\n$20000\r\n", LONG),
    ],
)
def test_too_much_is_refused_at_once_and_the_connection_ends(
    server: RunningServer, before: str, data: bytes, text: str
) -> None:
    with Wire.tcp(server.port) as wire:
        wire.send(data)
        if before:
            assert wire.reply().startswith(before)
        answer = wire.reply()
        assert isinstance(answer, Refusal) and answer == text
        assert wire.closed()


def test_after_auth_in_the_same_write_everything_is_allowed(server: RunningServer) -> None:
    value = bytes(100_000)
    words = [f"w{number}" for number in range(200)]
    with Wire.tcp(server.port) as wire:
        wire.send(
            request("AUTH", PASSWORD)
            + request("SET", "long", value)
            + request("DEL", *words)
            + request("GET", "long")
        )
        assert [wire.reply() for _ in range(4)] == ["OK", "OK", 0, value]
        wire.send(request("RESET") + request("PING"))
        assert [wire.reply() for _ in range(2)] == ["RESET", "NOAUTH Authentication required."]
        # and from here on it is nobody again
        wire.send(b"*11\r\n")
        assert wire.reply() == MANY and wire.closed()


def test_hello_with_every_option_is_within_the_limits(server: RunningServer) -> None:
    with Wire.tcp(server.port) as wire:
        hello = ("HELLO", 3, "AUTH", "default", PASSWORD, "SETNAME", "x" * 16_000)
        assert wire.ask(*hello)[b"proto"] == 3
        wire.ok("SET", "k", bytes(20_000))


def test_a_server_without_a_password_knows_everybody(pion_server: RunningServer) -> None:
    with Wire.tcp(pion_server.port) as wire:
        assert wire.ask("DEL", *(f"w{number}" for number in range(50))) == 0
