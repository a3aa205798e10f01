"""Replies come out of a server's bytes, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_vllm_mlx.errors import CommandError, ProtocolError, WrongPassword
from pion_vllm_mlx.wire import resp
from pion_vllm_mlx.wire.resp import Map, Reply, ReplyParser, Set, Simple

STREAM = (
    b"+OK\r\n:-12\r\n$5\r\na\r\nbc\r\n$-1\r\n*-1\r\n_\r\n#t\r\n,1.5\r\n(123456789012345678901\r\n"
    b"*3\r\n:1\r\n*0\r\n$40\r\n" + b"z" * 40 + b"\r\n"
    b"%1\r\n+a\r\n*1\r\n$-1\r\n~2\r\n:1\r\n:2\r\n=7\r\ntxt:abc\r\n!9\r\nERR wrong\r\n"
    b"|1\r\n+ttl\r\n:3\r\n+after\r\n>2\r\n+message\r\n:1\r\n-WRONGPASS no\r\n"
)


def parsed(data: bytes, cut: int = 0, **how: int) -> list[Reply]:
    parser = ReplyParser(**how)
    parser.feed(data[:cut])
    parser.feed(data[cut:])
    return [bytes(r) if isinstance(r, memoryview) else r for r in parser.replies]


def comparable(reply: object) -> object:
    """A form in which errors and views compare by content."""
    if isinstance(reply, CommandError):
        return (type(reply), str(reply))
    if isinstance(reply, memoryview):
        return reply.tobytes()
    if isinstance(reply, (list, tuple)):
        return (type(reply), [comparable(item) for item in reply])
    return (type(reply), reply) if not isinstance(reply, bytes) else reply


def test_every_type_is_read() -> None:
    replies = parsed(STREAM)
    error, last = replies[-3], replies[-1]
    assert replies[:9] == [
        "OK",
        -12,
        b"a\r\nbc",
        None,
        None,
        None,
        True,
        1.5,
        123456789012345678901,
    ]
    assert replies[9] == [1, [], b"z" * 40]
    assert replies[10] == Map([(Simple("a"), [None])])
    assert replies[11] == Set([1, 2])
    assert replies[12] == b"abc"
    assert isinstance(error, CommandError)
    assert str(error) == "wrong"
    assert replies[-2] == "after"
    assert isinstance(last, WrongPassword)


@pytest.mark.parametrize("inline", [0, 10, 32_000])
def test_a_cut_anywhere_gives_the_same_replies(inline: int) -> None:
    whole = [comparable(reply) for reply in parsed(STREAM, inline_bulk_bytes=inline)]
    for cut in range(len(STREAM)):
        cut_replies = parsed(STREAM, cut, inline_bulk_bytes=inline)
        assert [comparable(reply) for reply in cut_replies] == whole, cut


def test_a_message_out_of_band_is_no_reply() -> None:
    parser = ReplyParser()
    parser.feed(b">2\r\n+message\r\n:1\r\n+OK\r\n")
    assert list(parser.replies) == ["OK"]
    assert list(parser.pushes) == [["message", 1]]


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x00\x01\x02",
        b"SSH-2.0-OpenSSH\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"$\r\n",
        b"$1_0\r\n",
        b"$3\r\nabcd\r\n",
        b"$2000000000\r\n",
        b"*-2\r\n",
        b"*1000000000\r\n",
        b":\r\n",
        b":1x\r\n",
        b":" + b"1" * 100 + b"\r\n",
        b"_x\r\n",
        b"#x\r\n",
        b",x\r\n",
        b",1_0\r\n",
        b"*1\r\n" * 17,
        b"+" + b"x" * 70_000,
        b"$" + b"1" * 70_000,
    ],
)
def test_anything_else_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parsed(data)


def test_a_long_bulk_is_received_in_the_memory_given_for_it() -> None:
    memory = bytearray(100_000)
    parser = ReplyParser(lambda length: memoryview(memory)[:length], inline_bulk_bytes=10)
    parser.feed(b"$100000\r\nab")
    window = parser.get_buffer()
    assert len(window) == 99_998
    window[:] = b"y" * 99_998
    assert memory[1:3] == b"by"
    parser.buffer_updated(99_998)
    assert not parser.replies
    parser.feed(b"\r\n")
    assert parser.idle is False
    assert parser.replies.popleft() == memory
    assert parser.idle


def test_the_item_that_is_being_read_is_known() -> None:
    seen: list[int] = []
    parser = ReplyParser(inline_bulk_bytes=0)

    def open_bulk(length: int) -> memoryview:
        seen.append(parser.item_index)
        return memoryview(bytearray(length))

    parser.receive_into(open_bulk, 0)
    parser.feed(b"*4\r\n$1\r\na\r\n$-1\r\n$1\r\nb\r\n$1\r\nc\r\n$1\r\nd\r\n")
    assert seen == [0, 2, 3, 0]


@pytest.mark.parametrize("inline", [0, 10, 32_000])
def test_raw_bytes_are_those_that_arrived(inline: int) -> None:
    parser = ReplyParser(inline_bulk_bytes=inline)
    parser.keep_raw(True)
    parser.feed(STREAM)
    assert parser.take_raw() == STREAM


values = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.binary(max_size=60)
    | st.floats(allow_nan=False)
    | st.text("abc \u00e9", max_size=5).map(Simple),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.tuples(inner, inner), max_size=2).map(Map)
        | st.lists(inner, max_size=3).map(Set)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(values, st.integers(0, 200))
def test_what_is_encoded_in_resp3_reads_back(value: Reply, cut: int) -> None:
    data = resp.encode(value, 3)
    (back,) = parsed(data, min(cut, len(data)), inline_bulk_bytes=20)
    if isinstance(value, float):
        assert back == value
    else:
        assert comparable(back) == comparable(value)
