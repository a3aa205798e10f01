"""Whoever shares a server, and whatever breaks: right numbers or a clear refusal."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import RunningServer, free_port_block
from tests.server.attention import oracle
from tests.server.attention.asking import (
    Asking,
    Floats,
    connected,
    flagged,
    floats,
    fused_body,
    normal,
)
from tests.server.memory.lane import OK, PING, QUERY_FUSED, Lane, frame
from tests.server.wire import Refusal, Wire, refuse, request

HEADS, DIM = 2, 64
NONE = normal(0, HEADS, 0, DIM)
MAP = bytes(range(HEADS))


def sides(seed: int, tokens: int) -> tuple[Floats, Floats]:
    return normal(seed, HEADS, tokens, DIM), normal(seed + 1, HEADS, tokens, DIM)


def together(work: Callable[[int], None], count: int) -> None:
    """Run on ``count`` threads that start at once; the first error is raised."""
    gate = threading.Barrier(count)

    def one(number: int) -> None:
        gate.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(one, number) for number in range(count)]:
            done.result()


def test_64_clients_on_8_namespaces_each_get_their_own_answer(shared: RunningServer) -> None:
    prefixes = [sides(100 + 2 * n, 300 + n) for n in range(8)]
    with connected(shared) as asking:
        for n, prefix in enumerate(prefixes):
            asking.at(f"many{n}").store(*prefix)
        before = asking.info()

    def work(number: int) -> None:
        ns = number % 8
        q, more = normal(number, HEADS, 1, DIM), sides(1000 + number, number % 3)
        wanted = oracle.fused(q, prefixes[ns], more)
        dense, _ = oracle.dense(q, *prefixes[ns])
        with connected(shared, f"many{ns}") as asking:
            for _ in range(5):
                for answer in (asking.fused(q, *more, MAP), asking.framed_ok(q, more, MAP)):
                    out = floats(answer, HEADS, 1, DIM)
                    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
                out = floats(asking.query(q), HEADS, 1, DIM)
                np.testing.assert_allclose(out, dense, rtol=0, atol=1e-5)

    together(work, 64)
    with connected(shared) as asking:
        after = asking.info()
    assert after["sdpa_queries"] - before["sdpa_queries"] == 64 * 15
    assert after["sdpa_warm"] == before["sdpa_warm"]


def test_stores_and_queries_of_one_layer_at_once_never_mix(shared: RunningServer) -> None:
    versions = [sides(200 + 2 * n, 200 + 40 * n) for n in range(4)]
    q = normal(1, HEADS, 1, DIM)
    right = [oracle.dense(q, *version)[0] for version in versions]
    with connected(shared, "changing") as asking:
        asking.store(*versions[0])

    def work(number: int) -> None:
        with connected(shared, "changing") as asking:
            for turn in range(30):
                if number < 4:
                    asking.store(*versions[number])
                    continue
                lane = asking.framed_ok(q, (NONE, NONE), MAP) if turn % 2 else asking.query(q)
                out = floats(lane, HEADS, 1, DIM)
                assert min(float(np.abs(out - one).max()) for one in right) < 1e-5

    together(work, 12)


def test_a_slot_evicted_between_lookup_and_query_is_a_coldmiss(pion_server: RunningServer) -> None:
    with connected(pion_server, "here") as asking, connected(pion_server, "other") as others:
        asking.store(*sides(1, 10))
        assert asking.lookup() == "HIT"
        for layer in range(256):
            others.at(layer=layer).store(*sides(1, 1))
        q = normal(2, HEADS, 1, DIM)
        answer = asking.query(q)
        assert isinstance(answer, Refusal) and answer.startswith("COLDMISS ")
        assert asking.framed(q, (NONE, NONE), MAP)[0] == 3
        assert asking.wire.ask("PING") == "PONG" and asking.lane.ok(PING) == b""


def test_ping_is_answered_while_a_long_query_is_computed(shared: RunningServer) -> None:
    keys, values = sides(3, 16_384)
    q = normal(4, HEADS, 256, DIM)
    words = ("ATTEND.PREFIX.QUERY", "long", 0, HEADS, DIM, 1, q.tobytes())
    with connected(shared, "long") as asking, connected(shared) as beside:
        asking.store(keys, values)
        pings = 0
        for _ in range(5):
            asking.wire.send(request(*words))
            while not select.select([asking.wire.sock], [], [], 0)[0]:
                assert beside.wire.ask("PING") == "PONG" and beside.lane.ok(PING) == b""
                pings += 1
            answer = asking.wire.reply()
        assert pings > 20, "the event loop was held up"
        rows = slice(0, 256, 32)
        wanted, _ = oracle.dense(q[:, rows].copy(), keys, values)
        out = floats(answer[: q.nbytes], *q.shape)
        np.testing.assert_allclose(out[:, rows], wanted, rtol=0, atol=1e-5)


def test_a_client_that_leaves_during_its_query_disturbs_nobody(shared: RunningServer) -> None:
    prefix = sides(5, 2000)
    q, long = normal(6, HEADS, 1, DIM), normal(7, HEADS, 2000, DIM)
    with connected(shared, "left") as asking:
        asking.store(*prefix)
        for _ in range(8):
            leaving = Wire.tcp(shared.port)
            words = ("ATTEND.PREFIX.QUERY", "left", 0, HEADS, DIM, 1, long.tobytes())
            leaving.send(request(*words))
            leaving.close()
        out = floats(asking.query(q), HEADS, 1, DIM)
        np.testing.assert_allclose(out, oracle.dense(q, *prefix)[0], rtol=0, atol=1e-5)


def test_a_server_killed_between_layers_never_answers_wrongly(pion_server: RunningServer) -> None:
    prefix = sides(8, 50)
    q = normal(9, HEADS, 1, DIM)
    with connected(pion_server) as asking:
        for layer in range(3):
            asking.at(layer=layer).store(*prefix)
        floats(asking.query(q), HEADS, 1, DIM)
        pion_server.kill()
        with pytest.raises((EOFError, ConnectionError)):
            asking.at(layer=1).query(q)
        with pytest.raises((EOFError, ConnectionError)):
            asking.at(layer=1).framed(q, (NONE, NONE), MAP)
    pion_server.start()
    with connected(pion_server) as asking:
        assert asking.at(layer=1).query(q) == "ERR session not found"
        assert asking.at(layer=1).framed(q, (NONE, NONE), MAP) == (1, b"")


def test_pipelined_commands_are_answered_in_order(shared: RunningServer) -> None:
    keys, values = sides(10, 3)
    q = normal(11, HEADS, 1, DIM)
    at = ("piped", 0)
    store = ("ATTEND.PREFIX.STORE", *at, HEADS, 3, DIM, keys.tobytes(), values.tobytes())
    query = ("ATTEND.PREFIX.QUERY", *at, HEADS, DIM, 1, q.tobytes())
    with connected(shared, "piped") as asking:
        found = asking.wire.together(
            ("ATTEND.PREFIX.LOOKUP", *at), store, query, ("PING",), (*query, "5"), ("PING",)
        )
        assert found[:2] == ["MISS", "OK"] and found[3::2] == ["PONG", "PONG"]
        assert found[2] == found[4] == asking.query(q)


def test_large_k_and_v_arrive_whole(shared: RunningServer) -> None:
    keys, values = normal(12, 8, 9000, 128), normal(13, 8, 9000, 128)
    q = normal(14, 8, 1, 128)
    with connected(shared, "large") as asking:
        asking.store(keys, values)
        out = floats(asking.query(q), 8, 1, 128)
        np.testing.assert_allclose(out, oracle.dense(q, keys, values)[0], rtol=0, atol=1e-5)
        asking.store(keys[:, :1].copy(), values[:, :1].copy())


# -- who may --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with two tenants."""
    flags = ["--requirepass", "boss", "--tenant", "a=pa", "--tenant", "b=pb"]
    folder = tmp_path_factory.mktemp("guarded") / "data"
    with flagged(folder, *flags, "--tenant-quota", "a=1mb", "--ns-prefix", "p") as server:
        yield server


