"""Quotas of tenants, and whose prefix leaves when a limit of the whole server is reached."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pion_vllm_mlx.server.keyspace.changes import Change, Verb, change
from pion_vllm_mlx.server.keyspace.data import Data
from pion_vllm_mlx.server.keyspace.sizes import entry_bytes, growth
from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Wire

ADMIN = "adminpw"
QUOTA = 1 << 20
FULL = f"OOM the quota of {QUOTA} bytes does not allow this store"
#: rows of 1 KiB each, below and above the size that rides in the log.
WIDTH = 512
Start = Callable[..., RunningServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server with tenants a and b, a with a quota, and more flags."""
    started: list[RunningServer] = []
    flags = ("--requirepass", ADMIN, "--tenant", "a=pa", "--tenant", "b=pb")
    flags += ("--tenant-quota", f"a={QUOTA}", "--bind", "127.0.0.1")

    def begin(*more: str) -> RunningServer:
        folder = tmp_path / "data"
        folder.mkdir(mode=0o700)
        started.append(RunningServer(free_port_block(), folder, (*flags, *more)))
        return started[-1].start()

    yield begin
    for server in started:
        server.stop()


def user(server: RunningServer, *credentials: str) -> Wire:
    wire = Wire.tcp(server.port)
    wire.ok("AUTH", *credentials)
    return wire


def store(wire: Wire, name: str, rows: int) -> list[object]:
    """Register a prefix and store so many KiB on each side; the two answers."""
    wire.ask("KV.PREFIX.REGISTER", name, WIDTH, "fp16")
    blob = bytes(rows * 2 * WIDTH)
    sides = (f"{name}_pk", f"{name}_pv")
    return [wire.ask("V.STOREBATCH", s, 0, 0, rows, blob, "FMT", "F16") for s in sides]


def held(wire: Wire, names: list[str]) -> list[str]:
    """Which of the namespaces are a hit with all their rows, asked without touching them."""
    return [name for name in names if b'"verdict": "hit"' in wire.ask("KV.PREFIX.EXPLAIN", name)]


