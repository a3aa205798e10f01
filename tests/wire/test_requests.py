"""Commands come out of the bytes of a connection, however the bytes arrive."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_vllm_mlx.wire.requests import UNAUTHENTICATED
from pion_vllm_mlx.wire.resp import (
    Arg,
    BulkTarget,
    DiscardBulk,
    Limits,
    MemoryBulk,
    RequestParser,
)

from .feeding import commands_of, feed, feed_at, plain, request, small_parser

MIB = 1 << 20

STREAM = (
    request(b"PING")
    + request(b"SET", b"k\r\n", b"$5\r\nabc\r\n*1\r\n")
    + b'ECHO "a b"\r\n'
    + b"*0\r\n*-1\r\n\r\n"
    + request(b"V.STOREBATCH", b"s", b"", bytes(range(256)), b"FMT")
    + b"PING\n"
)
COMMANDS = [
    [b"PING"],
    [b"SET", b"k\r\n", b"$5\r\nabc\r\n*1\r\n"],
    [b"ECHO", b"a b"],
    [b"V.STOREBATCH", b"s", b"", bytes(range(256)), b"FMT"],
    [b"PING"],
]


@pytest.mark.parametrize("inline_bulk_bytes", [0, 8, 64 * 1024])
def test_a_cut_anywhere_gives_the_same_commands(inline_bulk_bytes: int) -> None:
    for cut in range(len(STREAM) + 1):
        parser = small_parser(inline_bulk_bytes)
        feed_at(parser, STREAM, [cut])
        assert parser.error is None
        assert commands_of(parser) == COMMANDS, cut
        assert not parser.mid_command


@pytest.mark.parametrize("inline_bulk_bytes", [0, 8, 64 * 1024])
def test_single_bytes_give_the_same_commands(inline_bulk_bytes: int) -> None:
    parser = small_parser(inline_bulk_bytes)
    feed_at(parser, STREAM, range(1, len(STREAM)))
    assert commands_of(parser) == COMMANDS


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=5), max_size=8),
    st.lists(st.integers(0, 400), max_size=6),
    st.integers(0, 30),
)
def test_any_commands_in_any_pieces_come_back(
    commands: list[list[bytes]], cuts: list[int], inline_bulk_bytes: int
) -> None:
    data = b"".join(request(*command) for command in commands)
    parser = small_parser(inline_bulk_bytes)
    feed_at(parser, data, [cut for cut in cuts if cut <= len(data)])
    assert parser.error is None
    assert commands_of(parser) == commands


@pytest.mark.parametrize("size", [16_000, 16_384, 65_535, 65_536, 65_537, 300_000])
def test_sizes_around_the_buffer_survive_between_small_commands(size: int) -> None:
    body = bytes(i * 7 % 251 for i in range(size))
    data = (request(b"GET", b"x") + request(b"SET", b"k", body)) * 3
    parser = RequestParser(Limits())
    feed(parser, data)
    assert commands_of(parser) == [[b"GET", b"x"], [b"SET", b"k", body]] * 3


def test_a_long_bulk_is_announced_before_its_bytes_with_the_arguments_so_far() -> None:
    seen: list[tuple[list[Arg], int]] = []

    def open_bulk(args: list[Arg], length: int) -> BulkTarget:
        seen.append((list(args), length))
        return MemoryBulk(length)

    parser = RequestParser(Limits(inline_bulk_bytes=10), open_bulk)
    feed(parser, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100\r\n")
    assert seen == [([b"SET", b"k"], 100)]
    assert parser.in_bulk
    assert parser.mid_command
    feed(parser, b"x" * 100 + b"\r\n")
    assert not parser.in_bulk
    assert plain(parser.commands[0][2]) == b"x" * 100


def test_a_long_bulk_is_received_in_its_own_memory() -> None:
    target = MemoryBulk(1000)
    parser = RequestParser(Limits(inline_bulk_bytes=10), lambda args, length: target)
    feed(parser, b"*2\r\n$3\r\nSET\r\n$1000\r\nabc")
    window = parser.get_buffer()
    assert window is not None
    assert len(window) == 997
    window[0] = 42
    assert target.view[3] == 42


class Stingy:
    """A target with a small window that has to be opened again and again."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.got = bytearray()
        self.open = False
        self._window = memoryview(bytearray(7))

    def buffer(self) -> memoryview | None:
        return self._window if self.open else None

    def advance(self, n: int) -> None:
        self.got += self._window[:n]
        self.open = False


