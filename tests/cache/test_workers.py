"""PionPromptCache and a server with several workers: hits where the namespace lives, or misses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.cache import inproc
from pion_vllm_mlx.cache.completion import COMPLETION_LAYER
from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.cache.store_client import Registration
from pion_vllm_mlx.cache.store_client_endpoint import BackOff, _Known
from pion_vllm_mlx.cache.store_client_routes import usual_worker
from tests.cache.continuing import continued, unstored
from tests.conftest import RunningServer, free_port_block
from tests.models import tiny_model, token_ids

WORKERS = 3
IDS = token_ids(70)
OTHER_IDS = token_ids(70, seed=5)
DEADLINE = 0.5
# Far above what an answer takes, for machines that are busy.
PATIENT = 20.0
LANES = {"mapped": False, "stored": True}


@pytest.fixture(autouse=True)
def nothing_in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    monkeypatch.setattr(BackOff, "FIRST_SECONDS", 0.05)
    inproc.PROCESS.forget()
    yield


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if LANES[request.param]:
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
    return str(request.param)


def start(folder: Path, workers: int, *more: str) -> RunningServer:
    folder.mkdir(mode=0o700)
    server = RunningServer(free_port_block(2 + WORKERS), folder, more)
    return server.start(*flags(workers))


def flags(workers: int) -> tuple[str, ...]:
    return () if workers == 1 else ("-w", str(workers), "--independent-workers")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = start(tmp_path_factory.mktemp("workers") / "data", WORKERS)
    yield server
    server.stop()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RunningServer]:
    """Workers that a test may kill."""
    server = start(tmp_path / "data", WORKERS)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_5")


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[bytes]:
    return continued(model, unstored(model, IDS))


@pytest.fixture(scope="module")
def others(model: Any) -> list[bytes]:
    return continued(model, unstored(model, OTHER_IDS))


def on(server: RunningServer, worker: int) -> RespConnection:
    return RespConnection(Address(port=server.port + 2 + worker), deadline_seconds=PATIENT)


def pid_of(server: RunningServer, worker: int) -> int:
    with on(server, worker) as connection:
        text = connection.command("INFO", "server")
    assert isinstance(text, bytes)
    return int(text.decode().partition("worker_process_id:")[2].split()[0])


def kill(pid: int) -> None:
    """SIGKILL, and wait until the process is no more."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        for _ in range(2000):
            os.kill(pid, 0)
            time.sleep(0.005)
        raise AssertionError(f"process {pid} does not end")


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes stand still inside the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def owner_of(server: RunningServer, name: str) -> int:
    with on(server, 0) as connection:
        return int(str(connection.command("KV.PREFIX.OWNER", name)))


def named(worker: int, stem: str) -> str:
    """A namespace that a client puts on a worker of its choice."""
    names = (f"{stem}{number}" for number in range(1000))
    return next(name for name in names if usual_worker(name, WORKERS) == worker)


def ask(pion: PionPromptCache, model: Any, name: str, wanted: list[bytes]) -> str:
    """Asks for the prefix, whose tokens must be right; the lane, or "none"."""
    assert continued(model, pion.get_or_prefill(IDS, name)) == wanted
    return str(pion.stats()["last_lane"])


def fresh(server: RunningServer, model: Any, name: str, wanted: list[bytes]) -> str:
    """The same by a client that knows nothing yet."""
    with PionPromptCache(model, port=server.port, deadline_seconds=PATIENT) as pion:
        return ask(pion, model, name, wanted)


def store(server: RunningServer, model: Any, name: str, wanted: list[bytes]) -> None:
    with PionPromptCache(model, port=server.port, deadline_seconds=PATIENT) as pion:
        assert ask(pion, model, name, wanted) == "none"
        assert pion.stats()["bytes_stored"] > 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5", "mamba"])
def test_every_connection_hits_bit_equal_wherever_it_lands(
    shared: RunningServer, name: str, lane: str
) -> None:
    family = tiny_model(name)
    right = continued(family, unstored(family, IDS))
    spaces = [named(worker, f"{name}-{lane}") for worker in range(WORKERS)]
    for worker, space in enumerate(spaces):
        store(shared, family, space, right)
        assert owner_of(shared, space) == worker
    expected = "stored" if name == "mamba" else lane  # which has no rows to map
    for _ in range(4):
        with PionPromptCache(family, port=shared.port, deadline_seconds=PATIENT) as pion:
            assert {ask(pion, family, space, right) for space in spaces} == {expected}
            stats = pion.stats()
            assert (stats["hits"], stats["misses"]) == (WORKERS, 0)
            assert not stats["lane_failures"] and not stats["unavailable"]


