"""Every command answers with the type a Redis client expects, in RESP2 and RESP3."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.conftest import RunningServer
from tests.server.wire import Status, Wire

ROW = struct.pack("<4f", 1, -2, 0.5, 0)

RECEIPT = (
    "worker_id uptime_in_seconds kvprefix_hits kvprefix_misses kvprefix_hits_measured "
    "kvprefix_tokens_served kvprefix_bytes_served kvprefix_prefill_us_saved "
    "kvprefix_prefill_us_measured prefill_seconds_avoided prefill_seconds_avoided_measured "
    "semantic_hits semantic_misses moe_hits moe_misses vector_queries"
).split()


@pytest.fixture(params=[2, 3])
def proto(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def client(shared: RunningServer, proto: int) -> Iterator[redis.Redis]:
    with redis.Redis(port=shared.port, protocol=proto) as connection:
        yield connection


@pytest.fixture
def talk(wire: Wire, proto: int) -> Wire:
    """A plain connection that speaks the protocol version."""
    answer = wire.ask("HELLO", proto)
    assert isinstance(answer, dict if proto == 3 else list)
    return wire


def pairs(answer: Any) -> dict[bytes, Any]:
    """A map, or the flat array that stands for one in RESP2."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))


def test_hello_describes_the_server_in_the_protocol_it_selects(wire: Wire) -> None:
    flat = wire.ask("HELLO")
    assert isinstance(flat, list)
    for version, kind in ((3, dict), (2, list), (3, dict)):
        answer = wire.ask("HELLO", version, "SETNAME", f"v{version}")
        assert isinstance(answer, kind)
        fields = pairs(answer)
        assert list(fields) == [
            *(b"server", b"version", b"proto", b"id", b"mode", b"role", b"modules"),
        ]
        assert fields[b"proto"] == version and fields[b"modules"] == []
        assert wire.ask("CLIENT", "GETNAME") == b"v%d" % version
    assert isinstance(wire.ask("HELLO"), dict)


def test_every_reply_has_its_type(talk: Wire, proto: int, ns: str) -> None:
    a_map: Any = dict if proto == 3 else list
    sid = ns + "_pk"
    for kind, words in (
        (Status, ("PING",)),
        (bytes, ("PING", "x")),
        (bytes, ("ECHO", "x")),
        (Status, ("SELECT", 0)),
        (int, ("CLIENT", "ID")),
        (type(None), ("CLIENT", "GETNAME")),
        (Status, ("CLIENT", "SETNAME", "me")),
        (Status, ("CLIENT", "SETINFO", "LIB-NAME", "x")),
        (Status, ("CLIENT", "SETINFO", "lib-ver", "1.0")),
        (bytes, ("CLIENT", "INFO")),
        (bytes, ("CLIENT", "LIST")),
        (Status, ("CLIENT", "NO-EVICT", "on")),
        (Status, ("CLIENT", "NO-TOUCH", "on")),
        (list, ("COMMAND",)),
        (int, ("COMMAND", "COUNT")),
        (a_map, ("COMMAND", "DOCS")),
        (list, ("COMMAND", "INFO", "get", "ping")),
        (a_map, ("CONFIG", "GET", "*")),
        (Status, ("CONFIG", "SET", "maxmemory", "0")),
        (bytes, ("INFO",)),
        (int, ("DBSIZE",)),
        (Status, ("FLUSHALL",)),
        (Status, ("FLUSHDB", "ASYNC")),
        (Status, ("SAVE",)),
        (Status, ("BGSAVE",)),
        (int, ("LASTSAVE",)),
        (a_map, ("PION.STATS",)),
        (a_map, ("PION.STATS", "whatever")),
        (Status, ("KV.PREFIX.REGISTER", ns, 4, "fp16", "prefill_ms", 5, "Heads", 1)),
        (Status, ("V.STOREBATCH", sid, 0, 0, 1, ROW)),
        (Status, ("KV.PREFIX.LOOKUP", ns, "tokens", 1, "Prefill_Ms", 2)),
        (Status, ("KV.PREFIX.LOOKUP", "absent")),
        (bytes, ("KV.PREFIX.INFO",)),
        (bytes, ("KV.PREFIX.EXPLAIN", ns)),
        (bytes, ("KV.PREFIX.MAP", ns)),
        (Status, ("KV.PREFIX.MAP", "absent")),
        (Status, ("KV.PREFIX.SAVE",)),
        (Status, ("KV.PREFIX.COMMIT",)),
        (int, ("V.CREATE", ns, 4, "VQUANT", "fp16")),
        (bytes, ("V.INFO",)),
        (bytes, ("V.INFO", sid)),
        (type(None), ("V.INFO", "absent")),
        (bytes, ("V.FETCH", sid, 0, 0)),
        (bytes, ("V.FETCH", sid, 0, "RANGE", 0, 1)),
        (type(None), ("V.FETCH", sid, 1, "RANGE", 0, 1)),
        (list, ("V.FETCH", sid, "BATCH", 0, 1)),
        (bytes, ("V.EXPORT", sid, sid, 0, 1, 1, 1, 4)),
        (Status, ("SSM.PREFIX.STORE", ns, 0, "state")),
        (bytes, ("SSM.PREFIX.FETCH", ns, 0)),
        (type(None), ("SSM.PREFIX.FETCH", ns, 1)),
        (Status, ("SSM.PREFIX.DROP", ns, 0)),
        (Status, ("SSM.PREFIX.DROP", ns)),
        (Status, ("SSM.PREFIX.DROP", "absent")),
        (int, ("V.DROP", ns, "absent")),
        (int, ("KV.PREFIX.DROP", ns, "absent")),
        (Status, ("RESET",)),
    ):
        answer = talk.ask(*words)
        assert type(answer) is kind, (words, answer)
    # RESET went back to RESP2
    assert isinstance(talk.ask("PION.STATS"), list)
    assert talk.ask("QUIT") == "OK"
    assert talk.closed()


