"""redis-py, blocking and asyncio, parses every type of reply in RESP2 and in RESP3."""

from __future__ import annotations

import asyncio
import os
import random
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
import redis.asyncio

from pion_vllm_mlx.server import commands
from pion_vllm_mlx.server.command import TABLE
from tests.conftest import RunningServer
from tests.server.wire import Wire

ROW = struct.pack("<4f", 1, -2, 0.5, 0)
assert commands.__all__  # they fill the table
#: they end the connection or the server, or change what the connection speaks; redis-py hangs
#: up itself when AUTH is refused.
_APART = {b"SHUTDOWN", b"QUIT", b"RESET", b"HELLO", b"MULTI", b"EXEC", b"DISCARD", b"AUTH"}


@pytest.fixture(params=[2, 3])
def client(request: pytest.FixtureRequest, shared: RunningServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=shared.port, protocol=request.param) as connection:
        connection.flushall()
        yield connection


def raw(client: redis.Redis, *words: object) -> Any:
    """The reply as redis-py's parser gives it, before it is turned into anything."""
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command(*words)
        return connection.read_response()
    finally:
        client.connection_pool.release(connection)


def is_resp3(client: redis.Redis) -> bool:
    return int(client.connection_pool.connection_kwargs["protocol"]) == 3


def test_every_type_of_reply_is_parsed(client: redis.Redis, ns: str) -> None:
    new = is_resp3(client)
    raw(client, "HSET", "h", "f", "1", "g", b"\x00\xff")
    raw(client, "SADD", "s", "m")
    raw(client, "ZADD", "z", "0.25", "a", "inf", "b")
    raw(client, "RPUSH", "l", "1", "")
    for words, expected in (
        (("PING",), b"PONG"),
        (("ECHO", b"\r\n\x00\xff"), b"\r\n\x00\xff"),
        (("ECHO", ""), b""),
        (("GET", "none"), None),
        (("INCRBY", "n", -7), -7),
        (("TTL", "none"), -2),
        (("LPOP", "none", 2), None),
        (("LRANGE", "none", 0, -1), []),
        (("LRANGE", "l", 0, -1), [b"1", b""]),
        (("MGET", "none", "n"), [None, b"-7"]),
        (("SMEMBERS", "s"), {b"m"} if new else [b"m"]),
        (("SMEMBERS", "none"), set() if new else []),
        (
            ("HGETALL", "h"),
            {b"f": b"1", b"g": b"\x00\xff"} if new else [b"f", b"1", b"g", b"\x00\xff"],
        ),
        (("HGETALL", "none"), {} if new else []),
        (("ZSCORE", "z", "a"), 0.25 if new else b"0.25"),
        (("ZSCORE", "z", "b"), float("inf") if new else b"inf"),
        (
            ("ZRANGE", "z", 0, -1, "WITHSCORES"),
            [[b"a", 0.25], [b"b", float("inf")]] if new else [b"a", b"0.25", b"b", b"inf"],
        ),
        (("SCAN", 0, "MATCH", "nothing*"), [b"0", []]),
        (("KV.PREFIX.LOOKUP", ns), b"MISS"),
        (("V.INFO", "absent"), None),
    ):
        found = raw(client, *words)
        # newer versions of redis-py give sets of RESP3 as lists
        found = set(found) if isinstance(expected, set) else found
        assert found == expected and type(found) is type(expected), words
    docs = raw(client, "COMMAND", "DOCS", "get")
    assert isinstance(docs, dict if new else list)


def test_an_error_is_raised_alone_and_returned_inside_of_an_array(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="^WRONGTYPE|wrong kind"):
        client.set("k", "v")
        client.lpush("k", "x")
    pipe = client.pipeline(transaction=True)
    pipe.incr("n").lpush("k", "x").get("k")
    answers = pipe.execute(raise_on_error=False)
    assert answers[0] == 1 and answers[2] == b"v"
    assert isinstance(answers[1], redis.ResponseError)
    with client.pipeline() as watching:
        watching.watch("k")
        client.set("k", "other")
        watching.multi()
        watching.get("k")
        # the null array
        with pytest.raises(redis.WatchError):
            watching.execute()