@pytest.mark.parametrize("rows", [20, 100])
def test_past_its_quota_a_tenant_loses_its_own_oldest_prefixes(start: Start, rows: int) -> None:
    server = start()
    names = [f"p{number}" for number in range(80 * 20 // rows)]
    with user(server, "a", "pa") as a, user(server, "b", "pb") as b:
        assert store(b, "theirs", 100) == ["OK", "OK"]
        for number, name in enumerate(names):
            assert store(a, name, rows) == ["OK", "OK"]
            if number:
                assert a.ask("KV.PREFIX.LOOKUP", "p0") == "HIT"
        left = held(a, names)
        fitting = QUOTA // (2 * rows * 2 * WIDTH)
        assert len(left) == fitting and left == ["p0", *names[len(names) - fitting + 1 :]]
        assert b.ask("KV.PREFIX.LOOKUP", "theirs") == "HIT"
        server.restart()
    with user(server, "a", "pa") as a:
        assert held(a, names) == left
        # the accounts are right after a start, too: the next prefix costs one
        assert store(a, "next", rows) == ["OK", "OK"]
        assert len(held(a, [*names, "next"])) == fitting


def test_what_can_never_fit_is_refused_and_costs_nothing(start: Start) -> None:
    server = start()
    with user(server, "a", "pa") as a, user(server, ADMIN) as admin:
        assert store(a, "kept", 100) == ["OK", "OK"]
        for rows in (1025, 12_000):
            assert store(a, "large", rows) == [FULL, FULL]
        assert a.ask("SSM.PREFIX.STORE", "state", 0, bytes(QUOTA + 1)) == FULL
        assert a.ask("SSM.PREFIX.STORE", "state", 0, bytes(9 << 20)) == FULL
        assert a.ask("SSM.PREFIX.FETCH", "state", 0) is None
        assert held(a, ["kept"]) == ["kept"]
        assert store(admin, "large", 1025) == ["OK", "OK"]
        assert admin.info("INFO", "clients")["in_flight_bytes"] == "0"


def test_storing_the_same_rows_again_costs_nothing(start: Start) -> None:
    server = start()
    with user(server, "a", "pa") as a:
        for _ in range(5):
            assert store(a, "one", 250) == ["OK", "OK"]
            assert store(a, "two", 250) == ["OK", "OK"]
        assert held(a, ["one", "two"]) == ["one", "two"]


def test_a_prefix_that_grows_does_not_throw_itself_out(start: Start) -> None:
    server = start()
    with user(server, "a", "pa") as a:
        for name in ("old", "new"):
            assert store(a, name, 200) == ["OK", "OK"]
        # the one that was used least recently is the one that is written
        more = bytes(200 * 2 * WIDTH)
        assert a.ask("V.STOREBATCH", "old_pk", 0, 200, 200, more, "FMT", "F16") == "OK"
        a.ok("SSM.PREFIX.STORE", "old@64", 0, bytes(100 << 10))
        assert held(a, ["old", "new"]) == ["old"]
        assert b"layer_0_tokens:400\r\n" in a.ask("V.INFO", "old_pk")


def test_states_count_and_leave_with_their_namespace(start: Start) -> None:
    server = start()
    with user(server, "a", "pa") as a:
        for number in range(4):
            assert store(a, f"p{number}", 100) == ["OK", "OK"]
            a.ok("SSM.PREFIX.STORE", f"p{number}@16", 0, bytes(200 << 10))
        assert held(a, ["p0", "p1", "p2", "p3"]) == ["p2", "p3"]
        states = [a.ask("SSM.PREFIX.FETCH", f"p{number}@16", 0) for number in range(4)]
        assert [state is not None for state in states] == [False, False, True, True]
        # a checkpoint of a prefix does not throw out the prefix itself
        assert a.ask("SSM.PREFIX.STORE", "p3@32", 0, bytes(500 << 10)) == "OK"
        assert held(a, ["p2", "p3"]) == ["p3"]
        for number in range(8):
            a.ok("SSM.PREFIX.STORE", f"alone{number}", 0, bytes(300 << 10))
        assert a.ask("SSM.PREFIX.FETCH", "alone7", 0) is not None


def test_past_its_quota_a_tenant_loses_sessions_without_a_namespace_in_their_turn(
    start: Start,
) -> None:
    server, rows, blob = start(), 100, bytes(100 * 2 * WIDTH)
    with user(server, "a", "pa") as a:
        assert store(a, "pinned", rows) == ["OK", "OK"]
        assert a.ask("KV.PREFIX.PIN", "pinned") == 1
        for number in range(20):
            # one has the name of a namespace that pins protect
            name = "pinned" if number == 0 else f"plain{number}"
            a.ask("V.CREATE", name, WIDTH, "VQUANT", "fp16")
            a.ok("V.STOREBATCH", name, 0, 0, rows, blob, "FMT", "F16")
            if number % 5 == 4:
                a.ok("SSM.PREFIX.STORE", f"alone{number}", 0, bytes(50 << 10))
        there = [n for n in range(1, 20) if a.ask("V.INFO", f"plain{n}") is not None]
        assert there and there == list(range(there[0], 20)) and there[0] > 1
        assert a.ask("V.INFO", "pinned") is None
        assert held(a, ["pinned"]) == ["pinned"]


def test_a_checkpoint_that_leaves_with_its_namespace_makes_room_once(start: Start) -> None:
    with user(start(), "a", "pa") as a:
        assert store(a, "old", 100) == ["OK", "OK"]
        a.ok("SSM.PREFIX.STORE", "old@64", 0, bytes(300 << 10))
        a.ok("SSM.PREFIX.STORE", "new@64", 0, bytes(400 << 10))
        # the namespace and its checkpoint are 500 KiB, which are not enough for 800 beside new@64
        refused = a.ask("SSM.PREFIX.STORE", "new@128", 0, bytes(800 << 10))
        assert str(refused) == FULL
        assert a.ask("SSM.PREFIX.FETCH", "old@64", 0) is not None


def test_keys_and_memory_past_the_quota_are_refused_until_there_is_room(start: Start) -> None:
    server = start()
    half = bytes(QUOTA // 2)
    with user(server, "a", "pa") as a, user(server, "b", "pb") as b:
        a.ok("SET", "k", half)
        a.ok("SET", "k", half)
        for words in (
            *(("SET", "l", half), ("APPEND", "k", half), ("HSET", "h", "f", half)),
            *(("RPUSH", "r", half), ("SADD", "s", half), ("ZADD", "z", 1, half)),
            *(("MSET", "m", half, "n", "1"), ("STATE.ALLOC", "slot", QUOTA // 2)),
            ("SSM.PREFIX.STORE", "ns", 0, half),
        ):
            assert a.ask(*words) == FULL, words[:2]
            b.ask(*words)
        a.ok("MULTI")
        a.ask("SET", "l", half)
        assert a.ask("EXEC") == FULL
        assert a.ask("KEYS", "*") == [b"k"] and a.ask("DEL", "k") == 1
        a.ok("STATE.ALLOC", "slot", QUOTA // 2)
        assert a.ask("SET", "k", half) == FULL
        assert a.ask("STATE.FREE", "slot") == 1
        assert a.ask("HSET", "h", "f", half) == 1
        assert a.ask("HDEL", "h", "f") == 1
        a.ask("RPUSH", "r", half)
        assert a.ask("LPOP", "r") == half
        a.ok("SET", "k", half)
        a.ok("RENAME", "k", "l")
        assert a.ask("SET", "k", half) == FULL
        assert a.ask("PEXPIRE", "l", 1) == 1
    for _ in range(100):
        with user(server, "a", "pa") as a:
            if a.ask("SET", "k", half) == "OK":
                break
        time.sleep(0.05)
    else:
        pytest.fail("a key past its deadline counts for ever")


def test_a_full_session_table_takes_from_who_has_most(start: Start) -> None:
    """Sixteen sessions are eight prefixes."""
    server = start("--max-sessions", "16")
    with user(server, "b", "pb") as b, user(server, "a", "pa") as a, user(server, ADMIN) as admin:
        for name in ("system", "tools"):
            assert store(a, name, 4) == ["OK", "OK"]
        assert store(admin, "mine", 4) == ["OK", "OK"]
        for number in range(40):
            assert store(b, f"busy{number}", 4) == ["OK", "OK"]
        assert held(a, ["system", "tools"]) == ["system", "tools"]
        assert held(admin, ["mine"]) == ["mine"]
        busy = [f"busy{number}" for number in range(40)]
        assert held(b, busy) == busy[-5:]
        # one that comes later gets its share, down to an equal one
        for number in range(12):
            assert store(a, f"late{number}", 4) == ["OK", "OK"]
        assert len(held(b, busy)) >= 3 and held(admin, ["mine"]) == ["mine"]


@pytest.mark.parametrize("credentials", [("a", "pa"), (ADMIN,)])
def test_empty_sessions_of_one_evict_nothing_that_another_stored(
    start: Start, credentials: tuple[str, ...]
) -> None:
    server = start("--max-sessions", "16")
    with user(server, "b", "pb") as b, user(server, *credentials) as busy:
        assert store(busy, "rows", 4) == ["OK", "OK"]
        for name in ("oldest", "older"):
            assert store(b, name, 100) == ["OK", "OK"]
        empty = [f"e{number}" for number in range(40)]
        for name in empty:
            busy.ok("KV.PREFIX.REGISTER", name, 8, "fp16")
        assert held(b, ["oldest", "older"]) == ["oldest", "older"]
        assert held(busy, ["rows", *empty]) == empty[-6:]
        for number in range(40):
            assert isinstance(busy.ask("V.CREATE", f"v{number}", 8), int)
        assert held(b, ["oldest", "older"]) == ["oldest", "older"]


def test_who_has_half_of_the_sessions_takes_none_of_another_s_half(start: Start) -> None:
    server = start("--max-sessions", "16")
    with user(server, "b", "pb") as b, user(server, "a", "pa") as a:
        for wire in (b, a):
            for number in range(4):
                wire.ok("KV.PREFIX.REGISTER", f"p{number}", 8, "fp16")
        a.ok("KV.PREFIX.REGISTER", "p4", 8, "fp16")
        names = [f"p{number}" for number in range(5)]
        assert held(b, names) == names[:4] and held(a, names) == names[1:]


def test_where_bytes_are_short_empty_sessions_count_nothing(start: Start) -> None:
    """Of the room of eight prefixes b has most, and another owner most of the sessions."""
    server = start("--disk-budget", "32mb")
    with user(server, "b", "pb") as b, user(server, ADMIN) as admin:
        assert store(admin, "mine", 2048) == ["OK", "OK"]
        for number in range(110):
            admin.ok("KV.PREFIX.REGISTER", f"e{number}", 8, "fp16")
        names = [f"p{number}" for number in range(12)]
        for name in names:
            assert store(b, name, 2048) == ["OK", "OK"]
        assert held(admin, ["mine"]) == ["mine"]
        assert 0 < len(held(b, names)) < len(names)


def test_slots_and_indices_of_one_leave_room_for_another(start: Start) -> None:
    server = start()
    with user(server, "b", "pb") as b, user(server, "a", "pa") as a:
        answers = [b.ask("STATE.ALLOC", f"s{number}", 1) for number in range(64)]
        assert "OK" in answers and answers[-1] == "ERR no free state slot"
        a.ok("STATE.ALLOC", "mine", 1)
        assert a.ask("ATTEND.CREATE", "mine", 2, 2) == 0
        for number in range(300):
            assert isinstance(b.ask("ATTEND.CREATE", f"i{number}", 2, 2), int)
        a.ok("ATTEND.STORE", "mine", 0, 1, bytes(8), bytes(8))


def test_past_its_quota_a_tenant_loses_its_own_resident_attention(start: Start) -> None:
    """Layers of 256 KiB, four of which fill the quota."""
    server, heads, dim, tokens = start(), 1, 128, 256
    side = bytes(4 * heads * tokens * dim)

    def attend(wire: Wire, name: str, tokens: int = tokens, times: int = 1) -> object:
        words = (heads, tokens, dim, side * times, side * times)
        return wire.ask("ATTEND.PREFIX.STORE", name, 0, *words)

    def states(wire: Wire, count: int) -> list[object]:
        return [wire.ask("ATTEND.PREFIX.LOOKUP", f"p{n}", 0) for n in range(count)]

    with user(server, "a", "pa") as a, user(server, "b", "pb") as b, user(server, ADMIN) as admin:
        for number in range(8):
            assert attend(b, f"p{number}") == "OK"
        for number in range(20):
            assert attend(a, f"p{number}") == "OK"
        assert states(a, 20) == ["COLD"] * 16 + ["HIT"] * 4 and states(b, 8) == ["HIT"] * 8
        assert attend(a, "p0", 5 * tokens, 5) == FULL and states(a, 1) == ["COLD"]
        assert admin.info("INFO", "memory")["attend_bytes"] == str(12 * 2 * len(side))
        # rows of 1 KiB are less on disk than in memory
        assert store(a, "rows", 400) == ["OK", "OK"]
        assert a.ask("KV.PREFIX.WARM", "rows", 4, dim) == FULL
        assert store(a, "rows", 200) == ["OK", "OK"] and states(a, 20)[16:] == ["HIT"] * 4
        # the quota of what is stored is one by itself
        assert held(a, ["rows"]) == ["rows"]


def test_pins_of_one_leave_room_for_another(start: Start) -> None:
    server = start("--max-sessions", "16")
    with user(server, "b", "pb") as b, user(server, "a", "pa") as a:
        for number in range(4):
            store(b, f"p{number}", 4)
            assert b.ask("KV.PREFIX.PIN", f"p{number}") == 1
        store(a, "mine", 4)
        assert a.ask("KV.PREFIX.PIN", "mine") == 1


def test_pins_of_one_take_no_protection_from_anothers_fewer(start: Start) -> None:
    """Eight sessions may be pinned; a's two and b's eight are more than that."""
    server = start("--max-sessions", "16")
    names = [f"p{number}" for number in range(4)]
    with user(server, "b", "pb") as b, user(server, "a", "pa") as a:
        assert store(a, "mine", 4) == ["OK", "OK"]
        assert a.ask("KV.PREFIX.PIN", "mine") == 1
        for name in names:
            assert store(b, name, 4) == ["OK", "OK"]
            assert b.ask("KV.PREFIX.PIN", name) == 1
        for name in names:
            assert store(a, name, 4) == ["OK", "OK"]
        assert held(a, ["mine", *names]) == ["mine", *names[1:]]


def test_no_pinned_prefix_of_who_has_most_leaves_before_another_s_that_is_not(start: Start) -> None:
    """Sixteen sessions are eight prefixes, of which a has pinned four."""
    server = start("--max-sessions", "16")
    names = [f"p{number}" for number in range(8)]
    with user(server, "b", "pb") as b, user(server, "a", "pa") as a, user(server, ADMIN) as admin:
        for name in names[:5]:
            assert store(a, name, 4) == ["OK", "OK"]
        for name in names[:4]:
            assert a.ask("KV.PREFIX.PIN", name) == 1
        for name in names[:3]:
            assert store(b, name, 4) == ["OK", "OK"]
        # what a has not pinned goes first, since it has most
        assert store(admin, "p0", 4) == ["OK", "OK"]
        assert held(a, names) == names[:4] and held(b, names) == names[:3]
        # and where a has nothing else left, what another has not pinned does
        for number in range(1, 8):
            assert store(admin, f"p{number}", 4) == ["OK", "OK"]
            assert held(a, names) == names[:4]
        assert len(held(b, names)) >= 1 and len(held(admin, names)) >= 1


# -- the arithmetic ------------------------------------------------------------


def test_growth_agrees_with_what_a_value_weighs() -> None:
    """Random changes: after each, the sum of growths is what the key counts."""
    draw = random.Random(7)
    data = Data()
    counted = {}

    def word() -> bytes:
        return bytes(draw.randrange(97, 105) for _ in range(draw.randrange(0, 3)))

    def some() -> list[bytes]:
        return [word() for _ in range(draw.randrange(1, 6))]

    def make(key: bytes) -> Change:
        value = data.entries[key].value if key in data.entries else None
        match key:
            case b"string":
                return change(draw.choice((Verb.SET, Verb.APPEND)), key, word())
            case b"hash":
                if value is None or draw.random() < 0.6:
                    return change(Verb.HSET, key, *(part for m in some() for part in (m, word())))
                return change(Verb.HDEL, key, *{m for m in some() if m in value})
            case b"zset":
                if value is None or draw.random() < 0.6:
                    return change(Verb.ZADD, key, *(p for m in some() for p in (m, b"0x1p+0")))
                return change(Verb.ZREM, key, *{m for m in some() if m in value.scores})
            case b"set":
                if value is None or draw.random() < 0.6:
                    return change(Verb.SADD, key, *some())
                return change(Verb.SREM, key, *{m for m in some() if m in value})
        if value is None or draw.random() < 0.6:
            return change(draw.choice((Verb.RPUSH, Verb.LPUSH)), key, *some())
        many = b"%d" % draw.randrange(1, len(value) + 1)
        return change(draw.choice((Verb.RPOP, Verb.LPOP)), key, many)

    for _ in range(4000):
        key = draw.choice((b"string", b"hash", b"zset", b"set", b"list"))
        one = make(key)
        before = 0 if one.verb is Verb.SET else counted.get(key, 0)
        after = before + growth(data, one)
        data.apply(one)
        if key not in data.entries:
            counted.pop(key, None)
            continue
        counted[key] = after
        assert after == entry_bytes(key, data.entries[key].value), one
