"""Replies that leave from the thread that computed them: in order, whole, and never to others."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pion_vllm_mlx.server.attention.engine import Call, Engine
from pion_vllm_mlx.server.early_reply import EarlyReply
from pion_vllm_mlx.server.long_arguments import CACHE_LINE_BYTES, LongArguments
from tests.server.attention import oracle
from tests.server.attention.asking import Asking, fused_body, normal
from tests.server.memory.lane import OK, PING, QUERY_FUSED, frame


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends; the first does not block."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_one_reply_leaves_and_then_none(pair: tuple[socket.socket, socket.socket]) -> None:
    early = EarlyReply()
    early.send(b"too early")
    early.open(pair[0])
    early.send(b"reply")
    early.send(b"twice")
    assert early.close() == b""
    early.send(b"too late")
    assert early.close() is None
    assert pair[1].recv(100) == b"reply"


def test_what_was_taken_back_is_not_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    early = EarlyReply()
    early.open(pair[0])
    assert early.close() is None
    early.send(b"too late")
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(100)


def test_what_the_socket_does_not_take_is_left(pair: tuple[socket.socket, socket.socket]) -> None:
    early, reply = EarlyReply(), np.arange(1 << 20, dtype="<u4").tobytes()
    early.open(pair[0])
    early.send(reply)
    left = early.close()
    assert left and reply.endswith(left)
    assert pair[1].recv(len(reply) - len(left), socket.MSG_WAITALL) + left == reply
    early.open(pair[0])
    pair[0].close()
    early.send(b"nobody gets this")
    assert early.close() is None  # the transport finds out why


def test_what_follows_is_made_on_the_thread_and_its_failure_is_told() -> None:
    async def work() -> None:
        engine = Engine()
        made = engine.begin_then(Call(lambda: 2), lambda n: (n + 1, threading.current_thread()))
        number, thread = await made
        assert number == 3 and thread is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await engine.begin_then(Call(lambda: 0), lambda n: 1 // n)
        assert await engine.call(lambda: "goes on") == "goes on"
        engine.close()

    asyncio.run(work())


def test_attention_between_other_operations_is_answered_in_its_place(ask: Asking) -> None:
    keys, values = normal(1, 2, 300, 32), normal(2, 2, 300, 32)
    ask.store(keys, values)
    suffix = normal(3, 2, 4, 32), normal(4, 2, 4, 32)
    queries = [normal(10 + n, 2, 1, 32) for n in range(4)]
    wanted = [oracle.fused(q, (keys, values), suffix) for q in queries]
    codes = (PING, PING, QUERY_FUSED, PING, QUERY_FUSED)
    bodies = [fused_body(ask.sid, ask.layer, q, suffix, bytes(range(2))) for q in queries]
    burst = b"".join(
        frame(code, body if code == QUERY_FUSED else b"") for body in bodies for code in codes
    )
    for _ in range(20):
        ask.lane.sock.sendall(burst)
        for right in wanted:
            for code in codes:
                status, body = ask.lane.reply()
                assert status == OK
                if code == PING:
                    assert body == b""
                else:
                    found = np.frombuffer(body, "<f4").reshape(right.shape)
                    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 100_000, 131_073, (5 << 20) + 3])
def test_long_arguments_lie_at_a_cache_line_and_arrive_whole(length: int) -> None:
    sent = np.random.default_rng(length).bytes(length)
    argument = LongArguments().open(length, lambda: None)
    at = 0
    while at < length:
        window = argument.buffer()
        assert window is not None
        count = min(len(window), 70_001)
        window[:count] = sent[at : at + count]
        argument.advance(count)
        at += count
    assert np.frombuffer(argument.view, np.uint8).ctypes.data % CACHE_LINE_BYTES == 0
    assert argument.view == sent
