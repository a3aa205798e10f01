"""Keys as clients meet them: redis-py, long values, scans, deadlines, guards, INFO."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from pion_vllm_mlx.server.keyspace.changes import Assembler, Verb, change
from pion_vllm_mlx.server.keyspace.data import Data
from pion_vllm_mlx.server.keyspace.recovery import WAL_MAGIC
from pion_vllm_mlx.server.store import framing
from tests.conftest import RunningServer
from tests.server.wire import Refusal, Wire, settle

MB = 1 << 20


@pytest.fixture(params=[2, 3])
def client(request: pytest.FixtureRequest, shared: RunningServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=shared.port, protocol=request.param) as connection:
        connection.flushall()
        yield connection


def test_redis_py_gets_the_python_type_of_every_reply(client: redis.Redis) -> None:
    assert client.set("k", b"\x01\x02\xff") is True
    assert client.get("k") == b"\x01\x02\xff"
    assert client.get("none") is None
    assert client.set("k", "w", nx=True) is None
    assert client.incr("n") == 1
    assert client.hset("h", mapping={"a": "1", "b": "2"}) == 2
    assert client.hgetall("h") == {b"a": b"1", b"b": b"2"}
    assert client.hmget("h", ["a", "none"]) == [b"1", None]
    assert client.zadd("z", {"x": 0.1, "y": 2}) == 2
    assert [tuple(pair) for pair in client.zrange("z", 0, 511, withscores=True)] == [
        (b"x", 0.1),
        (b"y", 2.0),
    ]
    assert client.zscore("z", "x") == 0.1
    assert client.sadd("s", "m") == 1
    assert set(client.smembers("s")) == {b"m"}
    assert client.rpush("l", "1", "2") == 2
    assert client.lpop("l", 5) == [b"1", b"2"]
    assert client.lpop("l", 5) is None
    assert client.expire("k", 100) is True or client.expire("k", 100) == 1
    assert 99 <= client.ttl("k") <= 100
    assert client.type("z") == b"zset"
    assert sorted(client.scan_iter(match="[kn]")) == [b"k", b"n"]
    assert client.info("keyspace") == {"db0": {"keys": 5, "expires": 1, "avg_ttl": 0}}
    with client.pipeline() as pipe:
        pipe.set("k", 1).incr("k").hgetall("h").zrange("z", 0, 0)
        answers = pipe.execute()
    assert answers == [True, 2, {b"a": b"1", b"b": b"2"}, [b"x"]]
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        client.incr("h")


def test_redis_benchmark_and_redis_cli_run_through(shared: RunningServer, wire: Wire) -> None:
    if shutil.which("redis-benchmark") is None or shutil.which("redis-cli") is None:
        pytest.skip("redis-tools are not installed")
    commands = "ping,set,get,incr,lpush,rpush,lpop,rpop,sadd,hset,mset,lrange_100"
    words = ["redis-benchmark", "-p", str(shared.port), "-n", "200", "-c", "5", "-q"]
    done = subprocess.run([*words, "-t", commands], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "rror" not in done.stdout, done.stdout
    assert done.stdout.count("requests per second") >= 12
    names = subprocess.run(
        ["redis-cli", "-p", str(shared.port), "--scan"], capture_output=True, timeout=30, check=True
    )
    assert set(names.stdout.split()) == set(wire.ask("KEYS", "*"))


def test_a_transaction_of_redis_py_retries_until_nobody_interferes(client: redis.Redis) -> None:
    interfered = []

    def add_one(pipe: redis.client.Pipeline) -> None:
        value = int(pipe.get("n") or 0)
        if not interfered:
            interfered.append(client.incr("n"))
        pipe.multi()
        pipe.set("n", value + 1)

    client.transaction(add_one, "n")
    assert client.get("n") == b"2"


def test_every_key_of_a_large_keyspace_is_scanned_once_while_others_come_and_go(
    wire: Wire,
) -> None:
    stay = {b"stay:%d" % number for number in range(3000)}
    wire.ok("MSET", *(word for name in sorted(stay) for word in (name, b"v")))
    seen: list[bytes] = []
    cursor, steps = b"0", 0
    while steps == 0 or cursor != b"0":
        wire.ok("SET", f"come:{steps}", "v")
        wire.ask("DEL", f"come:{steps - 1}")
        cursor, names = wire.ask("SCAN", cursor, "MATCH", "stay:*")
        seen += names
        steps += 1
    assert steps > 2
    assert len(seen) == len(set(seen))
    assert set(seen) == stay


def test_a_long_value_goes_in_and_out_whole(wire: Wire) -> None:
    value = os.urandom(33 * MB + 7)
    wire.ok("SET", "long", value)
    assert wire.ask("GET", "long") == value
    assert wire.ask("STRLEN", "long") == len(value)
    assert wire.ask("HSET", "h", value[:100_000], value[:MB], "g", "short") == 2
    assert wire.ask("HGET", "h", value[:100_000]) == value[:MB]
    assert wire.ask("APPEND", "long", value[: 2 * MB]) == len(value) + 2 * MB
    assert wire.ask("MGET", "long", "none") == [value + value[: 2 * MB], None]
    settle(wire)


def test_two_clients_with_long_values_do_not_mix_them(shared: RunningServer, wire: Wire) -> None:
    values = [bytes([number]) * (3 * MB) for number in range(4)]

    def work(number: int) -> None:
        with Wire.tcp(shared.port) as mine:
            for _ in range(5):
                mine.ok("SET", f"own{number}", values[number])
                mine.ok("SET", "common", values[number])
                assert mine.ask("GET", f"own{number}") == values[number]
                assert mine.ask("GET", "common") in values

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wire.ask("GET", "own3") == values[3]


def test_a_pipeline_of_long_and_short_commands_is_answered_in_order(wire: Wire) -> None:
    value = os.urandom(2 * MB)
    answers = wire.together(
        ("SET", "k", value), ("GET", "k"), ("INCR", "n"), ("GET", "k"), ("STRLEN", "k"), ("PING",)
    )
    assert answers == ["OK", value, 1, value, len(value), "PONG"]


def test_a_long_value_may_wait_in_a_transaction(wire: Wire) -> None:
    value = os.urandom(2 * MB)
    answers = wire.together(("MULTI",), ("SET", "k", value), ("GET", "k"), ("EXEC",))
    assert answers == ["OK", "QUEUED", "QUEUED", ["OK", value]]


def test_a_key_past_its_deadline_is_gone_for_every_command(wire: Wire) -> None:
    wire.ok("SET", "k", "v", "PX", "1")
    assert wire.ask("HSET", "h", "f", "1") == 1
    assert wire.ask("PEXPIRE", "h", "1") == 1
    time.sleep(0.01)
    assert wire.ask("GET", "k") is None
    assert wire.ask("EXISTS", "k", "h") == 0
    assert wire.ask("KEYS", "*") == []
    assert wire.ask("SCAN", "0") == [b"0", []]
    assert wire.ask("DBSIZE") == 0
    assert wire.ask("TTL", "h") == -2
    # what is written now starts anew
    assert wire.ask("HSET", "h", "g", "2") == 1
    assert wire.ask("HGETALL", "h") == [b"g", b"2"]
    assert wire.ask("TTL", "h") == -1
    assert wire.ask("APPEND", "k", "x") == 1


def test_a_watched_key_that_ends_breaks_the_transaction(wire: Wire) -> None:
    wire.ok("SET", "k", "v", "PX", "20")
    wire.ok("WATCH", "k")
    wire.ok("MULTI")
    wire.ask("SET", "x", "1")
    time.sleep(0.03)
    assert wire.ask("EXEC") is None
    assert wire.ask("EXISTS", "x") == 0


def test_keys_that_ended_are_deleted_without_being_asked_for(
    shared: RunningServer, wire: Wire
) -> None:
    names = {b"ends%d" % number for number in range(100)}
    wire.together(*(("SET", name, "v", "PX", "1") for name in sorted(names)))

    def deleted() -> set[bytes]:
        log = memoryview((shared.dir / "pion.wal.0").read_bytes())
        frames = framing.scan(log, WAL_MAGIC, "pion.wal.0").frames
        batches = Assembler()
        changes = [one for frame in frames for one in batches.add(frame.op, frame.payload)]
        return {key for one in changes if one.verb is Verb.DELETE for key in one.keys}

    deadline = time.monotonic() + 10
    while not names <= deleted():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert wire.ask("DBSIZE") == 0


def test_a_key_that_is_being_deleted_is_not_counted() -> None:
    data = Data()
    data.apply(change(Verb.SET, b"k", b"v"))
    data.apply(change(Verb.DEADLINE, b"k", b"10"))
    assert data.size(9) == 1
    assert data.expired(10, 5) == [b"k"]
    assert data.size(10) == 0


def test_a_key_that_went_and_came_again_is_scanned_once(wire: Wire) -> None:
    for _ in range(3):
        wire.ok("MSET", "a", "1", "b", "2")
        wire.ask("DEL", "a")
    wire.ok("SET", "a", "1")
    assert sorted(wire.ask("SCAN", "0")[1]) == [b"a", b"b"]


def test_nobody_sees_a_transaction_half_done(shared: RunningServer, wire: Wire) -> None:
    stop = threading.Event()
    torn: list[object] = []

    def watch() -> None:
        with Wire.tcp(shared.port) as other:
            while not stop.is_set():
                a, b = other.ask("MGET", "a", "b")
                if a != b:
                    torn.append((a, b))

    thread = threading.Thread(target=watch)
    thread.start()
    for number in range(200):
        wire.together(("MULTI",), ("SET", "a", number), ("SET", "b", number), ("EXEC",))
    stop.set()
    thread.join()
    assert torn == []


def test_what_is_no_key_command_has_no_place_in_a_transaction(wire: Wire) -> None:
    for words in (("V.CREATE", "x", "4"), ("SAVE",), ("HELLO", "3"), ("KV.PREFIX.INFO",)):
        wire.ok("MULTI")
        assert wire.ask("SET", "k", "v") == "QUEUED"
        answer = wire.ask(*words)
        assert isinstance(answer, Refusal) and "transaction" in answer
        assert wire.ask("EXEC").startswith("EXECABORT")
    assert wire.ask("EXISTS", "k") == 0


def test_reset_and_a_lost_connection_forget_a_transaction(
    shared: RunningServer, wire: Wire
) -> None:
    wire.together(("WATCH", "k"), ("MULTI",), ("SET", "k", "v"), ("RESET",))
    assert wire.ask("EXEC") == "ERR EXEC without MULTI"
    for _ in range(3):
        with Wire.tcp(shared.port) as other:
            other.together(("WATCH", "k"), ("MULTI",), ("SET", "k", "w"))
    assert wire.ask("EXISTS", "k") == 0


def test_flushing_keys_leaves_prefixes_alone(wire: Wire) -> None:
    wire.ok("KV.PREFIX.REGISTER", "ns", "8", "fp16")
    wire.ok("SET", "k", "v")
    assert wire.info("INFO", "keyspace")["db0"].startswith("keys=1,")
    wire.ok("FLUSHALL")
    assert wire.ask("KV.PREFIX.LOOKUP", "ns") == "HIT"
    assert "db0" not in wire.info("INFO", "keyspace")


def test_command_docs_and_info_list_the_key_commands(wire: Wire) -> None:
    docs = wire.ask("COMMAND", "DOCS", "mset")
    assert docs[0] == b"mset"
    assert docs[1][docs[1].index(b"group") + 1] == b"keyspace"
    (entry,) = wire.ask("COMMAND", "INFO", "mset")
    assert entry[3:6] == [1, -1, 2]


def test_keys_are_not_held_against_the_namespace_prefix_and_need_no_kvcache(
    pion_server: RunningServer,
) -> None:
    pion_server.restart("--ns-prefix", "team:")
    with Wire.tcp(pion_server.port) as wire:
        wire.ok("SET", "other", "v")
        assert wire.ask("GET", "other") == b"v"


def test_a_stranger_gets_no_key_and_begins_no_transaction(pion_server: RunningServer) -> None:
    pion_server.restart("--requirepass", "secret")
    with Wire.tcp(pion_server.port) as wire:
        for words in (("GET", "k"), ("SET", "k", "v"), ("MULTI",), ("EXEC",), ("WATCH", "k")):
            assert wire.ask(*words) == "NOAUTH Authentication required."
        assert wire.ask("SET", "k", b"x" * 16_000) == "NOAUTH Authentication required."
        wire.ok("AUTH", "secret")
        assert wire.ask("GET", "k") is None