def login(server: RunningServer, *words: str) -> Wire:
    wire = Wire.tcp(server.port)
    wire.ok("AUTH", *words)
    return wire


def test_tenants_do_not_see_each_others_slots(guarded: RunningServer) -> None:
    with Lane.tcp(guarded.port + 1) as lane:
        boss, a, b = (login(guarded, *w) for w in (("boss",), ("a", "pa"), ("b", "pb")))
        mine, theirs = (Asking(wire, lane, "p") for wire in (a, b))
        prefix = sides(20, 30)
        q = normal(21, HEADS, 1, DIM)
        mine.store(*prefix)
        assert (mine.lookup(), theirs.lookup()) == ("HIT", "MISS")
        assert theirs.query(q) == "ERR session not found"
        assert Asking(boss, lane, "p").lookup() == "MISS"
        assert Asking(boss, lane, "p").at("a:p").wire.ask("ATTEND.PREFIX.LOOKUP", "a:p", 3) == (
            "ERR namespace must start with required prefix 'p'"
        )
        assert lane.ask(0x24, b"\1\0p" + bytes(16))[0] == 2  # who has not said the password
        theirs.store(*sides(22, 30))
        out = floats(mine.query(q), HEADS, 1, DIM)
        np.testing.assert_allclose(out, oracle.dense(q, *prefix)[0], rtol=0, atol=1e-5)
        for wire in (boss, a, b):
            wire.close()