@pytest.mark.parametrize("worker", range(WORKERS))
def test_a_client_that_was_given_a_worker_s_own_port_finds_the_others(
    shared: RunningServer, model: Any, wanted: list[bytes], lane: str, worker: int
) -> None:
    spaces = [named(home, f"own-port-{lane}-{worker}-") for home in range(WORKERS)]
    for space in spaces:
        store(shared, model, space, wanted)
    with PionPromptCache(model, port=shared.port + 2 + worker, deadline_seconds=PATIENT) as pion:
        assert {ask(pion, model, space, wanted) for space in spaces} == {lane}


_FRESH = """
import json, sys
from pion_vllm_mlx import PionPromptCache
from tests.models import tiny_model, token_ids
from tests.cache.continuing import continued
model = tiny_model("qwen3_5")
seen = []
for name in sys.argv[2:]:
    with PionPromptCache(model, url=sys.argv[1], deadline_seconds=20.0) as cache:
        filled = cache.get_or_prefill(token_ids(70), name)
        seen.append([cache.stats()["last_lane"], b"".join(continued(model, filled)).hex()])
print(json.dumps(seen))
"""


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
@pytest.mark.parametrize("workers", [2, 3])
def test_another_process_hits_bit_equal(
    tmp_path: Path, model: Any, wanted: list[bytes], lane: str, workers: int, unix: bool
) -> None:
    socket = tmp_path / "socket"
    server = start(tmp_path / "data", workers, "--unixsocket", str(socket))
    url = f"unix://{socket}" if unix else f"tcp://127.0.0.1:{server.port}"
    try:
        names = [f"fresh{number}" for number in range(6)]
        for name in names:
            store(server, model, name, wanted)
        assert {owner_of(server, name) for name in names} == set(range(workers))
        out = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _FRESH, url, *names],
            cwd=Path(__file__).parents[2], capture_output=True, check=True, timeout=120, text=True,
        )  # fmt: skip
    finally:
        server.stop()
    assert json.loads(out.stdout) == [[lane, b"".join(wanted).hex()]] * len(names)


def test_a_same_host_client_uses_each_worker_s_unix_socket(
    tmp_path: Path, model: Any, wanted: list[bytes]
) -> None:
    socket = tmp_path / "socket"
    server = start(tmp_path / "data", WORKERS, "--unixsocket", str(socket))
    try:
        with PionPromptCache(model, port=server.port, deadline_seconds=PATIENT) as pion:
            for worker in range(WORKERS):
                ask(pion, model, named(worker, "unix"), wanted)
            used = {str(way[1].address) for way in pion._endpoint._ways.values()}
    finally:
        server.stop()
    assert used == {f"{socket}.{worker}" for worker in range(WORKERS)}


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_workers_on_ports_that_cannot_be_known_are_found_by_their_sockets_or_not_at_all(
    tmp_path: Path, model: Any, wanted: list[bytes], unix: bool
) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    command = [sys.executable, "-m", "pion_vllm_mlx", "server", "--kvcache", "-p", "0"]
    command += ["--dir", str(tmp_path / "data"), *flags(2)]
    command += ["--unixsocket", str(tmp_path / "socket")] if unix else []
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        ready = next(line for line in lines if " ready on " in line)
        port = int(ready.rpartition(":")[2])
        with PionPromptCache(model, port=port, deadline_seconds=PATIENT) as pion:
            lanes = [ask(pion, model, "anywhere", wanted) for _ in range(2)]
            assert lanes == ["none", "mapped" if unix else "none"]
            assert unix or "cannot be known" in str(pion.last_miss_reason)
    finally:
        server.terminate()
        server.communicate(timeout=30)


def test_a_killed_worker_s_prefixes_hit_again_in_old_and_new_clients(
    own: RunningServer, model: Any, wanted: list[bytes], lane: str
) -> None:
    spaces = [named(worker, "kill") for worker in range(WORKERS)]
    for space in spaces:
        store(own, model, space, wanted)
    with PionPromptCache(model, port=own.port, deadline_seconds=10.0) as old:
        assert {ask(old, model, space, wanted) for space in spaces} == {lane}
        for victim in range(WORKERS):
            kill(pid_of(own, victim))
            # the worker's port is the launcher's: who knocks waits until it is back
            assert ask(old, model, spaces[victim], wanted) == lane
            assert {fresh(own, model, space, wanted) for space in spaces} == {lane}
        assert old.misses == 0


