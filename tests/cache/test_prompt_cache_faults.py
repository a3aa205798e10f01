"""Nothing that is wrong with the store reaches the caller, and nothing wrong is a hit."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from pion_vllm_mlx.cache import inproc, lanes
from pion_vllm_mlx.cache.completion import COMPLETION_LAYER
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.cache.store_client_endpoint import BackOff
from pion_vllm_mlx.errors import StoreUnavailable
from tests.cache.continuing import continued, unstored
from tests.conftest import RunningServer, free_port_block
from tests.models import tiny_model, token_ids

IDS = token_ids(70)
DEADLINE = 0.4


@pytest.fixture(autouse=True)
def nothing_in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    inproc.PROCESS.forget()
    yield


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_5")


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[bytes]:
    return continued(model, unstored(model, IDS))


def stored(store: RunningServer, model: Any, name: str) -> PionPromptCache:
    """Stores the prefix, and shows that it hits."""
    pion = PionPromptCache(model, port=store.port)
    for _ in range(2):
        pion.get_or_prefill(IDS, name)
    assert (pion.hits, pion.misses) == (1, 1), pion.stats()
    return pion


def assert_served(pion: PionPromptCache, model: Any, name: str, wanted: list[bytes]) -> None:
    assert continued(model, pion.get_or_prefill(IDS, name)) == wanted


@pytest.mark.parametrize("lane", ["mapped", "stored", "range"])
@pytest.mark.parametrize("sid", ["_pk", "_pv"])
def test_rows_of_another_store_are_damage_and_a_miss(
    store: RunningServer, model: Any, wanted: list[bytes], lane: str, sid: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = f"other-rows-{lane}{sid}"
    stored(store, model, name)
    if lane != "mapped":
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
    if lane == "range":
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_BATCH", "1")
    pion = PionPromptCache(model, port=store.port)
    row = b"\0" * (2 * 32 * 4)
    command = ("V.STOREBATCH", f"{name}{sid}", 1, 0, 70, row * 70, "FMT", "STORED")
    pion.resp.command(*command, "LAYOUT", "HND")
    assert_served(pion, model, name, wanted)
    stats = pion.stats()
    assert (stats["hits"], stats["damaged"]) == (0, 1)
    assert "rows" in stats["last_miss_reason"]
    assert_served(pion, model, name, wanted)
    assert pion.hits == 1, "the prefix was stored again"


@pytest.mark.parametrize("layer", [COMPLETION_LAYER, 0])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_record_or_state_is_a_miss(
    store: RunningServer, model: Any, wanted: list[bytes], layer: int, damage: str
) -> None:
    name = f"record-{layer}-{damage}"
    pion = stored(store, model, name)
    blob = pion.resp.command("SSM.PREFIX.FETCH", name, layer)
    assert isinstance(blob, bytes)
    if damage == "missing":
        pion.resp.command("SSM.PREFIX.DROP", name, layer)
    else:
        at = len(blob) // 2
        broken = (
            blob[:at] if damage == "cut" else blob[:at] + bytes([blob[at] ^ 8]) + blob[at + 1 :]
        )
        pion.resp.command("SSM.PREFIX.STORE", name, layer, broken)
    assert_served(pion, model, name, wanted)
    assert (pion.hits, pion.misses) == (1, 2) and pion.last_miss_reason
    assert_served(pion, model, name, wanted)
    assert pion.hits == 2


def test_registered_or_half_stored_prefixes_are_no_hits(
    store: RunningServer, model: Any, wanted: list[bytes]
) -> None:
    pion = PionPromptCache(model, port=store.port)
    pion.resp.command("KV.PREFIX.REGISTER", "half", 64, "fp32", "HEADS", 2)
    pion.resp.command("V.STOREBATCH", "half_pk", 0, 0, 70, b"\0" * (70 * 64 * 4))
    pion.resp.command("V.STOREBATCH", "half_pv", 0, 0, 70, b"\0" * (70 * 64 * 4))
    assert pion.lookup("half")
    assert_served(pion, model, "half", wanted)
    assert pion.hits == 0 and "unfinished" in str(pion.last_miss_reason)
    assert_served(pion, model, "half", wanted)
    assert pion.hits == 1


def test_rows_that_are_gone_make_a_record_no_hit(
    store: RunningServer, model: Any, wanted: list[bytes]
) -> None:
    pion = stored(store, model, "gone")
    pion.resp.command("V.DROP", "gone_pv")
    assert_served(pion, model, "gone", wanted)
    assert (pion.hits, pion.misses) == (1, 2)


_NOT_A_RECORD: list[tuple[tuple[str | int, ...], Any]] = [
    (("slots",), []),
    (("slots", 0), 7),
    (("slots", 0, "size"), 1 << 40),
    (("slots", 0, "present"), []),
    (("slots", 1, "offset"), 3),
    (("slots", 1, "ranges"), []),
    (("slots", 1, "arrays", 0), ["x"]),
    (("leaves", 0), {}),
    (("leaves", 0, "heads"), "two"),
    (("runs", 0, 0), 40),
    (("runs", 0, 3), None),
    (("runs", 0, 4), 7),
    (("states", 0, 2), "long"),
]


@pytest.mark.parametrize(
    ("path", "value"),
    _NOT_A_RECORD,
    ids=lambda v: "-".join(map(str, v)) if type(v) is tuple else "",
)
def test_a_record_of_another_program_is_a_miss_and_never_an_error(
    store: RunningServer, model: Any, wanted: list[bytes], path: tuple[str | int, ...], value: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = "foreign" + "-".join(map(str, path))
    stored(store, model, name).close()
    with PionPromptCache(model, port=store.port) as pion:
        blob = pion.resp.command("SSM.PREFIX.FETCH", name, COMPLETION_LAYER)
        assert isinstance(blob, bytes)
        length = int.from_bytes(blob[12:16], "little")
        record = json.loads(blob[20 : 20 + length])
        part: Any = record
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        text = json.dumps(record).encode()
        body = blob[:12] + len(text).to_bytes(4, "little") + blob[16:20] + text
        body += blob[20 + length : -4]
        body += crc32c(body).to_bytes(4, "little")
        pion.resp.command("SSM.PREFIX.STORE", name, COMPLETION_LAYER, body)
        assert_served(pion, model, name, wanted)
        assert (pion.hits, pion.misses) == (0, 1) and pion.last_miss_reason
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
    with PionPromptCache(model, port=store.port) as pion:
        pion.resp.command("SSM.PREFIX.STORE", name, COMPLETION_LAYER, body)
        assert_served(pion, model, name, wanted)
        assert (pion.hits, pion.misses) == (0, 1) and pion.last_miss_reason


def test_a_prefix_that_another_process_replaces_in_mid_fetch_is_no_damage(
    store: RunningServer, model: Any, wanted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(store, model, "replaced").close()
    other = token_ids(70, seed=77)
    fetch = lanes.LANES["mapped"]

    def replace_and_fetch(*args: Any) -> Any:
        monkeypatch.setitem(lanes.LANES, "mapped", fetch)
        with PionPromptCache(model, port=store.port) as faster:
            faster.get_or_prefill(other, "replaced")
            assert faster.stats()["bytes_stored"]
        raise StoreUnavailable("too slow")

    monkeypatch.setitem(lanes.LANES, "mapped", replace_and_fetch)
    with PionPromptCache(model, port=store.port, admission_threshold=2) as pion:
        assert_served(pion, model, "replaced", wanted)
        assert (pion.hits, pion.stats()["damaged"]) == (0, 0), pion.stats()
    with PionPromptCache(model, port=store.port) as pion:
        pion.get_or_prefill(other, "replaced")
        assert pion.hits == 1


def test_a_newer_record_is_neither_used_nor_overwritten(
    store: RunningServer, model: Any, wanted: list[bytes]
) -> None:
    pion = stored(store, model, "newer")
    blob = pion.resp.command("SSM.PREFIX.FETCH", "newer", COMPLETION_LAYER)
    assert isinstance(blob, bytes)
    body = blob[:8] + (9).to_bytes(4, "little") + blob[12:-4]
    newer = body + crc32c(body).to_bytes(4, "little")
    pion.resp.command("SSM.PREFIX.STORE", "newer", COMPLETION_LAYER, newer)
    assert_served(pion, model, "newer", wanted)
    assert "version 9" in str(pion.last_miss_reason)
    assert pion.resp.command("SSM.PREFIX.FETCH", "newer", COMPLETION_LAYER) == newer


def test_any_flipped_byte_of_a_segment_is_a_miss_and_never_data(
    pion_server: RunningServer, model: Any, wanted: list[bytes]
) -> None:
    stored(pion_server, model, "flip").close()
    pion_server.kill()
    (segment,) = [
        path for path in pion_server.dir.rglob("*.safetensors") if path.stat().st_size > 50000
    ]
    intact = segment.read_bytes()
    header = int.from_bytes(intact[:8], "little") + 8
    spots = [header + 5, header + 9000, (header + len(intact)) // 2]
    for spot in spots:
        broken = bytearray(intact)
        broken[spot] ^= 0x10
        segment.write_bytes(broken)
        pion_server.restart()
        pion = PionPromptCache(model, port=pion_server.port)
        cache = pion.get_or_prefill(IDS, "flip")
        assert continued(model, cache) == wanted
        if pion.hits == 0:  # a byte of a spare row harms nobody
            assert pion.stats()["damaged"] == 1 and pion.last_miss_reason
            pion.close()
            break
        pion.close()
        pion_server.kill()
        segment.write_bytes(intact)
    else:
        pytest.fail("no flipped byte was noticed")


def test_verify_always_sees_what_changed_under_the_server(
    pion_server: RunningServer, model: Any, wanted: list[bytes]
) -> None:
    stored(pion_server, model, "always").close()
    (segment,) = [
        path for path in pion_server.dir.rglob("*.safetensors") if path.stat().st_size > 50000
    ]
    with segment.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        tensors = json.loads(header)
        places = [tensors[name]["data_offsets"] for name in tensors if name.startswith("k.")]
        start = 8 + len(header) + min(places)[0]
        file.seek(start)
        rows = file.read(4096)
        file.seek(start)
        file.write(bytes(byte ^ 1 for byte in rows))
    pion = PionPromptCache(model, port=pion_server.port, verify="always")
    assert_served(pion, model, "always", wanted)
    assert (pion.hits, pion.stats()["damaged"]) == (0, 1)


def test_an_absent_server_costs_one_warning_and_then_nothing(
    model: Any, wanted: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    pion = PionPromptCache(model, port=free_port_block())
    with caplog.at_level(logging.WARNING, "pion_vllm_mlx"):
        for _ in range(3):
            assert_served(pion, model, "absent", wanted)
    stats = pion.stats()
    assert (stats["misses"], stats["unavailable"]) == (3, 3)
    assert len(caplog.records) == 1 and "no store" in stats["last_miss_reason"]
    assert not pion.lookup("absent")


def test_a_server_that_comes_back_is_used_again(
    pion_server: RunningServer, model: Any, wanted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pion_vllm_mlx.cache.store_client_endpoint import BackOff

    monkeypatch.setattr(BackOff, "FIRST_SECONDS", 0.05)
    pion = stored(pion_server, model, "back")
    pion_server.kill()
    assert_served(pion, model, "back", wanted)
    assert (pion.hits, pion.stats()["unavailable"]) == (1, 1)
    pion_server.restart()
    time.sleep(0.1)
    assert_served(pion, model, "back", wanted)
    assert pion.hits == 2


def test_a_prefix_prefilled_without_a_server_is_stored_when_it_comes_back(
    pion_server: RunningServer, model: Any, wanted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PION_PROMPT_CACHE_NO_INPROC")
    pion_server.kill()
    for _ in range(2):
        with PionPromptCache(model, port=pion_server.port) as pion:
            assert_served(pion, model, "later", wanted)
    assert pion.stats()["last_lane"] == "in-process"
    pion_server.start()
    for stored_bytes in (True, False):
        with PionPromptCache(model, port=pion_server.port) as pion:
            assert_served(pion, model, "later", wanted)
        assert pion.stats()["last_lane"] == "in-process"
        assert bool(pion.stats()["bytes_stored"]) == stored_bytes
    inproc.PROCESS.forget()
    with PionPromptCache(model, port=pion_server.port) as pion:
        assert_served(pion, model, "later", wanted)
    assert pion.stats()["last_lane"] == "mapped"


def test_a_stopped_server_costs_its_deadline_once(
    pion_server: RunningServer, model: Any, wanted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackOff, "FIRST_SECONDS", 60.0)
    stored(pion_server, model, "stopped").close()
    pion = PionPromptCache(model, port=pion_server.port, deadline_seconds=DEADLINE)
    os.kill(pion_server.pid, signal.SIGSTOP)
    try:
        assert_served(pion, model, "stopped", wanted)
        assert "deadline" in str(pion.last_miss_reason)
        for _ in range(2):
            assert_served(pion, model, "stopped", wanted)
            assert "tried again" in str(pion.last_miss_reason), "nobody was asked"
    finally:
        os.kill(pion_server.pid, signal.SIGCONT)
    assert pion.stats()["unavailable"] == 3


class Talker:
    """A real socket that answers every connection with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._answer = answer
        self.connections = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                connection.settimeout(5)
                try:
                    while connection.recv(65536):
                        connection.sendall(self._answer)
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00" * 300,
        b"-ERR unknown command\r\n" * 3,
        b"-NOAUTH Authentication required.\r\n" * 3,
        b"+OK\r\n" * 3,
        b":7\r\n*2\r\n:1\r\n:2\r\n%1\r\n+a\r\n+b\r\n",
        b"+HIT\r\n$3\r\nabc\r\n$2\r\n{}\r\n",
        b"+HIT\r\n$99999999999999\r\n",
        b"+HIT\r\n",
    ],
    ids=lambda a: a[:12].decode("latin-1").strip(),
)
def test_garbage_on_the_port_is_a_miss(model: Any, wanted: list[bytes], answer: bytes) -> None:
    talker = Talker(answer)
    try:
        pion = PionPromptCache(model, port=talker.port, deadline_seconds=DEADLINE)
        for _ in range(3):
            assert_served(pion, model, "garbage", wanted)
        assert pion.hits == 0 and pion.last_miss_reason
        assert talker.connections <= 2, "a store that fails is left alone for a while"
        pion.close()
    finally:
        talker.close()