def test_a_tenant_warms_its_own_rows_into_its_own_sessions(guarded: RunningServer) -> None:
    a, b = login(guarded, "a", "pa"), login(guarded, "b", "pb")
    a.ok("KV.PREFIX.REGISTER", "pns", HEADS * DIM, "fp32")
    for side in ("pk", "pv"):
        a.ok("V.STOREBATCH", f"pns_{side}", 0, 0, 2, bytes(2 * 4 * HEADS * DIM))
    warm = ("KV.PREFIX.WARM", "pns", HEADS, DIM)
    missing = "ERR KV.PREFIX.WARM session not found"
    assert b.ask(*warm) == b.ask("KV.PREFIX.WARM", "pa:pns", HEADS, DIM) == missing
    assert (a.ask(*warm), a.ask(*warm, "p2")) == ("1", "1")
    required = "namespace must start with required prefix 'p'"
    assert a.ask(*warm, "x") == a.ask("KV.PREFIX.WARM", "x", HEADS, DIM) == f"ERR {required}"
    assert [wire.ask("ATTEND.PREFIX.LOOKUP", "p2", 0) for wire in (a, b)] == ["HIT", "MISS"]
    assert a.ask("KV.PREFIX.DROP", "pns") == 1
    assert a.ask("ATTEND.PREFIX.LOOKUP", "p2", 0) == "MISS"
    for wire in (a, b):
        wire.close()


def test_slots_are_a_cache_and_no_part_of_a_quota(guarded: RunningServer) -> None:
    a, b = login(guarded, "a", "pa"), login(guarded, "b", "pb")
    with Lane.tcp(guarded.port + 1) as lane:
        quiet, busy = Asking(b, lane, "pquiet", 0), Asking(a, lane, "pbusy", 0)
        quiet.store(*sides(30, 2))
        for layer in range(300):
            busy.at(layer=layer).store(*sides(30, 10))
        assert quiet.lookup() == "HIT"
        found = [busy.at(layer=n).lookup() for n in (0, 299)]
        assert found == ["COLD", "HIT"]
        a.ok("SET", "key", bytes(100_000))
    for wire in (a, b):
        wire.close()


def test_the_frames_session_has_to_bear_the_prefix(tmp_path: Path) -> None:
    with flagged(tmp_path / "data", "--ns-prefix", "p") as server:
        with connected(server, "pns") as asking:
            asking.store(*sides(40, 5))
            q = normal(41, HEADS, 1, DIM)
            assert asking.framed(q, (NONE, NONE), MAP)[0] == OK
            status, text = asking.at("ns").framed(q, (NONE, NONE), MAP)
            assert (status, text) == (2, b"ERR namespace must start with required prefix 'p'")
            words = ("ATTEND.PREFIX.LOOKUP", "ns", 0)
            refuse(asking.wire, "must start with required prefix", *words)


