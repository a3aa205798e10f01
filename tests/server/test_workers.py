"""Several workers: one namespace lives on one of them, and every one knows where."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pion_vllm_mlx import cli
from pion_vllm_mlx.cache.pion_store import PionStore
from pion_vllm_mlx.cache.resp_client import RespClient
from pion_vllm_mlx.server.lineage import block_hashes
from tests.conftest import RunningServer, free_port_block
from tests.hostile.watching import eventually
from tests.server.wire import Refusal, Wire, request

WORKERS = 3
FLAGS = ("-w", str(WORKERS), "--independent-workers")


def start(folder: Path, *more: str) -> RunningServer:
    folder.mkdir(mode=0o700)
    port = free_port_block(2 + WORKERS)
    return RunningServer(port=port, dir=folder, flags=(*FLAGS, *more)).start()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = start(tmp_path_factory.mktemp("workers") / "data")
    yield server
    server.stop()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RunningServer]:
    """Workers that a test may kill."""
    server = start(tmp_path / "data")
    yield server
    server.stop()


def on(server: RunningServer, worker: int) -> Wire:
    return Wire.tcp(server.port + 2 + worker)


def ask(server: RunningServer, worker: int, *words: bytes | str | int) -> object:
    with on(server, worker) as wire:
        return wire.ask(*words)


def pid_of(server: RunningServer, worker: int) -> int:
    with on(server, worker) as wire:
        return int(wire.info("INFO", "server")["worker_process_id"])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_worker_answers_on_its_own_port_and_names_the_launcher(
    workers: RunningServer,
) -> None:
    for worker in range(WORKERS):
        with on(workers, worker) as wire:
            info = wire.info("INFO", "server")
            assert info["worker_id"] == str(worker)
            assert info["process_id"] == str(workers.pid)
            assert info["tcp_port"] == str(workers.port)
            assert info["affinity_port"] == str(workers.port + 2 + worker)
    # the launcher prints after it let the workers answer
    assert eventually(lambda: "ready on" in workers.output())
    assert "INDEPENDENT WORKERS" in workers.output() and "SEPARATE KEYSPACES" in workers.output()


def test_keys_are_private_to_a_worker(workers: RunningServer) -> None:
    assert ask(workers, 0, "SET", "k", "v") == "OK"
    assert ask(workers, 0, "GET", "k") == b"v"
    assert ask(workers, 1, "GET", "k") is None


def test_a_namespace_is_a_hit_on_every_worker_as_soon_as_it_is_registered(
    workers: RunningServer,
) -> None:
    with on(workers, 1) as home, on(workers, 2) as other:
        for number in range(50):
            name = f"hit{number}"
            assert other.ask("KV.PREFIX.LOOKUP", name) == "MISS"
            home.ok("KV.PREFIX.REGISTER", name, 4, "fp16")
            assert other.ask("KV.PREFIX.LOOKUP", name) == "HIT"
            assert other.ask("KV.PREFIX.OWNER", name) == "1"
            assert home.ask("KV.PREFIX.DROP", name) == 1
            assert other.ask("KV.PREFIX.LOOKUP", name) == "MISS"
            assert other.ask("KV.PREFIX.OWNER", name) == "-1"


REFUSED = [
    ("V.STOREBATCH", "{}_pk", 0, 0, 1, bytes(16)),
    ("V.STOREBATCH", "{}_pk", 0, 0, 1 << 14, bytes(1 << 18)),
    ("V.FETCH", "{}_pk", 0, "RANGE", 0, 1),
    ("V.INFO", "{}_pv"),
    ("V.SNAPSHOT", "{}_pk"),
    ("V.RESTORE", "{}_pk", 1),
    ("V.COMMIT", "{}_pk", 1),
    ("V.EXPORT", "{}_pk", "{}_pv", 1, 1, 4, 0, 1),
    ("V.CREATE", "{}_pk", 4),
    ("V.DROP", "{}_pk"),
]
REFUSED_BY_NAME = [
    ("KV.PREFIX.BLOCKS", "{}"),
    ("KV.PREFIX.MEMBERSHIP", "{}", 1, bytes(8)),
    ("KV.PREFIX.MAP", "{}"),
    ("KV.PREFIX.PIN", "{}"),
    ("KV.PREFIX.EXPIRE", "{}", 5),
]


@pytest.mark.parametrize("words", [*REFUSED, *REFUSED_BY_NAME], ids=lambda words: str(words[0]))
def test_another_worker_says_where_it_lives(
    workers: RunningServer, words: tuple[bytes | str | int, ...]
) -> None:
    name = "where"
    assert ask(workers, 2, "KV.PREFIX.REGISTER", name, 4, "fp16") == "OK"
    where = f"{words[0]!r} ".replace("'", "") if words in REFUSED_BY_NAME else ""
    sent = [word.format(name) if isinstance(word, str) else word for word in words]
    with on(workers, 0) as wire:
        answer, pong = wire.together(tuple(sent), ("PING",))
    assert isinstance(answer, Refusal) and pong == "PONG"
    assert answer == f"ERR {where}session lives on worker 2"


def test_a_drop_of_several_names_frees_nothing_when_one_lives_elsewhere(
    workers: RunningServer,
) -> None:
    assert ask(workers, 0, "KV.PREFIX.REGISTER", "near", 4, "fp16") == "OK"
    assert ask(workers, 1, "KV.PREFIX.REGISTER", "far", 4, "fp16") == "OK"
    answer = ask(workers, 0, "KV.PREFIX.DROP", "near", "far")
    assert answer == "ERR KV.PREFIX.DROP session lives on worker 1: far"
    assert ask(workers, 0, "KV.PREFIX.LOOKUP", "near") == "HIT"


def test_registering_again_elsewhere_makes_no_second_copy(workers: RunningServer) -> None:
    name = "again"
    assert ask(workers, 0, "KV.PREFIX.REGISTER", name, 4, "fp16") == "OK"
    with on(workers, 1) as other:
        before = other.info("KV.PREFIX.INFO")["vstore_sessions"]
        assert other.ask("KV.PREFIX.REGISTER", name, 4, "fp16") == "OK"
        assert other.info("KV.PREFIX.INFO")["vstore_sessions"] == before
        answer = other.ask("KV.PREFIX.REGISTER", name, 4, "fp16", "BLOCKS", 16, 0, b"")
    assert answer == "ERR KV.PREFIX.REGISTER session lives on worker 0"


def sessions(server: RunningServer) -> int:
    """How many all workers hold together."""
    total = 0
    for worker in range(WORKERS):
        with on(server, worker) as wire:
            total += int(wire.info("KV.PREFIX.INFO")["vstore_sessions"])
    return total


def test_workers_asked_at_once_create_a_namespace_once(workers: RunningServer) -> None:
    before = sessions(workers)
    wires = [on(workers, worker) for worker in range(WORKERS)]
    for number in range(60):
        for wire in wires:
            wire.send(request("KV.PREFIX.REGISTER", f"race{number}", 4, "fp16"))
        assert [wire.reply() for wire in wires] == ["OK"] * WORKERS
    for wire in wires:
        wire.close()
    assert sessions(workers) == before + 120


def test_a_hit_is_credited_where_it_was_asked_with_what_the_owner_knows(
    workers: RunningServer,
) -> None:
    assert ask(workers, 0, "KV.PREFIX.REGISTER", "paid", 2, "fp32", "PREFILL_MS", 1500) == "OK"
    assert ask(workers, 0, "V.STOREBATCH", "paid_pk", 0, 0, 5, bytes(40)) == "OK"
    with on(workers, 1) as other:
        other.ok("PION.STATS", "RESET")
        assert other.ask("KV.PREFIX.LOOKUP", "paid") == "HIT"
        stats = other.info("INFO", "pion")
    assert stats["kvprefix_hits"] == stats["kvprefix_hits_measured"] == "1"
    assert stats["kvprefix_tokens_served"] == "5"
    assert stats["prefill_seconds_avoided"] == "1.500"


def test_an_expired_namespace_is_a_miss_everywhere(workers: RunningServer) -> None:
    assert ask(workers, 0, "KV.PREFIX.REGISTER", "brief", 4, "fp16") == "OK"
    assert ask(workers, 0, "KV.PREFIX.EXPIRE", "brief", 0) == 1
    assert ask(workers, 1, "KV.PREFIX.LOOKUP", "brief") == "MISS"


def test_a_hit_elsewhere_keeps_a_namespace_from_being_evicted(tmp_path: Path) -> None:
    server = start(tmp_path / "data", "--max-sessions", "4")
    try:
        with on(server, 0) as home, on(server, 1) as other:
            home.ok("KV.PREFIX.REGISTER", "old", 4, "fp16")
            home.ok("KV.PREFIX.REGISTER", "new", 4, "fp16")
            assert other.ask("KV.PREFIX.LOOKUP", "old") == "HIT"
            time.sleep(1.0)  # both tell each other a few times a second
            home.ok("KV.PREFIX.REGISTER", "newer", 4, "fp16")
            assert other.ask("KV.PREFIX.LOOKUP", "new") == "MISS"
            assert other.ask("KV.PREFIX.LOOKUP", "old") == "HIT"
    finally:
        server.stop()


def test_an_expired_namespace_has_no_owner_anywhere(workers: RunningServer) -> None:
    assert ask(workers, 0, "KV.PREFIX.REGISTER", "owned", 4, "fp16") == "OK"
    assert ask(workers, 1, "KV.PREFIX.OWNER", "owned") == "0"
    assert ask(workers, 0, "KV.PREFIX.EXPIRE", "owned", 0) == 1
    assert ask(workers, 1, "KV.PREFIX.OWNER", "owned") == "-1"


def test_a_lineage_lives_on_one_worker_and_the_others_say_which(workers: RunningServer) -> None:
    tokens = np.arange(128, dtype="<u4").tobytes()
    index, miss = "pps:0123ab", [0, None, 0]
    for worker in range(WORKERS):
        assert ask(workers, worker, "KV.PREFIX.LONGEST", index, tokens) == miss
    with on(workers, 1) as home:
        home.ok("KV.PREFIX.REGISTER", "pps0123abs1", 4, "fp16")
        for side in ("_pk", "_pv"):
            home.ok("V.STOREBATCH", f"pps0123abs1{side}", 0, 0, 128, bytes(16 * 128))
        home.ask("HSET", f"{index}:seg:1", "parent", -1, "base", 0, "len", 128, "toks", tokens)
        home.ask("HSET", f"{index}:blk", next(block_hashes(tokens)), "1:64")
        assert home.ask("KV.PREFIX.LONGEST", index, tokens) == [128, b"pps0123abs1", 128]
    for worker in (0, 2):
        answer = ask(workers, worker, "KV.PREFIX.LONGEST", index, tokens)
        assert answer == "ERR KV.PREFIX.LONGEST session lives on worker 1"
        refusal = ask(workers, worker, "KV.PREFIX.REGISTER", "pps0123abs2", 4, "fp16")
        assert refusal == "ERR KV.PREFIX.REGISTER session lives on worker 1"
        refusal = ask(workers, worker, "V.CREATE", "pps0123abs2_pk", 4)
        assert refusal == "ERR session lives on worker 1"
        assert ask(workers, worker, "KV.PREFIX.REGISTER", "pps0123abs1", 4, "fp16") == "OK"
    assert ask(workers, 1, "KV.PREFIX.REGISTER", "pps0123abs2", 4, "fp16") == "OK"
    assert ask(workers, 1, "KV.PREFIX.DROP", "pps0123abs1", "pps0123abs2") == 2
    assert ask(workers, 2, "KV.PREFIX.LONGEST", index, tokens) == miss


def test_a_redirected_store_keeps_its_password(tmp_path: Path) -> None:
    server = start(tmp_path / "data", "--requirepass", "secret")
    rows = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)

    def stores() -> list[PionStore]:
        """One connected to each worker, all knowing the shared port."""
        return [
            PionStore(
                port=server.port,
                vquant="fp32",
                client=RespClient(port=server.port + 2 + worker, password="secret"),
            )
            for worker in range(WORKERS)
        ]

    try:
        writers = stores()
        writers[1].store_prefix("locked", rows, -rows)
        for worker, store in enumerate(stores()):
            assert np.array_equal(store.fetch_prefix("locked", 2, 3, 4)[0], rows)
            assert store.redirect_count == int(worker != 1)
            store.close()
        for store in writers:
            store.close()
    finally:
        server.stop()


def test_every_worker_has_a_unix_socket_of_its_own(tmp_path: Path) -> None:
    unix = tmp_path / "socket"
    server = start(tmp_path / "data", "--unixsocket", str(unix))
    try:
        for worker in range(WORKERS):
            with Wire.unix(f"{unix}.{worker}") as wire:
                assert wire.info("INFO", "server")["worker_id"] == str(worker)
    finally:
        server.stop()
    assert not list(tmp_path.glob("socket*"))


def test_twelve_fresh_connections_hit_and_a_store_finds_the_rows_in_one_hop(
    workers: RunningServer,
) -> None:
    rows = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    with PionStore(port=workers.port, vquant="fp32") as store:
        store.store_prefix("dozen", rows, -rows)
        owner = store.owner("dozen")
    hops = []
    for _ in range(12):
        with PionStore(port=workers.port, auto_redirect=True) as store:
            assert store.lookup("dozen")
            assert store.owner("dozen") == owner
            keys, values = store.fetch_prefix("dozen", 2, 3, 4)
            hops.append(store.redirect_count)
        assert np.array_equal(keys, rows) and np.array_equal(values, -rows)
    assert set(hops) <= {0, 1}
    with PionStore(port=workers.port + 2 + (owner + 1) % WORKERS) as store:
        store.port = workers.port
        assert np.array_equal(store.fetch_prefix("dozen", 2, 3, 4)[0], rows)
        assert store.redirect_count == 1


def test_connections_that_come_at_once_are_spread_over_the_workers(
    workers: RunningServer,
) -> None:
    wires = [Wire.tcp(workers.port) for _ in range(60)]
    seen = {wire.info("INFO", "server")["worker_id"] for wire in wires}
    for wire in wires:
        wire.close()
    assert len(seen) > 1


def test_a_killed_worker_comes_back_with_its_data_and_the_server_is_the_same(
    own: RunningServer,
) -> None:
    assert ask(own, 1, "KV.PREFIX.REGISTER", "kept", 2, "fp32") == "OK"
    rows = np.arange(6, dtype=np.float32).tobytes()
    assert ask(own, 1, "V.STOREBATCH", "kept_pk", 0, 0, 3, rows) == "OK"
    assert ask(own, 1, "SET", "key", "value") == "OK"
    victim = pid_of(own, 1)
    os.kill(victim, signal.SIGKILL)
    assert ask(own, 0, "KV.PREFIX.LOOKUP", "kept") == "HIT"
    assert ask(own, 0, "KV.PREFIX.REGISTER", "kept", 2, "fp32") == "OK"
    assert ask(own, 1, "V.FETCH", "kept_pk", 0, "RANGE", 0, 3) == rows
    assert ask(own, 1, "GET", "key") == b"value"
    assert pid_of(own, 1) != victim
    with on(own, 1) as wire:
        assert wire.info("INFO", "server")["process_id"] == str(own.pid)
    assert ask(own, 0, "KV.PREFIX.OWNER", "kept") == "1"


def break_snapshot(server: RunningServer, worker: int) -> bytes:
    """A byte of a worker's keys is flipped, and the worker killed; the file as it was."""
    assert ask(server, worker, "SET", "key", f"of {worker}") == "OK"
    assert ask(server, worker, "SAVE") == "OK"
    path = server.dir / f"pion.snapshot.{worker}"
    whole = path.read_bytes()
    path.write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    os.kill(pid_of(server, worker), signal.SIGKILL)
    return whole