def test_a_target_without_room_pauses_and_loses_nothing() -> None:
    body = bytes(range(200))
    target = Stingy(len(body))
    parser = RequestParser(Limits(inline_bulk_bytes=10), lambda args, length: target)
    data = request(b"SET", body) + request(b"PING")
    at = pauses = 0
    while len(parser.commands) < 2:
        window = parser.get_buffer()
        if window is None:
            pauses += 1
            target.open = True
            parser.buffer_updated(0)
            continue
        n = min(len(window), len(data) - at, 90)
        window[:n] = data[at : at + n]
        parser.buffer_updated(n)
        at += n
    assert bytes(target.got) == body
    assert parser.commands[1] == [b"PING"]
    assert pauses >= len(body) // 7
    assert at == len(data)


def test_bytes_that_came_earlier_go_first_when_a_target_has_room_again() -> None:
    body = bytes(range(40))
    target = Stingy(len(body))
    parser = RequestParser(Limits(inline_bulk_bytes=10), lambda args, length: target)
    feed(parser, b"*2\r\n$3\r\nSET\r\n$40\r\n" + body[:20])
    target.open = True
    assert parser.get_buffer() is None, "twenty bytes still wait in the parse buffer"
    parser.buffer_updated(0)
    assert bytes(target.got) == body[:7]


def test_a_discarded_bulk_leaves_the_connection_in_sync() -> None:
    def open_bulk(args: list[Arg], length: int) -> BulkTarget:
        return DiscardBulk(length)

    parser = RequestParser(Limits(inline_bulk_bytes=10), open_bulk)
    feed(parser, request(b"SET", b"z" * 300_000) + request(b"PING"))
    assert [command[0] for command in parser.commands] == [b"SET", b"PING"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"*1\r\n$600000000\r\n", "invalid bulk length"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$+1\r\n", "invalid bulk length"),
        (b"*1\r\n$ 1\r\n", "invalid bulk length"),
        (b"*1\r\n$01\r\n", "invalid bulk length"),
        (b"*1\r\n$1_0\r\n", "invalid bulk length"),
        (b"*1\r\n$\r\n", "invalid bulk length"),
        (b"*1\r\n$99999999999999999999\r\n", "invalid bulk length"),
        (b"*1\r\n$" + b"1" * 40, "too big bulk count string"),
        (b"*1\r\n:1\r\n", "expected '$', got ':'"),
        (b"*1\r\n\xff1\r\n", "expected '$', got '\\xff'"),
        (b"*1\r\n$3\r\nabcd\r\n", "expected CRLF after bulk string"),
        (b"*1\r\n$20\r\n" + b"x" * 20 + b"yy", "expected CRLF after bulk string"),
        (b"*x\r\n", "invalid multibulk length"),
        (b"*1048577\r\n", "invalid multibulk length"),
        (b"*99999999999999999999\r\n", "invalid multibulk length"),
        (b"*" + b"1" * 40, "too big mbulk count string"),
        (b'SET "abc\r\n', "unbalanced quotes in request"),
        (b"SET 'a'b\r\n", "unbalanced quotes in request"),
        (b"x" * (65 * 1024), "too big inline request"),
        (b"POST / HTTP/1.1\r\n", "HTTP is not spoken here"),
        (b"Host: 127.0.0.1:1974\r\n", "HTTP is not spoken here"),
    ],
)
def test_malformed_bytes_are_refused_once_and_nothing_after_them_is_parsed(
    data: bytes, sentence: str
) -> None:
    parser = small_parser(10)
    feed(parser, request(b"PING") + data)
    assert str(parser.error) == f"Protocol error: {sentence}"
    feed(parser, request(b"LATE"))
    assert commands_of(parser) == [[b"PING"]]
    assert not parser.mid_command


def test_a_bulk_over_the_limit_is_refused_before_anything_is_opened() -> None:
    def open_bulk(args: list[Arg], length: int) -> BulkTarget:
        raise AssertionError("opened")

    parser = RequestParser(Limits(), open_bulk)
    feed(parser, b"*2\r\n$3\r\nSET\r\n$%d\r\n" % (512 * MIB + 1))
    assert parser.error is not None


def test_the_largest_bulk_is_admitted() -> None:
    lengths: list[int] = []

    def open_bulk(args: list[Arg], length: int) -> BulkTarget:
        lengths.append(length)
        return DiscardBulk(length)

    parser = RequestParser(Limits(), open_bulk)
    feed(parser, b"*2\r\n$3\r\nSET\r\n$%d\r\n" % (512 * MIB))
    assert parser.error is None
    assert lengths == [512 * MIB]