class CuttingProxy:
    """Forwards connections; hangs up after some bytes of requests or of replies."""

    def __init__(self, port: int, *, requests: int = 1 << 40, replies: int = 1 << 40) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._target = port
        self._left = {"requests": requests, "replies": replies}
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        while min(self._left.values()) > 0:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client, socket.create_connection(("127.0.0.1", self._target)) as server:
                back = threading.Thread(target=self._pump, args=(client, server, "requests"))
                back.start()
                self._pump(server, client, "replies")
                back.join()
        self._socket.close()

    def _pump(self, source: socket.socket, target: socket.socket, kind: str) -> None:
        with contextlib.suppress(OSError):
            while self._left[kind] > 0 and (data := source.recv(min(4096, self._left[kind]))):
                self._left[kind] -= len(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):  # the other side may be gone already
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._threads[0].join()


@pytest.mark.parametrize("batch", [True, False])
def test_a_server_that_hangs_up_anywhere_in_a_fetch_is_a_miss(
    store: RunningServer, model: Any, wanted: list[bytes], batch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
    if not batch:
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_BATCH", "1")
    name = f"cut-{batch}"
    stored(store, model, name).close()
    for reply_bytes in (1, 300, 2500, 5000, 30_000, 60_000):
        proxy = CuttingProxy(store.port, replies=reply_bytes)
        try:
            with PionPromptCache(model, port=proxy.port, deadline_seconds=2) as pion:
                assert_served(pion, model, name, wanted)
            assert (pion.hits, pion.misses) == (0, 1) and pion.last_miss_reason, reply_bytes
        finally:
            proxy.close()
    with PionPromptCache(model, port=store.port) as whole:
        assert_served(whole, model, name, wanted)
    assert whole.hits == 1


def test_a_server_killed_anywhere_in_a_store_never_has_an_unfinished_prefix(
    pion_server: RunningServer, model: Any, wanted: list[bytes]
) -> None:
    whole = CuttingProxy(pion_server.port)
    with PionPromptCache(model, port=whole.port) as pion:
        pion.get_or_prefill(IDS, "whole")
        stored_bytes = pion.stats()["bytes_stored"]
    whole.close()
    hits = []
    for share in (0.0, 0.01, 0.1, 0.4, 0.7, 0.95, 0.99, 1.2):
        name = f"killed-{share}"
        proxy = CuttingProxy(pion_server.port, requests=300 + int(share * stored_bytes))
        try:
            with PionPromptCache(model, port=proxy.port) as pion:
                assert_served(pion, model, name, wanted)
            pion_server.restart()
        finally:
            proxy.close()
        with PionPromptCache(model, port=pion_server.port) as fresh:
            assert_served(fresh, model, name, wanted)
            hits.append(fresh.hits)
            assert_served(fresh, model, name, wanted)
            assert fresh.hits == hits[-1] + 1
    assert hits[0] == 0 and hits[-1] == 1 and hits == sorted(hits)


def test_a_namespace_that_is_too_long_is_refused_and_the_store_is_not_called_absent(
    store: RunningServer, model: Any, wanted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PION_PROMPT_CACHE_NO_INPROC")
    for name in ("n" * 65_533, "\u00fc" * 32_767):
        with PionPromptCache(model, port=store.port) as pion:
            for _ in range(2):
                assert_served(pion, model, name, wanted)
            stats = pion.stats()
            assert (stats["rejected"], stats["unavailable"], stats["misses"]) == (1, 0, 1)
            assert not pion.lookup(name)
            assert "65,532 bytes" in str(pion.last_miss_reason)
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    with PionPromptCache(model, port=store.port) as pion:
        for hits in range(2):
            assert_served(pion, model, "n" * 65_532, wanted)
            assert pion.hits == hits


def test_a_refusal_of_a_name_is_no_absent_store(
    tmp_path: Path, model: Any, wanted: list[bytes]
) -> None:
    folder = tmp_path / "prefixed"
    folder.mkdir(mode=0o700)
    server = RunningServer(free_port_block(), folder, ("--ns-prefix", "mine-")).start()
    try:
        with PionPromptCache(model, port=server.port) as pion:
            assert_served(pion, model, "theirs", wanted)
            assert "must start with required prefix" in str(pion.last_miss_reason)
            assert_served(pion, model, "mine-1", wanted)
            assert_served(pion, model, "mine-1", wanted)
            stats = pion.stats()
            assert (stats["rejected"], stats["unavailable"], pion.hits) == (1, 0, 1)
    finally:
        server.stop()


def test_a_wrong_password_is_a_miss(tmp_path: Path, model: Any, wanted: list[bytes]) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o700)
    server = RunningServer(free_port_block(), folder, ("--requirepass", "secret"))
    try:
        server.start()
        for password in (None, "wrong"):
            pion = PionPromptCache(model, port=server.port, password=password)
            assert_served(pion, model, "locked", wanted)
            assert pion.stats()["unavailable"] == 1
        pion = PionPromptCache(model, port=server.port, password="secret")
        for _ in range(2):
            assert_served(pion, model, "locked", wanted)
        assert pion.hits == 1
    finally:
        server.stop()


def test_two_processes_storing_one_name_at_once_leave_a_true_prefix(
    store: RunningServer, model: Any, wanted: list[bytes]
) -> None:
    caches: list[tuple[list[int], PionPromptCache]] = []
    other = token_ids(70, seed=77)
    for ids in (IDS, other, IDS, other):
        caches.append((ids, PionPromptCache(model, port=store.port)))
    script = (
        "import sys; from pion_vllm_mlx import PionPromptCache;"
        "from tests.models import tiny_model, token_ids;"
        "p = PionPromptCache(tiny_model('qwen3_5'), port=int(sys.argv[1]));"
        "[p.get_or_prefill(token_ids(70, seed=77), 'race') for _ in range(20)]"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, str(store.port)],
        cwd=Path(__file__).parents[2],
    )
    others = continued(model, unstored(model, other))
    for _ in range(15):
        for ids, pion in caches:
            cache = pion.get_or_prefill(ids, "race")
            assert continued(model, cache) == (wanted if ids is IDS else others)
    assert process.wait(60) == 0
    assert_served(caches[0][1], model, "race", wanted)
    fresh = PionPromptCache(model, port=store.port)
    assert_served(fresh, model, "race", wanted)
    assert (fresh.hits, fresh.misses) == (1, 0)