def down(server: RunningServer) -> list[int]:
    """Which workers the status file calls down."""
    status = json.loads((server.dir / "pion.status").read_text())
    assert status["pid"] == server.pid and status["port"] == server.port
    return list(status["down"])


def test_a_worker_that_cannot_start_takes_no_other_with_it_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sock = tmp_path / "s"
    server = start(tmp_path / "data", "--unixsocket", str(sock))
    try:
        for worker in range(WORKERS):
            assert ask(server, worker, "KV.PREFIX.REGISTER", f"ns{worker}", 4, "fp16") == "OK"
        wholes = {worker: break_snapshot(server, worker) for worker in (0, 1)}
        assert eventually(lambda: down(server) == [0, 1], seconds=60)
        for _ in range(3):
            for worker in (0, 1):
                answer = ask(server, worker, "PING")
                assert isinstance(answer, Refusal)
                assert answer.startswith(f"LOADING worker {worker} is down: ")
                with Wire.unix(f"{sock}.{worker}") as wire:
                    assert wire.ask("PING") == answer
        with socket.create_connection(("127.0.0.1", server.port + 1)) as lane:
            lane.settimeout(10)
            assert lane.recv(1) == b""
        assert ask(server, 2, "KV.PREFIX.LOOKUP", "ns2") == "HIT"
        for _ in range(6):
            with Wire.tcp(server.port) as anyone:
                assert anyone.ask("KV.PREFIX.OWNER", "ns1") == "1"
        assert cli.main(["stats", "--url", f"tcp://127.0.0.1:{server.port}"]) == 0
        out = capsys.readouterr().out
        assert "1 of its 3 workers added up" in out and "sessions 2 of" in out
        assert "  worker 0 does not answer: " in out and "worker 1 is down: it cannot be" in out
        assert cli.main(["doctor", "--dir", str(server.dir)]) == 1
        assert "a server whose worker 0, 1 is down: end it" in capsys.readouterr().err
        for worker, whole in wholes.items():
            (server.dir / f"pion.snapshot.{worker}").write_bytes(whole)
        assert eventually(lambda: down(server) == [], seconds=60)
        for worker in (0, 1):
            assert ask(server, worker, "GET", "key") == b"of %d" % worker
            assert ask(server, 2, "KV.PREFIX.LOOKUP", f"ns{worker}") == "HIT"
        assert "worker 1 is DOWN" in server.output() and "worker 1 is up again" in server.output()
    finally:
        assert server.stop() == 0


