"""redis-benchmark and redis-cli, the real programs, in their several modes."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.conftest import RunningServer
from tests.server.wire import Wire, request

pytestmark = pytest.mark.skipif(
    shutil.which("redis-benchmark") is None or shutil.which("redis-cli") is None,
    reason="redis-tools are not installed: apt-get install redis-tools",
)
SHARED_COMMANDS = "ping,set,get,incr,lpush,rpush,lpop,rpop,sadd,hset,zadd,lrange_300,mset"


def benchmark(server: RunningServer, *words: str) -> str:
    """What redis-benchmark prints."""
    command = ["redis-benchmark", "-p", str(server.port), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def cli(server: RunningServer, *words: str, data: bytes = b"") -> bytes:
    """What redis-cli prints, with ``data`` on its standard input."""
    command = ["redis-cli", "-p", str(server.port), *words]
    done = subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)
    return done.stdout


def receipt(wire: Wire) -> dict[bytes, int]:
    fields = wire.ask("PION.STATS")
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return {name: value for name, value in pairs if isinstance(value, int)}


@pytest.mark.parametrize("pipeline", [1, 16])
@pytest.mark.parametrize("protocol", [2, 3])
def test_every_lookup_of_fifty_connections_is_answered_and_counted_once(
    shared: RunningServer, wire: Wire, ns: str, pipeline: int, protocol: int
) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    before = receipt(wire)
    words = ["-c", "50", "-n", "8000", "-P", str(pipeline), "-q", *["-3"] * (protocol == 3)]
    printed = benchmark(shared, *words, "KV.PREFIX.LOOKUP", ns)
    assert "requests per second" in printed and "rror" not in printed
    after = receipt(wire)
    hits = after[b"kvprefix_hits"] - before[b"kvprefix_hits"]
    # with a pipeline redis-benchmark sends whole ones, a few more than it was asked for
    assert 8000 <= hits <= 8000 + 50 * pipeline
    assert pipeline > 1 or hits == 8000
    assert after[b"kvprefix_misses"] == before[b"kvprefix_misses"]


@pytest.mark.parametrize("words", [("-P", "16"), ("-3",), ("--threads", "2"), ("-r", "100")])
def test_the_shared_commands_run_in_every_mode(
    shared: RunningServer, wire: Wire, words: tuple[str, ...]
) -> None:
    printed = benchmark(shared, "-n", "400", "-c", "10", "-q", "-t", SHARED_COMMANDS, *words)
    assert "rror" not in printed, printed
    assert printed.count("requests per second") >= len(SHARED_COMMANDS.split(","))
    wire.ok("FLUSHALL")


def test_a_refusal_reaches_redis_benchmark_as_an_error(shared: RunningServer) -> None:
    command = ["redis-benchmark", "-p", str(shared.port), "-n", "10", "-c", "1", "-e", "-q"]
    done = subprocess.run(
        [*command, "V.FETCH", "absent", "0", "0"], capture_output=True, text=True, timeout=60
    )
    assert "V.FETCH: session not found" in done.stdout + done.stderr


def test_redis_cli_inserts_masses_and_gets_one_reply_for_each(
    shared: RunningServer, wire: Wire, ns: str
) -> None:
    commands = [request("KV.PREFIX.REGISTER", f"{ns}.{number}", 4, "fp16") for number in range(60)]
    commands += [request("SET", f"{ns}:{number}", "v" * number) for number in range(3000)]
    commands.append(request("V.FETCH", "absent", 0, 0))
    printed = cli(shared, "--pipe", data=b"".join(commands)).decode()
    assert f"errors: 1, replies: {len(commands)}" in printed, printed
    assert wire.ask("STRLEN", f"{ns}:2999") == 2999
    wire.ok("FLUSHALL")


def test_redis_cli_sends_any_bytes_and_shows_any_reply(
    shared: RunningServer, wire: Wire, ns: str
) -> None:
    value = os.urandom(200_000)
    assert cli(shared, "-x", "SET", "binary", data=value).strip() == b"OK"
    assert wire.ask("GET", "binary") == value
    assert wire.ask("DEL", "binary") == 1
    assert wire.ask("HSET", "h", "f", "1") == 1
    assert cli(shared, "-3", "HGETALL", "h").split() == [b"f", b"1"]
    assert cli(shared, "-3", "--json", "HGETALL", "h").strip() == b'{"f":"1"}'
    assert cli(shared, "--csv", "MGET", "none", "none").strip() == b"NULL,NULL"
    assert wire.ask("ZADD", "z", "0.1", "m") == 1
    assert cli(shared, "-3", "--json", "ZSCORE", "z", "m").strip() == b"0.1"
    assert cli(shared, "-r", "3", "INCR", "n").split() == [b"1", b"2", b"3"]
    wire.ok("FLUSHALL")