def test_the_sum_of_a_commands_bulks_is_limited() -> None:
    parser = RequestParser(Limits(max_bulk=100, max_command=250))
    feed(parser, request(b"x" * 100, b"x" * 100, b"x" * 50))
    assert parser.error is None
    feed(parser, request(b"x" * 100, b"x" * 100, b"x" * 51))
    assert str(parser.error) == "Protocol error: invalid bulk length"


def test_limits_can_be_replaced_between_calls() -> None:
    parser = RequestParser(Limits(max_args=2))
    feed(parser, request(b"AUTH", b"pw"))
    parser.limits = Limits()
    feed(parser, request(b"MSET", b"a", b"1"))
    assert parser.error is None
    assert len(parser.commands) == 2


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"*11\r\n", "unauthenticated multibulk length"),
        (b"*1000000\r\n", "unauthenticated multibulk length"),
        (b"*99999999\r\n", "invalid multibulk length"),
        (b"*2\r\n$4\r\nAUTH\r\n$16385\r\n", "unauthenticated bulk length"),
        (b"*2\r\n$4\r\nAUTH\r\n$536870913\r\n", "invalid bulk length"),
    ],
)
def test_who_is_not_known_may_ask_for_little(data: bytes, sentence: str) -> None:
    parser = RequestParser(UNAUTHENTICATED)
    feed(parser, data)
    assert str(parser.error) == f"Protocol error: {sentence}"


def test_who_is_not_known_may_ask_for_what_redis_lets_it() -> None:
    parser = RequestParser(UNAUTHENTICATED)
    words = [b"x"] * 9 + [b"y" * 16384]
    feed(parser, request(*words))
    assert parser.error is None and commands_of(parser) == [words]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (b"*11\r\n$1\r\nx\r\n", b"$1\r\nx\r\n" * 10),
        (b"*2\r\n$3\r\nSET\r\n$16385\r\nyy", b"y" * 16383 + b"\r\n"),
    ],
    ids=["many words", "a long word"],
)
def test_what_is_too_much_for_the_unknown_waits_for_the_commands_before_it(
    start: bytes, end: bytes
) -> None:
    def waiting() -> RequestParser:
        parser = RequestParser(UNAUTHENTICATED)
        feed(parser, request(b"AUTH", b"pw") + start)
        assert parser.error is None and parser.waits and parser.get_buffer() is None
        assert commands_of(parser) == [[b"AUTH", b"pw"]]
        parser.commands.clear()
        return parser

    accepted, refused = waiting(), waiting()
    accepted.limits = Limits()
    accepted.buffer_updated(0)
    feed(accepted, end)
    assert accepted.error is None and not accepted.waits
    assert [len(words) for words in accepted.commands] in ([11], [2])
    refused.buffer_updated(0)
    assert "unauthenticated" in str(refused.error)


def test_a_command_of_very_many_arguments_is_parsed() -> None:
    args = [b"%d" % i for i in range(50_000)]
    parser = RequestParser(Limits())
    feed(parser, request(*args))
    assert commands_of(parser) == [args]


def test_an_idle_connection_gives_its_large_buffer_back() -> None:
    parser = RequestParser(Limits())
    feed(parser, request(b"SET", b"x" * 60_000))
    feed(parser, request(b"PING"))
    window = parser.get_buffer()
    assert window is not None
    assert len(window) <= 16 * 1024


def test_half_a_command_is_known_as_such() -> None:
    for cut in range(1, len(request(b"SET", b"k", b"v" * 20)) - 1):
        parser = small_parser()
        feed(parser, request(b"SET", b"k", b"v" * 20)[:cut])
        assert parser.mid_command, cut
        assert not parser.commands


@pytest.mark.parametrize("rest", [b"", b"z" * 10, b"z" * 20, b"z" * 20 + b"no CRLF"])
def test_what_a_half_received_command_holds_can_be_given_back(rest: bytes) -> None:
    parser = small_parser()
    feed(parser, b"*3\r\n$3\r\nSET\r\n$20\r\n" + b"y" * 20 + b"\r\n$20\r\n" + rest)
    assert (parser.error is not None) == (len(rest) > 20)
    command, *targets = parser.abandon()
    assert command == b"SET"
    assert [type(target) for target in targets] == [MemoryBulk, MemoryBulk]
    assert parser.abandon() == []