def test_redis_py_reads_every_reply(client: redis.Redis, ns: str) -> None:
    assert client.ping() is True
    assert client.echo("x") == b"x"
    assert client.client_id() > 0
    assert client.client_setname("me") and client.client_getname() in (b"me", "me")
    assert any(entry["name"] == "me" for entry in client.client_list())
    assert client.client_info()["name"] == "me"
    assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
    assert client.config_get("app*").keys() == {"appendfsync", "appendonly"}
    assert client.dbsize() == 0
    assert client.command_count() > 30
    assert client.save() and client.lastsave()
    call = client.execute_command
    assert call("KV.PREFIX.REGISTER", ns, 4, "fp16") in (b"OK", "OK")
    assert call("V.STOREBATCH", ns + "_pk", 0, 0, 1, ROW) in (b"OK", "OK")
    assert call("KV.PREFIX.LOOKUP", ns) in (b"HIT", "HIT")
    assert call("V.FETCH", ns + "_pk", 0, "RANGE", 0, 1) == ROW
    assert call("V.FETCH", ns + "_pk", "BATCH", 0, 1, 2) == [ROW, None]
    assert call("V.INFO", "absent") is None
    assert call("KV.PREFIX.DROP", ns) == 1
    receipt = pairs(call("PION.STATS"))
    assert [name.decode() for name in receipt] == RECEIPT
    with pytest.raises(redis.ResponseError, match="unknown command"):
        call("NO.SUCH")
    with pytest.raises(redis.ResponseError, match="^V.FETCH: session not found"):
        call("V.FETCH", "absent", 0, 0)


def test_redis_py_pipelines_get_one_reply_a_command(client: redis.Redis, ns: str) -> None:
    pipe = client.pipeline(transaction=False)
    pipe.execute_command("KV.PREFIX.REGISTER", ns, 4, "fp16")
    for start in range(50):
        pipe.execute_command("V.STOREBATCH", ns + "_pk", 0, start, 1, ROW)
        pipe.execute_command("V.FETCH", ns + "_pk", 0, start)
        pipe.execute_command("KV.PREFIX.LOOKUP", ns, "WRONG")
    replies = pipe.execute(raise_on_error=False)
    assert len(replies) == 151
    assert all(reply in (b"OK", "OK") for reply in replies[1::3])
    assert all(reply == ROW for reply in replies[2::3])
    assert all(isinstance(reply, redis.ResponseError) for reply in replies[3::3])


