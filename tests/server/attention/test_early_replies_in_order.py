"""A reply that may leave early stays behind what the event loop has not sent yet."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

from pion_vllm_mlx.server.attention.engine import Call, Engine
from pion_vllm_mlx.server.binary_lane import BinaryConnection
from tests.recovery.driving import Driver
from tests.server.attention.asking import fused_body, normal
from tests.server.memory.lane import FETCH, MISS, OK, QUERY_FUSED, STORE, Lane, frame, named

_BUFFER_BYTES = 4096
_ROWS_BYTES = 14_000
_FOUND_BYTES = 32 * 4
_ALL_BYTES = 3 * 7 + _ROWS_BYTES + _FOUND_BYTES


async def _until_it_stands_still(server_side: BinaryConnection) -> None:
    """Wait until the connection waits for its query while something is unsent."""
    while server_side.running is None or not server_side._full:
        await asyncio.sleep(0.001)


async def _replies(driver: Driver) -> list[tuple[int, bytes]]:
    """Those to a refused query, rows and a query, of a client that reads only part at first."""
    server, loop = driver.server, asyncio.get_running_loop()
    engine: Engine = server.attention.engine
    made: list[BinaryConnection] = []

    def connection() -> BinaryConnection:
        made.append(BinaryConnection(server))
        return made[-1]

    with socket.create_server(("127.0.0.1", 0)) as door, socket.socket() as ours:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        listener = await loop.create_server(connection, sock=door.dup())
        ours.settimeout(20)
        ours.connect(door.getsockname())
        lane = Lane(ours)
        rows = bytes(_ROWS_BYTES)
        await asyncio.to_thread(lane.ok, STORE, named("rows", ("H", 0), rest=rows))
        suffix = normal(3, 1, 4, 32), normal(4, 1, 4, 32)
        asked = [fused_body(sid, 0, normal(5, 1, 1, 32), suffix, b"\0") for sid in ("no", "yes")]
        free, answered = threading.Event(), threading.Event()
        busy = engine.begin(Call(free.wait))
        fetch = frame(FETCH, named("rows", ("H", 0)))
        ours.sendall(frame(QUERY_FUSED, asked[0]) + fetch + frame(QUERY_FUSED, asked[1]))
        await _until_it_stands_still(made[0])
        behind = engine.begin(Call(answered.set))
        # no await: the event loop does not get to send what is unsent
        start = ours.recv(_ROWS_BYTES // 4)
        free.set()
        assert answered.wait(20)
        await asyncio.gather(busy, behind)
        rest = await asyncio.to_thread(lane.incoming.read, _ALL_BYTES - len(start))
        made[0].close()
        listener.close()
        await asyncio.sleep(0)
    return _cut(start + rest)


def _cut(stream: bytes) -> list[tuple[int, bytes]]:
    replies, at = [], 0
    while at < len(stream):
        assert stream[at : at + 2] == b"\x5e\xca"
        length = int.from_bytes(stream[at + 3 : at + 7], "little")
        replies.append((stream[at + 2], stream[at + 7 : at + 7 + length]))
        at += 7 + length
    return replies


def test_after_a_refused_query_no_reply_overtakes_what_is_unsent(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        keys = normal(1, 1, 8, 32).tobytes()
        driver.ask("ATTEND.PREFIX.STORE", "yes", 0, 1, 8, 32, keys, keys)
        refused, rows, found = driver.loop.run_until_complete(_replies(driver))
        driver.server.attention.close()
    assert refused == (MISS, b"")
    assert rows == (OK, bytes(_ROWS_BYTES))
    assert found[0] == OK and len(found[1]) == _FOUND_BYTES