def test_where_no_worker_can_be_started_the_server_ends(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    flags = ("-w", "2", "--independent-workers")
    server = RunningServer(free_port_block(4), tmp_path / "data", flags).start()
    try:
        for worker in (0, 1):
            break_snapshot(server, worker)
        assert server.process is not None
        assert server.process.wait(timeout=60) == 1
        assert "FATAL no worker can be started" in server.output()
    finally:
        server.stop()


def test_workers_end_with_a_killed_launcher_and_the_next_server_has_everything(
    own: RunningServer,
) -> None:
    for worker in range(WORKERS):
        assert ask(own, worker, "KV.PREFIX.REGISTER", f"ns{worker}", 4, "fp16") == "OK"
    own.restart()
    for worker in range(WORKERS):
        for asked in range(WORKERS):
            assert ask(own, asked, "KV.PREFIX.OWNER", f"ns{worker}") == str(worker)
            assert ask(own, asked, "KV.PREFIX.LOOKUP", f"ns{worker}") == "HIT"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_all_of_them_and_leaves_nothing_listening(
    own: RunningServer, number: signal.Signals
) -> None:
    pids = [pid_of(own, worker) for worker in range(WORKERS)]
    assert own.process is not None
    own.process.send_signal(number)
    assert own.process.wait(timeout=20) == 0
    assert not any(is_running(pid) for pid in pids)
    for port in range(own.port, own.port + 2 + WORKERS):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not (own.dir / "pion.directory").exists()


def test_copies_of_all_workers_hold_everything_and_none_passes_for_all(
    own: RunningServer, tmp_path: Path
) -> None:
    for worker in range(WORKERS):
        assert ask(own, worker, "KV.PREFIX.REGISTER", f"ns{worker}", 2, "fp32") == "OK"
        rows = np.full(6, worker, np.float32).tobytes()
        assert ask(own, worker, "V.STOREBATCH", f"ns{worker}_pk", 0, 0, 3, rows) == "OK"
        for name in ("backup", f"backup.w{(worker + 1) % WORKERS}", f"backup.w{worker}.bak"):
            answer = ask(own, worker, "KV.PREFIX.SAVE", name)
            assert isinstance(answer, Refusal)
            assert f"on port {own.port + 2} + N, for a path that ends in .wN" in answer
            assert f"this is worker {worker}" in answer
    assert not list(own.dir.glob("backup*"))
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    for worker in range(WORKERS):
        for _ in range(2):  # over its own
            assert ask(own, worker, "KV.PREFIX.SAVE", f"backup.w{worker}") == "OK"
        copied = (own.dir / f"backup.w{worker}").read_bytes()
        (other / f"pion.vstore.{worker}").write_bytes(copied)
        assert ask(own, worker, "KV.PREFIX.SAVE") == "OK"
    own.stop()
    restored = RunningServer(own.port, other, FLAGS).start()
    try:
        for worker in range(WORKERS):
            assert ask(restored, 0, "KV.PREFIX.LOOKUP", f"ns{worker}") == "HIT"
            found = ask(restored, worker, "V.FETCH", f"ns{worker}_pk", 0, "RANGE", 0, 3)
            assert found == np.full(6, worker, np.float32).tobytes()
    finally:
        restored.stop()


@pytest.mark.parametrize("worker", [0, 2])
def test_shutdown_on_any_worker_stops_the_server(own: RunningServer, worker: int) -> None:
    pids = [pid_of(own, number) for number in range(WORKERS)]
    assert ask(own, worker, "KV.PREFIX.REGISTER", "kept", 4, "fp16") == "OK"
    with on(own, worker) as wire, on(own, 1) as other:
        wire.send(request("SHUTDOWN"))
        assert wire.closed() and other.closed()
    assert own.process is not None and own.process.wait(timeout=20) == 0
    assert not any(map(is_running, pids))
    assert "started again" not in own.output()
    own.start()
    assert ask(own, 1, "KV.PREFIX.OWNER", "kept") == str(worker)


def test_a_worker_that_is_told_to_end_alone_comes_back(own: RunningServer) -> None:
    before = pid_of(own, 1)
    os.kill(before, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while "started again" not in own.output():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert pid_of(own, 1) != before  # who asks waits until it is back


def test_a_namespace_on_two_workers_is_dropped_from_one_of_them(own: RunningServer) -> None:
    assert ask(own, 1, "KV.PREFIX.REGISTER", "twice", 4, "fp16") == "OK"
    own.stop()
    alone = RunningServer(port=own.port, dir=own.dir).start()
    with Wire.tcp(own.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "twice", 4, "fp16")
    alone.stop()
    own.start()
    owners = {str(ask(own, worker, "KV.PREFIX.OWNER", "twice")) for worker in range(WORKERS)}
    assert len(owners) == 1 and owners < {"0", "1"}
    owner = int(owners.pop())
    assert isinstance(ask(own, 1 - owner, "V.INFO", "twice_pk"), Refusal)
    assert isinstance(ask(own, owner, "V.INFO", "twice_pk"), bytes)


def test_tenants_see_their_own_on_every_worker_and_nothing_of_others(tmp_path: Path) -> None:
    unix = tmp_path / "socket"
    flags = ("--requirepass", "pw", "--tenant", "a=pa", "--tenant", "b=pb")
    server = start(tmp_path / "data", *flags, "--unixsocket", str(unix))
    try:
        with on(server, 0) as home, on(server, 1) as mine, on(server, 1) as other:
            home.ok("AUTH", "a", "pa")
            mine.ok("AUTH", "a", "pa")
            other.ok("AUTH", "b", "pb")
            home.ok("KV.PREFIX.REGISTER", "n", 4, "fp16")
            assert mine.ask("KV.PREFIX.LOOKUP", "n") == "HIT"
            refusal = "ERR KV.PREFIX.DROP session lives on worker 0: n"
            assert mine.ask("KV.PREFIX.DROP", "n") == refusal
            assert other.ask("KV.PREFIX.LOOKUP", "n") == "MISS"
            assert other.ask("KV.PREFIX.OWNER", "n") == "-1"
            other.ok("KV.PREFIX.REGISTER", "n", 4, "fp16")
            assert other.ask("KV.PREFIX.OWNER", "n") == "1"
        with Wire.unix(str(unix)) as wire:
            wire.ok("AUTH", "pw")
            assert wire.ask("KV.PREFIX.LOOKUP", "a:n") == "HIT"
    finally:
        server.stop()
    assert not unix.exists()


def test_one_worker_answers_on_its_own_port_too(shared: RunningServer) -> None:
    with Wire.tcp(shared.port + 2) as wire:
        assert wire.ask("PING") == "PONG"
        info = wire.info("INFO", "server")
    assert (info["affinity_port"], info["workers"]) == (str(shared.port + 2), "1")


def test_a_profile_may_cap_the_workers_at_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    flags = ("-w", "3", "--profile", "ai")
    server = RunningServer(port=free_port_block(), dir=tmp_path / "data", flags=flags).start()
    try:
        with Wire.tcp(server.port) as wire:
            assert wire.info("INFO", "server")["workers"] == "1"
    finally:
        server.stop()


def test_a_taken_port_of_a_worker_is_fatal_and_nothing_listens(tmp_path: Path) -> None:
    port = free_port_block(2 + WORKERS)
    (tmp_path / "data").mkdir(mode=0o700)
    with socket.socket() as taken:
        # connections of earlier tests may still close on a free port
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port + 3))
        taken.listen()
        server = RunningServer(port=port, dir=tmp_path / "data", flags=FLAGS)
        with pytest.raises(RuntimeError, match="worker 1 needs a port of its own"):
            server.start()
    assert not server.answers()
