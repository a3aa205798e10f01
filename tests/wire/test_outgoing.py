"""Commands are sent as they are, and large arguments are not copied."""

from __future__ import annotations

import numpy as np
import pytest

from pion_vllm_mlx.wire.resp import Limits, Part, RequestParser, request_buffers

from .feeding import commands_of, feed


def joined(*commands: list[Part]) -> bytes:
    return b"".join(bytes(buffer) for buffer in request_buffers(commands))


def test_a_command_has_the_documented_bytes() -> None:
    blob = np.array([1, -2, 0.5, 0], np.float32)
    assert joined(["V.STOREBATCH", "p_pk", 0, 0, 1, blob]) == (
        b"*6\r\n$12\r\nV.STOREBATCH\r\n$4\r\np_pk\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\n1\r\n"
        b"$16\r\n\x00\x00\x80\x3f\x00\x00\x00\xc0\x00\x00\x00\x3f\x00\x00\x00\x00\r\n"
    )


def test_every_kind_of_argument_arrives_with_its_bytes() -> None:
    grid = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    parts: list[Part] = [
        b"a",
        bytearray(b"b"),
        memoryview(b"cd")[::1],
        memoryview(b"c-d-")[::2],
        "é",
        -5,
        grid,
        grid.transpose(2, 0, 1),
        np.arange(10, dtype=np.uint16)[::3],
        np.zeros((0, 4), np.float32),
        np.float32([1.5]),
        np.zeros(100_000, np.uint8),
        memoryview(np.ones((200, 100), np.float32)),
    ]
    parser = RequestParser(Limits())
    feed(parser, joined(parts, ["PING"]))
    assert commands_of(parser) == [
        [
            b"a",
            b"b",
            b"cd",
            b"cd",
            b"\xc3\xa9",
            b"-5",
            grid.tobytes(),
            grid.transpose(2, 0, 1).tobytes(),
            b"\0\0\3\0\6\0\t\0",
            b"",
            b"\0\0\xc0\x3f",
            bytes(100_000),
            np.ones(20_000, np.float32).tobytes(),
        ],
        [b"PING"],
    ]


def test_a_large_argument_shares_its_memory() -> None:
    rows = np.zeros((512, 64), np.float32)
    buffers = request_buffers([["SET", "k", rows]])
    assert any(np.shares_memory(np.frombuffer(b, np.uint8), rows) for b in buffers)


@pytest.mark.parametrize("wrong", [1.5, None, True, ["a"]])
def test_an_argument_of_another_type_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError, match="cannot be an argument"):
        request_buffers([["SET", wrong]])  # type: ignore[list-item]