def test_loopback_clients_move_to_the_unix_socket(
    tmp_path: Path, model: Any, wanted: list[bytes]
) -> None:
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)
    path = str(tmp_path / "s")
    server = RunningServer(free_port_block(), folder, ("--unixsocket", path))
    try:
        server.start()
        pion = stored(server, model, "unix")
        assert pion.resp.address.path == path
        direct = PionPromptCache(model, url=f"unix://{path}")
        assert_served(direct, model, "unix", wanted)
        assert direct.hits == 1 and direct.stats()["last_lane"] == "mapped"
    finally:
        server.stop()


def test_an_embedded_store_serves_and_is_found_again(
    tmp_path: Path, model: Any, wanted: list[bytes]
) -> None:
    folder = tmp_path / "embedded"
    with PionPromptCache(model, url=f"embedded://{folder}") as pion:
        assert_served(pion, model, "embedded", wanted)
        os.kill(pion._endpoint._embedded.pid, signal.SIGKILL)  # type: ignore[union-attr]
        time.sleep(0.2)
        again = PionPromptCache(model, url=f"embedded://{folder}")
        assert_served(again, model, "embedded", wanted)
        assert again.hits == 1
        again.close()


def test_an_embedded_server_that_stands_still_costs_its_deadline(
    tmp_path: Path, model: Any, wanted: list[bytes]
) -> None:
    folder = tmp_path / "still"
    folder.mkdir(mode=0o700)
    server = RunningServer(free_port_block(), folder)
    try:
        os.kill(server.start().pid, signal.SIGSTOP)
        with PionPromptCache(model, url=f"embedded://{folder}", deadline_seconds=DEADLINE) as pion:
            assert_served(pion, model, "still", wanted)
        assert f"within {DEADLINE:g} s" in str(pion.last_miss_reason), "not the time of a start"
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.stop()