def test_every_command_of_the_table_gives_redis_py_one_reply(client: redis.Redis) -> None:
    names = sorted(TABLE.keys() - _APART)
    assert len(names) > 100
    connection = client.connection_pool.get_connection()
    for name in names:
        for words in ((), ("a",), ("a", "b"), ("a", "1", "c", "d")):
            connection.send_command(name, *words)
            connection.send_command("ECHO", name)
            try:
                connection.read_response()
            except redis.RedisError as error:
                assert isinstance(error, redis.ResponseError), (name, words, error)
                assert "internal error" not in str(error), (name, words)
            assert connection.read_response() == name, words
    client.connection_pool.release(connection)


def test_long_replies_and_short_ones_come_in_order(client: redis.Redis, ns: str) -> None:
    dice = random.Random(1)
    values = [os.urandom(dice.choice((0, 10, 20_000, 70_000, 3_000_000))) for _ in range(40)]
    for number, value in enumerate(values):
        client.set(f"k{number}", value)
    order = [dice.randrange(len(values)) for _ in range(120)]
    pipe = client.pipeline(transaction=False)
    for number in order:
        pipe.get(f"k{number}")
        pipe.strlen(f"k{number}")
    answers = pipe.execute()
    assert answers[::2] == [values[number] for number in order]
    assert answers[1::2] == [len(values[number]) for number in order]


def test_text_is_decoded_where_a_client_wants_text(shared: RunningServer, client: Any) -> None:
    protocol = 3 if is_resp3(client) else 2
    with redis.Redis(port=shared.port, protocol=protocol, decode_responses=True) as text:
        text.hset("h", mapping={"ä": "ö"})
        assert text.hgetall("h") == {"ä": "ö"}
        assert text.execute_command("KV.PREFIX.LOOKUP", "ü") == "MISS"
        assert "registered_prefixes" in text.execute_command("KV.PREFIX.INFO")
        assert text.info("server")["redis_version"] == "7.0.0"


@pytest.mark.parametrize("protocol", [2, 3])
def test_many_asyncio_clients_get_their_own_answers(
    shared: RunningServer, ns: str, protocol: int
) -> None:
    async def one(number: int) -> None:
        async with redis.asyncio.Redis(port=shared.port, protocol=protocol) as mine:
            name = f"{ns}.{number}"
            assert await mine.execute_command("KV.PREFIX.LOOKUP", name) == b"MISS"
            await mine.execute_command("KV.PREFIX.REGISTER", name, 4, "fp16")
            row = struct.pack("<4f", number, 0, 0, 0)
            for start in range(10):
                await mine.execute_command("V.STOREBATCH", name + "_pk", 0, start, 1, row)
                await mine.set(name, row * start)
            async with mine.pipeline(transaction=True) as pipe:
                pipe.get(name).incr(name + "n").hgetall("none")
                assert await pipe.execute() == [row * 9, 1, {}]
            batch = await mine.execute_command("V.FETCH", name + "_pk", "BATCH", 0, 10, 2)
            assert batch == [row * 10, None]
            assert await mine.execute_command("KV.PREFIX.LOOKUP", name) == b"HIT"
            assert await mine.execute_command("KV.PREFIX.DROP", name) == 1

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(25)))

    asyncio.run(main())


def test_a_pool_of_threads_shares_connections(shared: RunningServer, client: redis.Redis) -> None:
    pool = redis.BlockingConnectionPool(port=shared.port, max_connections=3, timeout=20)
    with redis.Redis(connection_pool=pool) as many:
        with ThreadPoolExecutor(12) as threads:
            found = list(threads.map(lambda number: many.incr("shared"), range(300)))
    pool.disconnect()
    assert sorted(found) == list(range(1, 301))


def test_subscriptions_and_scripts_are_refused_and_the_connection_lives(wire: Wire) -> None:
    for words in (("SUBSCRIBE", "c"), ("EVAL", "return 1", 0), ("XADD", "s", "*", "f", "v")):
        assert str(wire.ask(*words)).startswith("ERR unknown command"), words
    assert wire.ask("PING") == "PONG"