def test_redis_cli_shows_what_the_server_says(shared: RunningServer, ns: str) -> None:
    def cli(*words: str) -> str:
        command = ["redis-cli", "-p", str(shared.port), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip()

    try:
        assert cli("KV.PREFIX.LOOKUP", ns) == "MISS"
    except FileNotFoundError:
        pytest.skip("redis-cli is not installed")
    assert cli("KV.PREFIX.REGISTER", ns, "4", "fp16") == "OK"
    assert cli("KV.PREFIX.LOOKUP", ns) == "HIT"
    assert cli("-3", "KV.PREFIX.LOOKUP", ns) == "HIT"
    assert cli("-3", "--json", "PION.STATS").count('"kvprefix_hits"') == 1
    assert "registered_prefixes:" in cli("KV.PREFIX.INFO")
    assert cli("V.FETCH", "absent", "0", "0") == "ERR V.FETCH: session not found"
    assert cli("KV.PREFIX.DROP", ns) == "1"


def test_info_has_the_fields_that_clients_read(shared: RunningServer, wire: Wire) -> None:
    text = wire.ask("INFO").decode()
    assert text.endswith("\r\n") and "\r\n\r\n# " in text
    assert "\n" not in text.replace("\r\n", "")
    info = wire.info("INFO")
    assert info["redis_version"] == "7.0.0"
    assert re.match(r"^\d+\.\d+\.\d+\+", info["pion_version"])
    assert int(info["process_id"]) == shared.pid
    assert int(info["tcp_port"]) == shared.port
    assert int(info["uptime_in_seconds"]) >= 0
    assert 4 << 20 < int(info["used_memory"]) <= int(info["used_memory_peak"])
    assert info["maxmemory"] == "0" and info["maxmemory_policy"] == "noeviction"
    assert info["maxmemory_refusing_writes"] == "0"
    assert info["role"] == "master" and info["loading"] == "0"
    assert info["stats_scope"] == "worker"
    assert "db0" not in info
    assert re.fullmatch(r"\d+\.\d{3}", info["prefill_seconds_avoided"])
    assert set(RECEIPT) <= set(info)
    assert "process_id" in wire.info("INFO", "server")
    assert "process_id" not in wire.info("INFO", "memory")
    assert wire.info("INFO", "SERVER", "memory").keys() >= {"process_id", "used_memory"}
    assert wire.info("INFO", "nonsense") == {}


def test_kv_prefix_info_counts_truthfully(wire: Wire, ns: str) -> None:
    before = wire.info("KV.PREFIX.INFO")
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    wire.ok("V.STOREBATCH", ns + "_pk", 0, 0, 1, ROW)
    wire.ok("V.STOREBATCH", ns + "_pk", 0, 5, 1, ROW)
    wire.ok("V.STOREBATCH", ns + "_pv", 3, 0, 1, ROW)
    assert wire.ask("V.CREATE", f"{ns}b_pk", 8) >= 0
    assert wire.ask("V.CREATE", f"{ns}b_pv", 8) >= 0
    assert wire.ask("V.FETCH", ns + "_pk", 9, 0) is None
    assert wire.ask("V.FETCH", ns + "_pk", 0, 0) == ROW
    after = wire.info("KV.PREFIX.INFO")
    grown = {
        name: int(after[name]) - int(before[name])
        for name in (
            *("registered_prefixes", "total_prefix_tokens", "vstore_sessions"),
            *("vstore_bytes", "vstore_total_fetches", "directory_entries", "wal_appended"),
        )
    }
    assert grown == {
        "registered_prefixes": 2,
        "total_prefix_tokens": 6,
        "vstore_sessions": 4,
        "vstore_bytes": 3 * 8,
        "vstore_total_fetches": 2,
        "directory_entries": 4,
        "wal_appended": 7,
    }
    assert int(after["wal_bytes"]) > int(before["wal_bytes"])
    assert after["vstore_max_sessions"] == "256" and after["directory_enabled"] == "1"
    assert wire.info("V.INFO")["enabled"] == "1"
    wire.ok("KV.PREFIX.SAVE")
    saved = wire.info("KV.PREFIX.INFO")
    assert saved["wal_bytes"] == "0" and saved["wal_appended"] == "0"


def test_v_info_describes_a_session(wire: Wire, ns: str) -> None:
    assert wire.ask("V.CREATE", ns, 48, "VQUANT", "mlx4g32") >= 0
    info = wire.info("V.INFO", ns)
    # 48 is not a multiple of 32: int8 instead
    assert info["v_format"] == "int8" and info["schema"] == "uniform" and info["dim"] == "48"
    assert info["session"] == ns and info["bytes"] == "0" and info["snapshots"] == "0"
    wire.ok("V.STOREBATCH", ns, 2, 7, 1, bytes(48 * 4))
    info = wire.info("V.INFO", ns)
    assert info["layer_2_tokens"] == "8" and info["bytes"] == "56"
    assert "layer_0_tokens" not in info


def test_creating_a_session_twice_finds_the_first_one(wire: Wire, ns: str) -> None:
    slot = wire.ask("V.CREATE", ns, 4)
    other = wire.ask("V.CREATE", ns + "x", 4)
    assert slot != other and wire.ask("V.CREATE", ns, 4, "vquant", "INT8") == slot
    # empty: recreated with another schema
    assert wire.ask("V.CREATE", ns, 8, "VQUANT", "fp32") >= 0
    assert wire.info("V.INFO", ns)["v_format"] == "fp32"


def test_registering_again_keeps_rows_and_touches_nothing_else(wire: Wire, ns: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 40, "mlx4g32", "HEADS", 2)
    wire.ok("V.STOREBATCH", ns + "_pk", 0, 0, 1, bytes(160))
    appended = wire.info("KV.PREFIX.INFO")["wal_appended"]
    # 40 fell back to int8; what is compared is what was asked for
    wire.ok("KV.PREFIX.REGISTER", ns, 40, "MLX4G32", "HEADS", 2)
    assert wire.info("KV.PREFIX.INFO")["wal_appended"] == appended
    assert wire.info("V.INFO", ns + "_pk")["v_format"] == "int8"
    assert wire.ask("V.FETCH", ns + "_pk", 0, 0) == bytes(160)
    empty = ns + "empty"
    wire.ok("KV.PREFIX.REGISTER", empty, 4, "fp16")
    wire.ok("KV.PREFIX.REGISTER", empty, 8, "bf16")
    assert wire.info("V.INFO", empty + "_pv")["v_format"] == "bf16"


def test_a_lookup_needs_both_sides_and_drop_counts_namespaces_held(wire: Wire, ns: str) -> None:
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "MISS"
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "HIT"
    for sid in (ns, ns + "@64", ns + "x"):
        wire.ok("SSM.PREFIX.STORE", sid, 1, b"state")
    assert wire.ask("V.DROP", ns + "_pv") == 1
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "MISS"
    explained = json.loads(wire.ask("KV.PREFIX.EXPLAIN", ns))
    assert explained["verdict"] == "miss" and explained["reason"]
    assert wire.ask("KV.PREFIX.DROP", ns, ns, "absent") == 1
    assert wire.ask("KV.PREFIX.DROP", ns) == 0
    assert wire.ask("SSM.PREFIX.FETCH", ns, 1) is None
    assert wire.ask("SSM.PREFIX.FETCH", ns + "@64", 1) is None
    assert wire.ask("SSM.PREFIX.FETCH", ns + "x", 1) == b"state"
    assert json.loads(wire.ask("KV.PREFIX.EXPLAIN", ns))["reason"] == "dropped"
    assert json.loads(wire.ask("KV.PREFIX.EXPLAIN", "never"))["reason"] == "never registered here"


def test_states_are_opaque_and_overwritten_whole(wire: Wire, ns: str) -> None:
    for size in (0, 1, 100, 70_000, 500_000, (4 << 20) + 1, 9 << 20, 3):
        blob = bytes([size % 251]) * size
        wire.ok("SSM.PREFIX.STORE", ns, 65_535, blob)
        assert wire.ask("SSM.PREFIX.FETCH", ns, 65_535) == blob
    wire.ok("SSM.PREFIX.STORE", ns, 0, b"a")
    wire.ok("SSM.PREFIX.DROP", ns, 65_535)
    assert wire.ask("SSM.PREFIX.FETCH", ns, 65_535) is None
    assert wire.ask("SSM.PREFIX.FETCH", ns, 0) == b"a"
    wire.ok("SSM.PREFIX.DROP", ns)
    assert wire.ask("SSM.PREFIX.FETCH", ns, 0) is None


def test_redis_py_can_stop_the_server(pion_server: RunningServer, proto: int) -> None:
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=pion_server.port, protocol=proto, retry=once) as client:
        client.shutdown(nosave=True)
    assert pion_server.process is not None and pion_server.process.wait(timeout=15) == 0