def test_without_kvcache_there_is_no_attention(tmp_path: Path) -> None:
    port = free_port_block()
    command = [sys.executable, "-m", "pion_vllm_mlx", "server", "-p", str(port)]
    with subprocess.Popen(
        [*command, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as process:
        try:
            ends_at = time.monotonic() + 20
            while True:
                try:
                    wire = Wire.tcp(port)
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < ends_at
                    time.sleep(0.02)
            answer = wire.ask("ATTEND.PREFIX.LOOKUP", "s", 0)
            assert answer == "ERR attention index not enabled (use --kvcache)"
            answer = wire.ask("KV.PREFIX.WARM", "s", 1, 32)
            assert answer == "ERR V-store not enabled (use --kvcache)"
            wire.close()
        finally:
            process.terminate()


def test_past_maxmemory_stores_and_warms_are_refused_and_queries_are_not(
    shared: RunningServer,
) -> None:
    with connected(shared, "full") as asking:
        asking.store(*sides(50, 20))
        q = normal(51, HEADS, 1, DIM)
        keys, values = sides(50, 20)
        asking.wire.ok("CONFIG", "SET", "maxmemory", 1)
        try:
            text = "OOM command not allowed when used memory > 'maxmemory'."
            words = (HEADS, 20, DIM, keys.tobytes(), values.tobytes())
            assert asking.command("STORE", *words) == text
            assert asking.wire.ask("KV.PREFIX.WARM", "full", HEADS, DIM) == text
            assert asking.lookup() == "HIT"
            assert len(asking.query(q)) == q.nbytes
            assert asking.framed(q, (NONE, NONE), MAP)[0] == OK
            before = asking.info()["sdpa_bytes"]
            sparse = (HEADS, DIM, 4, 2, HEADS, q.tobytes(), b"")
            answer = asking.command("QUERY_SPARSE_AUTO", *sparse)
            assert asking.info()["sdpa_bytes"] == before
        finally:
            asking.wire.ok("CONFIG", "SET", "maxmemory", 0)
        # with room what chooses the blocks is kept, and the answer is the same
        assert asking.command("QUERY_SPARSE_AUTO", *sparse) == answer and len(answer) == q.nbytes
        assert asking.info()["sdpa_bytes"] > before


def test_a_drop_frees_what_was_never_registered(shared: RunningServer) -> None:
    with connected(shared, "unregistered") as asking:
        asking.store(*sides(50, 20))
        asking.at("unregistered_attn").store(*sides(50, 20))
        assert asking.wire.ask("KV.PREFIX.DROP", "unregistered") == 0
        assert asking.lookup() == "MISS"
        assert asking.at("unregistered_attn").lookup() == "MISS"


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_queries_of_clients_that_left_are_not_computed(tmp_path: Path, lane: str) -> None:
    """All have begun before the clients leave, and each is as long as one that is waited for."""
    heads, tokens, dim, rows, many = 4, 8192, 64, 3000, 8
    keys, q, nothing = (normal(n, heads, count, dim) for n, count in enumerate((tokens, rows, 0)))
    words = ("ATTEND.PREFIX.QUERY", "busy", 0, heads, dim, 1, q.tobytes())
    body = fused_body("busy", 0, q, (nothing, nothing), bytes(range(heads)))
    with flagged(tmp_path / "data") as server, connected(server, "busy") as asking:
        asking.store(keys, keys)

        def begun() -> int:
            """Clients whose last command is a query."""
            return sum("cmd=attend.prefix.query" in one.lower() for one in clients(asking.wire))

        def until(count: int) -> None:
            ends_at = time.monotonic() + 30
            while begun() != count:
                assert time.monotonic() < ends_at, (begun(), count)
                time.sleep(0.002)

        before = asking.info()["sdpa_queries"]
        with ExitStack() as stack:
            for _ in range(many):
                leaving = stack.enter_context(connected(server, "busy"))
                if lane == "resp":
                    leaving.wire.send(request(*words))
                else:
                    leaving.lane.sock.sendall(frame(QUERY_FUSED, body))
            until(many)
        until(0)
        # takes turns with those that were begun before: it would be done after them
        assert len(asking.query(q)) == q.nbytes + 4 * heads * rows
        assert asking.info()["sdpa_queries"] - before == 1


def clients(wire: Wire) -> list[str]:
    """The lines of CLIENT LIST."""
    answer = wire.ask("CLIENT", "LIST")
    assert isinstance(answer, bytes)
    return answer.decode().splitlines()