def test_a_folder_that_cannot_be_used_is_a_miss(
    tmp_path: Path, model: Any, wanted: list[bytes]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with PionPromptCache(model, url=f"embedded://{blocked}") as pion:
        assert_served(pion, model, "blocked", wanted)
        assert pion.stats()["unavailable"] == 1


# A server without KV.PREFIX.MAP, whose exports lose a bit on their way while "spoil" lies there.
_WITHOUT_MAP = """
import dataclasses, pathlib, sys
from pion_vllm_mlx.server import main
from pion_vllm_mlx.server.command import TABLE
del TABLE[b"KV.PREFIX.MAP"]
known = TABLE[b"V.EXPORT"]
async def export(context, args):
    path = pathlib.Path(await known.handler(context, args))
    if (context.server.config.folder / "spoil").exists():
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    return str(path)
TABLE[b"V.EXPORT"] = dataclasses.replace(known, handler=export)
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("vquant", [None, "mlx4g32"])
def test_a_server_that_cannot_map_exports_instead(tmp_path: Path, vquant: str | None) -> None:
    model = tiny_model("llama", head_dim=32)
    port = free_port_block()
    command = [sys.executable, "-c", _WITHOUT_MAP, "--kvcache", "-p", str(port)]
    command += ["--dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        assert _wait_for(port)
        seen = []
        for _ in range(2):
            pion = PionPromptCache(model, vquant, port=port)
            seen.append(continued(model, pion.get_or_prefill(IDS, "exported")))
            assert pion.stats()["store_failures"] == 0
        assert pion.stats()["last_lane"] == "mapped", pion.stats()
        assert vquant is not None or seen[0] == seen[1]
        (tmp_path / "spoil").touch()
        assert continued(model, pion.get_or_prefill(IDS, "exported")) == seen[0]
        assert (pion.stats()["hits"], pion.stats()["damaged"]) == (1, 1)
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int) -> bool:
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        time.sleep(0.05)
    return False