def test_command_docs_mark_extensions_and_say_since_when(wire: Wire) -> None:
    wire.ask("HELLO", 3)
    docs = wire.ask("COMMAND", "DOCS")
    assert {b"summary", b"since", b"group"} <= set(docs[b"ping"])
    assert docs[b"kv.prefix.map"][b"doc_flags"] == ["extension"]
    assert b"doc_flags" not in docs[b"kv.prefix.lookup"]
    assert set(wire.ask("COMMAND", "DOCS", "ping")) == {b"ping"}
    (known, unknown) = wire.ask("COMMAND", "INFO", "v.fetch", "no.such")
    assert known[0] == b"v.fetch" and known[1] == -4 and unknown is None
    assert wire.ask("COMMAND", "COUNT") == len(docs)
    assert [entry[0] for entry in wire.ask("COMMAND", "INFO")] == list(docs)
    assert wire.ask("COMMAND") == []


def test_rows_of_a_wrong_length_are_told_what_was_wanted(wire: Wire) -> None:
    wire.ok("KV.PREFIX.REGISTER", "length", 64, "int8")
    for fmt, wanted in (
        ((), "1024: 4 rows of 64 values (fp32, no FMT)"),
        (("FMT", "F16"), "512: 4 rows of 64 values (fp16, FMT F16)"),
        (("FMT", "STORED"), "288: 4 rows of 64 values (int8, FMT STORED)"),
    ):
        answer = wire.ask("V.STOREBATCH", "length_pk", 0, 0, 4, bytes(600), *fmt)
        assert answer == f"ERR V.STOREBATCH: blob size 600 instead of {wanted}"


def test_client_ids_are_never_reused(shared: RunningServer) -> None:
    seen = []
    for _ in range(5):
        with Wire.tcp(shared.port) as wire:
            seen.append(wire.ask("CLIENT", "ID"))
    assert seen == sorted(set(seen))