def test_a_stopped_worker_costs_its_deadline_once_and_the_others_nothing(
    own: RunningServer, model: Any, wanted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackOff, "FIRST_SECONDS", 60.0)
    monkeypatch.setattr(BackOff, "LONGEST_SECONDS", 60.0)
    spaces = [named(worker, "stop") for worker in range(WORKERS)]
    for space in spaces:
        store(own, model, space, wanted)
    pids = [pid_of(own, worker) for worker in range(WORKERS)]
    with contextlib.ExitStack() as opened:
        with stopped(pids[0], pids[2]):
            # so that the worker that is stopped next holds the connection to the shared port, too
            pion = PionPromptCache(model, port=own.port, deadline_seconds=PATIENT)
            opened.enter_context(pion)
            assert ask(pion, model, spaces[1], wanted) == "mapped"
        for space in spaces:
            assert ask(pion, model, space, wanted) == "mapped"
        ways = pion._endpoint._ways
        (to_victim,) = (way[1] for (worker, _), way in ways.items() if worker == 1)
        with stopped(pids[1]), to_victim.deadline(DEADLINE):
            assert ask(pion, model, spaces[1], wanted) == "none"
            assert pion.stats()["unavailable"] == 1
            for _ in range(3):
                assert ask(pion, model, spaces[1], wanted) == "none"
                assert "tried again" in str(pion.last_miss_reason), "nobody was asked"
                assert ask(pion, model, spaces[0], wanted) == "mapped"
                assert ask(pion, model, spaces[2], wanted) == "mapped"
    assert fresh(own, model, spaces[1], wanted) == "mapped"


def test_other_numbers_of_workers_serve_what_they_have_and_miss_the_rest(
    own: RunningServer, model: Any, wanted: list[bytes], others: list[bytes], lane: str
) -> None:
    spaces = [named(worker, "number") for worker in range(WORKERS)]
    for space in spaces:
        store(own, model, space, wanted)
    with PionPromptCache(model, port=own.port, deadline_seconds=10.0) as old:
        assert {ask(old, model, space, wanted) for space in spaces} == {lane}
        own.stop()
        own.start(*flags(2))
        assert [ask(old, model, space, wanted) for space in spaces[:2]] == [lane, lane]
        # what worker 2 had is prefilled, and stored with other tokens on one that is there
        with PionPromptCache(model, port=own.port, deadline_seconds=PATIENT) as another:
            assert continued(model, another.get_or_prefill(OTHER_IDS, spaces[2])) == others
            assert another.misses == 1 and owner_of(own, spaces[2]) in (0, 1)
        assert ask(old, model, spaces[2], wanted) == "none"
        assert ask(old, model, spaces[2], wanted) == lane
        own.stop()
        own.start(*flags(1))
        assert ask(old, model, spaces[0], wanted) == lane
        assert ask(old, model, spaces[1], wanted) == "none"
        own.stop()
        own.start(*flags(WORKERS))
        for _ in range(2):
            for space in spaces:
                ask(old, model, space, wanted)
                fresh(own, model, space, wanted)
        assert {fresh(own, model, space, wanted) for space in spaces} == {lane}
        assert old.stats()["rejected"] == 0


@pytest.mark.parametrize("home", range(WORKERS))
def test_a_client_that_knew_one_worker_finds_its_prefixes_among_several(
    shared: RunningServer, model: Any, wanted: list[bytes], lane: str, home: int
) -> None:
    name = named(home, f"alone-{lane}")
    store(shared, model, name, wanted)
    for worker in range(WORKERS):
        with PionPromptCache(model, port=shared.port + 2 + worker, deadline_seconds=PATIENT) as old:
            old._endpoint._known = _Known()  # as before a restart with more workers
            assert ask(old, model, name, wanted) == lane
            stats = old.stats()
            assert stats["rejected"] == stats["unavailable"] == 0


def test_a_prefix_that_moved_to_another_worker_is_found_there(
    shared: RunningServer, model: Any, wanted: list[bytes], others: list[bytes], lane: str
) -> None:
    name = named(0, f"moved-{lane}")
    store(shared, model, name, wanted)
    with PionPromptCache(model, port=shared.port, deadline_seconds=PATIENT) as old:
        assert ask(old, model, name, wanted) == lane
        with on(shared, 0) as first, on(shared, 1) as second:
            assert first.command("KV.PREFIX.DROP", name) == 1
            assert second.command("KV.PREFIX.REGISTER", name, 4, "fp16") == "OK"
        # an unfinished prefix, on another worker: replaced there
        assert fresh(shared, model, name, wanted) == "none"
        assert owner_of(shared, name) == 1
        assert ask(old, model, name, wanted) == lane
        with PionPromptCache(model, port=shared.port, deadline_seconds=PATIENT) as pion:
            assert continued(model, pion.get_or_prefill(OTHER_IDS, name)) == others
            assert pion.misses == 1
        assert ask(old, model, name, wanted) == "none"


