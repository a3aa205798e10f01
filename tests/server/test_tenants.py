"""Tenants: each sees a store of its own, whatever it asks, forges or breaks."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.server import commands as commands  # fills the command table
from pion_vllm_mlx.server.command import TABLE
from pion_vllm_mlx.server.main import main
from tests.conftest import RunningServer, free_port_block
from tests.server.memory.lane import Lane
from tests.server.wire import Refusal, Status, Wire, request

ADMIN = "adminpw"
WRONG = "WRONGPASS invalid username-password pair or user is disabled."
DENIED = "not allowed for tenant"
ROW = struct.pack("<4e", 1, 2, 3, 4)
#: the rows of the protocol's table; what is not there is refused.
ALLOWED = (
    *("GET", "SET", "MSET", "MGET", "RENAME", "DEL", "HSET", "HGET", "HGETALL", "HMGET", "HDEL"),
    *("RPUSH", "LPUSH", "LRANGE", "LPOP", "LLEN", "ZADD", "ZRANGE", "ZREM", "EXPIRE", "TTL"),
    *("INCR", "EXISTS", "TYPE", "KEYS", "SCAN", "MULTI", "EXEC", "DISCARD", "WATCH", "PING"),
    *("ECHO", "INFO", "CLIENT", "SADD", "SMEMBERS", "APPEND", "SETNX"),
    *("KV.PREFIX.REGISTER", "KV.PREFIX.LOOKUP", "KV.PREFIX.DROP", "KV.PREFIX.BLOCKS"),
    *("KV.PREFIX.MEMBERSHIP", "KV.PREFIX.OWNER", "KV.PREFIX.EXPLAIN", "KV.PREFIX.PIN"),
    *("KV.PREFIX.UNPIN", "KV.PREFIX.EXPIRE", "V.CREATE", "V.STOREBATCH", "V.FETCH", "V.DROP"),
    *("V.FREE", "V.SNAPSHOT", "V.RESTORE", "V.COMMIT", "V.INFO"),
    *("SSM.PREFIX.STORE", "SSM.PREFIX.FETCH", "SSM.PREFIX.DROP"),
    *("ATTEND.CREATE", "ATTEND.STORE", "ATTEND.FINALIZE", "ATTEND.QUERY"),
    *("STATE.ALLOC", "STATE.WRITE", "STATE.READ", "STATE.FREE", "KV.PREFIX.WARM"),
    *("ATTEND.PREFIX.STORE", "ATTEND.PREFIX.LOOKUP", "ATTEND.PREFIX.QUERY"),
    *("ATTEND.PREFIX.QUERY_FUSED", "ATTEND.PREFIX.QUERY_SPARSE"),
    *("ATTEND.PREFIX.QUERY_SPARSE_AUTO", "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED"),
)
REFUSED = (
    *("FLUSHALL", "FLUSHDB", "CONFIG", "DBSIZE", "SAVE", "BGSAVE", "LASTSAVE", "SHUTDOWN"),
    *("KV.PREFIX.INFO", "KV.PREFIX.SAVE", "KV.PREFIX.COMMIT", "KV.PREFIX.MAP"),
    *("KV.PREFIX.LONGEST", "PION.STATS", "V.EXPORT", "KV.STORE", "KV.FETCH", "KV.INFO"),
    *("STATE.INFO", "ATTEND.INFO", "ATTEND.QUERYBATCH", "COMMAND"),
)
UNKNOWN = ("EVAL", "SUBSCRIBE", "FT.CREATE", "SORT", "RANDOMKEY", "MONITOR", "KV.PREFIX")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("tenants") / "data"
    folder.mkdir(mode=0o700)
    flags = ("--requirepass", ADMIN, "--tenant", "a=pa", "--tenant=b=p=b", "--bind", "127.0.0.1")
    one = RunningServer(free_port_block(), folder, flags)
    try:
        yield one.start()
    finally:
        one.stop()


@pytest.fixture
def users(server: RunningServer) -> Iterator[dict[str, Wire]]:
    """Connections of tenants a and b and of the admin; the keys are cleared."""
    found = {name: Wire.tcp(server.port) for name in ("a", "b", "admin")}
    found["a"].ok("AUTH", "a", "pa")
    found["b"].ok("AUTH", "b", "p=b")
    found["admin"].ok("AUTH", ADMIN)
    found["admin"].ok("FLUSHALL")
    yield found
    for wire in found.values():
        wire.close()


def refused(answer: Any, fragment: str) -> None:
    assert isinstance(answer, Refusal) and fragment in answer, answer


# -- who is who ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--tenant", "a=b"], "--tenant requires --requirepass"),
        (["--requirepass", "x", "--tenant", "a"], "invalid --tenant argument"),
        (["--requirepass", "x", "--tenant", "=b"], "invalid --tenant argument"),
        (["--requirepass", "x", "--tenant", "a="], "invalid --tenant argument"),
        (["--requirepass", "x", "--tenant", "a:b=c"], "invalid --tenant argument"),
        (["--requirepass", "x", "--tenant", "a" * 65 + "=c"], "invalid --tenant argument"),
        (["--requirepass", "x", "--tenant", "ä=c"], "invalid --tenant argument"),
        (["--requirepass", "x", "--tenant", "default=c"], "invalid --tenant argument"),
        (["--requirepass", "x", "--tenant", "pps=c"], "is not 'default' or 'pps'"),
        (["--requirepass", "x", "--tenant", "a=x"], "password of the server"),
        (["--requirepass", "x", "--tenant", "a=b", "--tenant", "a=c"], "given twice"),
        (["--requirepass", "x", "--tenant-quota", "a=5"], "no tenant a"),
        (["--requirepass", "x", "--tenant", "a=b", "--tenant-quota", "a=0"], "--tenant-quota"),
        (["--requirepass", "x", "--tenant", "a=b", "--tenant-quota", "a"], "--tenant-quota"),
    ],
)
def test_tenants_that_would_be_unsafe_are_fatal(
    capsys: pytest.CaptureFixture[str], flags: list[str], fragment: str
) -> None:
    assert main(["-p", "0", "--dir", "/no/such/folder", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("FATAL ") and fragment in error


def test_an_unbound_connection_gets_nothing(server: RunningServer) -> None:
    with Wire.tcp(server.port) as wire:
        for words in (("GET", "k"), ("PING",), ("EVAL", "x"), ("INFO",), ("GET",)):
            refused(wire.ask(*words), "NOAUTH Authentication required.")
        refused(wire.ask("HELLO", 3), "NOAUTH")


def test_wrong_credentials_bind_nothing_and_change_nothing(server: RunningServer) -> None:
    pairs = [("a", ADMIN), ("b", "pa"), ("default", "pa"), ("c", "pa"), ("", "pa"), ("A", "pa")]
    with Wire.tcp(server.port) as wire:
        for pair in pairs:
            assert wire.ask("AUTH", *pair) == WRONG
            assert wire.ask("HELLO", 3, "AUTH", *pair) == WRONG
        assert wire.ask("AUTH", "pa") == WRONG
        refused(wire.ask("PING"), "NOAUTH")
        wire.ok("AUTH", "a", "pa")
        assert wire.ask("HELLO", 2, "AUTH", "a", ADMIN) == WRONG
        refused(wire.ask("DBSIZE"), DENIED)


def test_a_tenants_name_opens_no_server_without_passwords(tmp_path: Path) -> None:
    server = RunningServer(free_port_block(), tmp_path / "data")
    try:
        server.start()
        with Wire.tcp(server.port) as wire:
            assert wire.ask("HELLO", 3, "AUTH", "a", "pa") == WRONG
            # as in Redis: the one user there is needs no password, whichever is given
            assert isinstance(wire.ask("HELLO", 3, "AUTH", "default", "pa"), dict)
    finally:
        server.stop()


def test_hello_binds_a_tenant_and_reset_unbinds_it(server: RunningServer) -> None:
    with Wire.tcp(server.port) as wire:
        assert isinstance(wire.ask("HELLO", 3, "AUTH", "a", "pa"), dict)
        refused(wire.ask("DBSIZE"), DENIED)
        assert wire.ask("RESET") == "RESET"
        refused(wire.ask("GET", "k"), "NOAUTH")
        wire.ok("AUTH", "default", ADMIN)
        assert isinstance(wire.ask("DBSIZE"), int)
        wire.ok("AUTH", "b", "p=b")
        refused(wire.ask("DBSIZE"), DENIED)


def test_the_binary_lane_takes_the_admin_alone(server: RunningServer) -> None:
    for password in (b"pa", b"p=b", b"a pa", struct.pack("<H", 2) + b"pa"):
        with Lane.tcp(server.port + 1) as lane:
            assert lane.ask(0x37, password)[0] != 0
            assert lane.ask(0xFF)[0] != 0


# -- what is allowed -----------------------------------------------------------


def test_the_table_allows_what_the_protocol_lists_and_nothing_else(
    users: dict[str, Wire],
) -> None:
    connection = {"AUTH", "HELLO", "QUIT", "RESET", "SELECT", "UNWATCH"}
    marked = {entry.name for entry in TABLE.values() if entry.tenant or entry.no_auth}
    others = {entry.name for entry in TABLE.values() if entry.keyspace and entry.keys}
    assert set(ALLOWED) <= marked <= set(ALLOWED) | connection | others
    assert not marked & set(REFUSED)
    for entry in TABLE.values():
        if entry.name not in marked:
            refused(users["a"].ask(entry.name, *["1"] * (abs(entry.arity) - 1)), DENIED)
            refused(users["a"].ask(entry.name), DENIED)


@pytest.mark.parametrize("name", [*REFUSED, *UNKNOWN])
def test_what_is_not_listed_is_refused_with_any_arguments(
    users: dict[str, Wire], name: str
) -> None:
    for words in ((), ("x",), ("x", "1", "y"), ("x", "y" * 100_000), ("GET", "k")):
        for spelling in (name, name.lower()):
            answer, pong = users["a"].together((spelling, *words), ("PING",))
            assert answer.startswith("NOPERM ") and DENIED in answer
            assert pong == "PONG"
    users["a"].ok("MULTI")
    refused(users["a"].ask(name, "x"), DENIED)
    assert users["a"].ask("EXEC").startswith("EXECABORT")


def test_the_form_of_v_info_that_is_about_the_server_is_refused(users: dict[str, Wire]) -> None:
    refused(users["a"].ask("V.INFO"), DENIED)
    assert users["a"].ask("V.INFO", "x") is None
    assert b"vstore_sessions" in users["admin"].ask("V.INFO")


# -- keys ----------------------------------------------------------------------


def test_keys_of_the_same_name_are_different_keys(users: dict[str, Wire]) -> None:
    a, b, admin = users["a"], users["b"], users["admin"]
    a.ok("SET", "k", "of a")
    b.ok("SET", "k", "of b")
    admin.ok("SET", "k", "of admin")
    assert [wire.ask("GET", "k") for wire in (a, b, admin)] == [b"of a", b"of b", b"of admin"]
    assert admin.ask("MGET", "a:k", "b:k") == [b"of a", b"of b"]
    assert b.ask("DEL", "k", "k", "a:k") == 1
    assert a.ask("GET", "k") == b"of a"


@pytest.mark.parametrize("forged", ["b:k", ":b:k", "b:k\0", "../b:k", "*", "a:b:k", ""])
def test_a_forged_key_is_a_key_of_ones_own(users: dict[str, Wire], forged: str) -> None:
    a, b = users["a"], users["b"]
    b.ok("SET", "k", "secret")
    assert a.ask("GET", forged) is None
    a.ok("SET", forged, "mine")
    assert a.ask("KEYS", "*") == [forged.encode()]
    assert b.ask("GET", "k") == b"secret" and b.ask("KEYS", "*") == [b"k"]
    a.ok("RENAME", forged, "b:k2")
    a.ok("MSET", "b:x", "1", "b:k", "2")
    assert b.ask("KEYS", "*") == [b"k"] and b.ask("GET", "k") == b"secret"
    assert b.ask("EXISTS", "x", "k2") == 0


def test_a_key_longer_than_a_word_is_still_ones_own(users: dict[str, Wire]) -> None:
    a, admin = users["a"], users["admin"]
    key = "k" * 70_000
    for words in (("SET", key, "1"), ("GET", key), ("V.INFO", key), ("KV.PREFIX.LOOKUP", key)):
        refused(a.ask(*words), "")
    assert admin.ask("KEYS", "*") == []
    ns = "n" * 65_000
    a.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    assert admin.ask("KV.PREFIX.LOOKUP", ns) == "MISS"
    assert admin.ask("KV.PREFIX.DROP", "a:" + ns) == 1


def test_every_command_of_the_keyspace_stays_inside(users: dict[str, Wire]) -> None:
    """One word of every kind for every key position: nothing of another may change or show."""
    a, admin = users["a"], users["admin"]
    admin.ok("MSET", "k", "secret", "b:k", "secret", "b", "secret", "", "secret")
    before = admin.ask("MGET", "k", "b:k", "b", "")
    for entry in TABLE.values():
        if entry.keyspace and entry.keys and entry.name != "WATCH":
            for words in (["k"], ["k", "1"], ["k", "1", "1"], ["k", "k"], ["k", "0", "-1", "v"]):
                answer = a.ask(entry.name, *words)
                assert "secret" not in str(answer), (entry.name, words, answer)
                assert admin.ask("MGET", "k", "b:k", "b", "") == before, entry.name
                assert admin.ask("EXISTS", "1", "-1", "v", "0") == 0, entry.name
    left = admin.ask("KEYS", "*")
    assert sorted(key for key in left if not key.startswith(b"a:")) == [b"", b"b", b"b:k", b"k"]


@pytest.mark.parametrize("proto", [2, 3])
def test_keys_and_scan_show_ones_own_under_its_own_name(users: dict[str, Wire], proto: int) -> None:
    a, admin = users["a"], users["admin"]
    a.ask("HELLO", proto)
    for number in range(30):
        admin.ok("SET", f"b:other{number}", "x")
        a.ok("SET", f"k{number}", "x")
    a.ask("RPUSH", "list", "x")
    assert set(a.ask("KEYS", "*")) == {b"list", *(b"k%d" % n for n in range(30))}
    assert a.ask("KEYS", "a:*") == [] and a.ask("KEYS", "*other*") == []
    assert set(a.ask("KEYS", "k?")) == {b"k%d" % n for n in range(10)}
    cursor, found = a.ask("SCAN", 0, "MATCH", "k1*", "COUNT", 1)
    assert cursor == b"0" and len(found) == 11
    assert a.ask("SCAN", 0, "TYPE", "list") == [b"0", [b"list"]]
    # a cursor of the whole server leads nowhere
    assert a.ask("SCAN", 17) == [b"0", []]


def test_exec_replays_what_was_rewritten(users: dict[str, Wire]) -> None:
    a, admin = users["a"], users["admin"]
    admin.ok("SET", "b:k", "theirs")
    a.ok("MULTI")
    for words in (("SET", "k", "1"), ("INCR", "k"), ("GET", "b:k"), ("KEYS", "*")):
        assert a.ask(*words) == "QUEUED"
    assert a.ask("EXEC") == ["OK", 2, None, [b"k"]]
    assert admin.ask("GET", "a:k") == b"2" and admin.ask("GET", "k") is None


def test_watching_does_not_tell_of_others(users: dict[str, Wire]) -> None:
    a, b = users["a"], users["b"]
    a.ok("WATCH", "k", "b:k")
    b.ok("SET", "k", "1")
    a.ok("MULTI")
    a.ask("PING")
    assert a.ask("EXEC") == ["PONG"]
    a.ok("WATCH", "k")
    with_admin = users["admin"]
    with_admin.ok("SET", "a:k", "2")
    a.ok("AUTH", "b", "p=b")
    a.ok("MULTI")
    a.ask("PING")
    assert a.ask("EXEC") == ["PONG"]


# -- what the server says of itself --------------------------------------------


def test_info_and_client_list_tell_a_tenant_only_of_itself(
    users: dict[str, Wire], server: RunningServer
) -> None:
    a, b, admin = users["a"], users["b"], users["admin"]
    b.ok("CLIENT", "SETNAME", "b-secret")
    b.ok("SET", "b-secret", "x")
    b.ok("KV.PREFIX.REGISTER", "b-secret", 4, "fp16")
    a.ok("SET", "k", "x")
    text = a.ask("INFO").decode() + a.ask("INFO", "everything").decode()
    text += a.ask("CLIENT", "LIST").decode() + a.ask("CLIENT", "INFO").decode()
    for word in ("secret", "user=b", "default", str(server.dir), "used_memory", "prefill"):
        assert word not in text, word
    assert "db0:keys=1," in text and "connected_clients:1\r" in text and "user=a" in text
    assert "redis_version:7.0.0" in text
    assert "b-secret" in admin.ask("CLIENT", "LIST").decode()
    assert "user=b" in admin.ask("CLIENT", "LIST").decode()


# -- prefixes, states, slots ---------------------------------------------------


def store_everything(wire: Wire, name: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", name, 4, "fp16", "BLOCKS", 16, 1, b"h" * 8)
    for side in ("_pk", "_pv"):
        wire.ok("V.STOREBATCH", name + side, 0, 0, 1, ROW, "FMT", "F16")
    wire.ok("SSM.PREFIX.STORE", name, 65535, b"record")
    wire.ok("SSM.PREFIX.STORE", f"{name}@16", 0, b"state")
    wire.ok("STATE.ALLOC", name, 4)
    assert wire.ask("STATE.WRITE", name, 0, b"slot") == 4
    wire.ask("ATTEND.CREATE", name, 2, 2)
    wire.ok("ATTEND.STORE", name, 0, 1, struct.pack("<2f", 1, 2), struct.pack("<2f", 3, 4))


def everything(wire: Wire, name: str) -> list[Any]:
    """All that can be read under a name."""
    return wire.together(
        ("KV.PREFIX.LOOKUP", name),
        ("KV.PREFIX.OWNER", name),
        ("KV.PREFIX.BLOCKS", name),
        ("KV.PREFIX.MEMBERSHIP", name, 1, b"h" * 8),
        ("V.INFO", f"{name}_pk"),
        ("V.FETCH", f"{name}_pk", 0, "RANGE", 0, 1),
        ("V.FETCH", f"{name}_pv", 0, 0),
        ("SSM.PREFIX.FETCH", name, 65535),
        ("SSM.PREFIX.FETCH", f"{name}@16", 0),
        ("STATE.READ", name, 0, 4),
        ("ATTEND.QUERY", name, 0, 1, struct.pack("<2f", 1, 2)),
        ("KV.PREFIX.EXPLAIN", name),
    )


FORGED = ("{}", "b:{}", ":{}", "b:{}_pk", "a:{}")


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_namespace_finds_nothing(users: dict[str, Wire], ns: str, forged: str) -> None:
    a, b, admin, forged = users["a"], users["b"], users["admin"], forged.format(ns)
    store_everything(b, ns)
    store_everything(admin, ns)
    stored, other = everything(b, ns), everything(admin, ns)
    empty = [
        str(answer).replace(f"never_{forged}", "-") for answer in everything(a, f"never_{forged}")
    ]
    found = [str(answer).replace(forged, "-") for answer in everything(a, forged)]
    assert found == empty
    for words in (
        *(("KV.PREFIX.DROP", forged), ("V.DROP", forged, f"{forged}_pk"), ("V.FREE", forged)),
        *(("SSM.PREFIX.DROP", forged), ("STATE.FREE", forged), ("KV.PREFIX.PIN", forged)),
        *(("KV.PREFIX.EXPIRE", forged, 0), ("KV.PREFIX.UNPIN", forged)),
    ):
        assert a.ask(*words) in (0, "OK", "MISS"), words
    store_everything(a, forged)
    assert a.ask("KV.PREFIX.DROP", forged) == 1
    assert everything(b, ns) == stored and everything(admin, ns) == other
    for wire, name in ((a, forged), (b, ns), (admin, ns)):
        wire.ask("KV.PREFIX.DROP", name)
        wire.ask("STATE.FREE", name)


def test_replies_name_what_the_tenant_named(users: dict[str, Wire]) -> None:
    a = users["a"]
    a.ok("KV.PREFIX.REGISTER", "shown", 4, "fp16")
    assert a.ask("V.INFO", "shown_pk").startswith(b"session:shown_pk\r\n")
    assert b'"namespace": "shown"' in a.ask("KV.PREFIX.EXPLAIN", "shown")
    for words in (
        *(("KV.PREFIX.REGISTER", "", 4, "fp16"), ("KV.PREFIX.DROP", "shown", "")),
        *(("SSM.PREFIX.STORE", "", 0, "x"), ("STATE.ALLOC", "", 4), ("V.CREATE", "", 4)),
    ):
        refused(a.ask(*words), "1 to 65535 bytes")
    assert a.ask("KV.PREFIX.LOOKUP", "shown") == "HIT"


def test_slots_are_counted_within_the_tenant(users: dict[str, Wire]) -> None:
    a, b, admin = users["a"], users["b"], users["admin"]
    for create, more in (("V.CREATE", ()), ("ATTEND.CREATE", (2,))):
        first = a.ask(create, "slot0", 2, *more)
        for number in range(5):
            b.ask(create, f"slot{number}", 2, *more)
        assert a.ask(create, "slot1", 2, *more) == first + 1
        assert a.ask(create, "slot0", 2, *more) == first
    admin.ask("V.DROP", *(f"b:slot{number}" for number in range(5)))


def test_ids_do_not_tell_a_tenant_how_busy_others_are(
    users: dict[str, Wire], server: RunningServer
) -> None:
    a, b, admin = users["a"], users["b"], users["admin"]
    for wire in (a, b):
        wire.ask("V.CREATE", "ids", 2)
    before = time.time_ns() // 1000
    first = a.ask("V.SNAPSHOT", "ids")
    assert before <= first <= time.time_ns() // 1000
    for _ in range(5):
        b.ask("V.COMMIT", "ids", b.ask("V.SNAPSHOT", "ids"))
    admin.ask("V.CREATE", "ids", 2)
    admin.ask("V.SNAPSHOT", "ids")
    before = time.time_ns() // 1000
    assert before <= a.ask("V.SNAPSHOT", "ids") <= time.time_ns() // 1000
    # the id of a point, and that of a connection, say when it came, and nothing of those before it
    for _ in range(20):
        Wire.tcp(server.port).close()
    now = time.time_ns() // 1000
    with Wire.tcp(server.port) as wire:
        assert wire.ask("HELLO", 3, "AUTH", "a", "pa")[b"id"] == (mine := wire.ask("CLIENT", "ID"))
        assert now <= mine <= time.time_ns() // 1000
        assert f"id={mine} " in wire.ask("CLIENT", "INFO").decode()
    for name in ("ids", "a:ids", "b:ids"):
        admin.ask("V.DROP", name)


def test_a_long_store_is_received_under_its_own_name(users: dict[str, Wire]) -> None:
    a, b, admin = users["a"], users["b"], users["admin"]
    b.ok("KV.PREFIX.REGISTER", "long", 4096, "fp16")
    a.ok("KV.PREFIX.REGISTER", "long", 4096, "fp16")
    rows = 1200
    blob = bytes(range(256)) * (rows * 8192 // 256)
    a.ok("V.STOREBATCH", "long_pk", 0, 0, rows, blob, "FMT", "STORED")
    a.ok("SSM.PREFIX.STORE", "long", 0, blob)
    assert a.ask("V.FETCH", "long_pk", 0, "RANGE", 0, rows, "FMT", "STORED") == blob
    assert a.ask("SSM.PREFIX.FETCH", "long", 0) == blob
    assert b.ask("V.FETCH", "long_pk", 0, "RANGE", 0, 1, "FMT", "STORED") is None
    assert b.ask("SSM.PREFIX.FETCH", "long", 0) is None
    assert admin.ask("SSM.PREFIX.FETCH", "long", 0) is None
    refused(a.ask("KV.STORE", "x", blob, blob), DENIED)
    assert a.ask("KV.PREFIX.DROP", "long") == 1 and b.ask("KV.PREFIX.DROP", "long") == 1


def test_what_a_tenant_stored_is_its_own_after_a_crash(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    flags = ("--requirepass", ADMIN, "--tenant", "a=pa", "--tenant", "b=pb")
    server = RunningServer(free_port_block(), folder, flags)
    try:
        server.start()
        with Wire.tcp(server.port) as wire:
            wire.ok("AUTH", "a", "pa")
            wire.ok("SET", "k", "v")
            wire.ok("SSM.PREFIX.STORE", "ns", 0, "state")
        server.restart()
        with Wire.tcp(server.port) as wire:
            wire.ok("AUTH", "a", "pa")
            assert wire.together(("GET", "k"), ("SSM.PREFIX.FETCH", "ns", 0)) == [b"v", b"state"]
            wire.ok("AUTH", "b", "pb")
            assert wire.together(("GET", "k"), ("SSM.PREFIX.FETCH", "ns", 0)) == [None, None]
    finally:
        server.stop()


def test_the_required_prefix_is_held_against_what_the_tenant_said(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    flags = ("--requirepass", ADMIN, "--tenant", "a=pa", "--ns-prefix", "team/")
    server = RunningServer(free_port_block(), folder, flags)
    try:
        server.start()
        with Wire.tcp(server.port) as wire:
            wire.ok("AUTH", "a", "pa")
            wire.ok("KV.PREFIX.REGISTER", "team/x", 4, "fp16")
            refused(wire.ask("KV.PREFIX.REGISTER", "x", 4, "fp16"), "required prefix 'team/'")
            wire.ok("AUTH", ADMIN)
            refused(wire.ask("KV.PREFIX.LOOKUP", "a:team/x"), "required prefix")
    finally:
        server.stop()


def test_pipelined_commands_around_a_change_of_user_go_to_the_right_one(
    users: dict[str, Wire],
) -> None:
    a, admin = users["a"], users["admin"]
    big = b"x" * 300_000
    sent = [("SET", "k", big), ("AUTH", "b", "p=b"), ("SET", "k", b"b"), ("GET", "k")]
    a.send(b"".join(request(*words) for words in sent))
    assert [a.reply() for _ in sent] == [Status("OK"), "OK", "OK", b"b"]
    assert admin.ask("STRLEN", "a:k") == len(big) and admin.ask("GET", "b:k") == b"b"