def test_a_record_that_another_worker_kept_makes_no_hit(
    shared: RunningServer, model: Any, wanted: list[bytes], others: list[bytes], lane: str
) -> None:
    name = named(2, f"record-{lane}")
    store(shared, model, name, wanted)
    with on(shared, 2) as home:
        record: Any = home.command("SSM.PREFIX.FETCH", name, COMPLETION_LAYER)
        states: list[Any] = [home.command("SSM.PREFIX.FETCH", name, layer) for layer in range(4)]
    with PionPromptCache(model, port=shared.port, deadline_seconds=PATIENT) as pion:
        assert continued(model, pion.get_or_prefill(OTHER_IDS, name)) == others
    assert owner_of(shared, name) == 2
    for worker in (0, 1):
        with on(shared, worker) as wrong:
            wrong.command("SSM.PREFIX.STORE", name, COMPLETION_LAYER, record)
            for layer, state in enumerate(states):
                if state is not None:
                    wrong.command("SSM.PREFIX.STORE", name, layer, state)
    for worker in (0, 1):
        with PionPromptCache(model, port=shared.port, deadline_seconds=PATIENT) as pion:
            pion._client._routes._remember(name, worker)  # as after a route that is over
            assert continued(model, pion.get_or_prefill(IDS, name)) == wanted
            assert pion.hits == 0
            assert continued(model, pion.get_or_prefill(IDS, name)) == wanted
        with PionPromptCache(model, port=shared.port, deadline_seconds=PATIENT) as pion:
            assert continued(model, pion.get_or_prefill(OTHER_IDS, name)) == others


def test_a_prefix_that_another_worker_got_meanwhile_is_stored_there(
    shared: RunningServer, model: Any, wanted: list[bytes], lane: str
) -> None:
    name = named(0, f"meanwhile-{lane}")
    with PionPromptCache(model, port=shared.port, deadline_seconds=PATIENT) as pion:
        probe = pion._client.probe

        def then_registered(*args: Any, **options: Any) -> Any:
            found = probe(*args, **options)
            with PionPromptCache(port=shared.port + 2 + 1, deadline_seconds=PATIENT) as other:
                other.resp.command("KV.PREFIX.REGISTER", name, 1, "fp16")
            return found

        pion._client.probe = then_registered  # type: ignore[method-assign]
        assert ask(pion, model, name, wanted) == "none"
        pion._client.probe = probe  # type: ignore[method-assign]
        assert ask(pion, model, name, wanted) in ("none", lane)
        assert ask(pion, model, name, wanted) == lane
    assert owner_of(shared, name) == 1
    assert fresh(shared, model, name, wanted) == lane


def test_the_segments_of_a_lineage_go_where_its_first_one_went(shared: RunningServer) -> None:
    for home in range(WORKERS):
        mid = next(m for m in range(1000) if usual_worker(f"pps{m}s1", WORKERS) == home)
        assert {usual_worker(f"pps{mid}s{n}", WORKERS) for n in range(1, 20)} == {home}
        wrong = (home + 1) % WORKERS
        with on(shared, wrong) as connection:
            assert connection.command("KV.PREFIX.REGISTER", f"pps{mid}s7", 4, "fp16") == "OK"
        with PionPromptCache(port=shared.port, deadline_seconds=PATIENT) as pion:
            client = pion._client
            # a segment that nobody has, then one that lives elsewhere than the client thinks
            client.register(f"pps{mid}s8", Registration(4, "fp16", 1, None, 0))
            assert owner_of(shared, f"pps{mid}s8") == wrong
            pion._client._routes._remember(f"pps{mid}s1", home)
            longest = ("KV.PREFIX.LONGEST", f"pps:{mid}", b"")
            found = client.ask(f"pps{mid}s1", lambda c, asked=longest: c.command(*asked))  # type: ignore[misc]
            assert found == [0, None, 0]


def test_an_expired_prefix_is_a_miss_wherever_it_lives(
    shared: RunningServer, model: Any, wanted: list[bytes], lane: str
) -> None:
    name = named(1, f"expired-{lane}")
    store(shared, model, name, wanted)
    with PionPromptCache(model, port=shared.port, deadline_seconds=PATIENT) as pion:
        assert ask(pion, model, name, wanted) == lane
        with on(shared, 1) as home:
            assert home.command("KV.PREFIX.EXPIRE", name, 0) == 1
        assert ask(pion, model, name, wanted) == "none"
        assert ask(pion, model, name, wanted) == lane
