"""Many clients on the same namespaces: every row that comes back is one that was stored."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import numpy as np
from safetensors import safe_open

from tests.hostile.conftest import Connect, StartServer
from tests.hostile.watching import eventually, only_client, segment_files
from tests.server.wire import Refusal, Wire, request, settle

WIDTH = 128
SECONDS = 4.0


def tagged(start: int, n: int, version: int) -> bytes:
    """Rows whose every value says which token and version they are (exact in float16)."""
    values = (np.arange(start, start + n) % 32 + 32 * version).astype("<f2")
    return np.repeat(values[:, None], WIDTH, axis=1).tobytes()


def check_rows(data: bytes, start: int) -> None:
    """Each row is whole, and of its own token, or has never been stored."""
    rows = np.frombuffer(data, "<f2").reshape(-1, WIDTH).astype(np.int64)
    assert (rows == rows[:, :1]).all(), "a row mixes two stores"
    tokens = np.arange(start, start + len(rows)) % 32
    stored = rows[:, 0] != 0
    assert (rows[stored, 0] % 32 == tokens[stored]).all(), "a row of another token"


class Worker(threading.Thread):
    """One client that does anything to any namespace until the time is over."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__()
        self.chosen = random.Random(seed)
        self.wire = Wire.tcp(port)
        self.failure: BaseException | None = None
        self.done = 0

    def run(self) -> None:
        deadline = time.monotonic() + SECONDS
        try:
            while time.monotonic() < deadline:
                self.step()
                self.done += 1
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failure = error
        finally:
            self.wire.close()

    def step(self) -> None:
        ns = self.chosen.choice("abc")
        sid = ns + self.chosen.choice(("_pk", "_pv"))
        layer = self.chosen.randrange(2)
        kind = self.chosen.random()
        if kind < 0.45:
            self.store(ns, sid, layer)
        elif kind < 0.8:
            self.fetch(sid, layer)
        elif kind < 0.9:
            self.map(ns)
        elif kind < 0.93:
            self.wire.ask("KV.PREFIX.DROP", ns)
        elif kind < 0.95:
            self.wire.ok("KV.PREFIX.SAVE")
        else:
            self.wire.ask("SSM.PREFIX.STORE", ns, layer, bytes(self.chosen.choice((9, 90_000))))

    def store(self, ns: str, sid: str, layer: int) -> None:
        start, n = self.chosen.randrange(64), self.chosen.choice((1, 30, 900, 9_000))
        version = self.chosen.randrange(1, 60)
        blob = tagged(start, n, version)
        options = self.chosen.choice((("FMT", "F16"), ("FMT", "STORED"), ()))
        if not options:
            blob = np.frombuffer(blob, "<f2").astype("<f4").tobytes()
        if self.chosen.random() < 0.3:
            options = ("FMT", "STORED", "LAYOUT", "HND")
            rows = np.frombuffer(tagged(start, n, version), "<f2").reshape(n, 2, -1)
            blob = rows.transpose(1, 0, 2).tobytes()
        registered, stored = self.wire.together(
            ("KV.PREFIX.REGISTER", ns, WIDTH, "fp16", "HEADS", 2),
            ("V.STOREBATCH", sid, layer, start, n, blob, *options),
        )
        assert registered == "OK"
        # another client may drop the session between the two
        assert stored == "OK" or "session not found" in stored, stored

    def fetch(self, sid: str, layer: int) -> None:
        start = self.chosen.randrange(32)
        end = start + self.chosen.choice((1, 100, 9_000))
        options = ("FMT", self.chosen.choice(("NATIVE", "STORED")))
        answer = self.wire.ask("V.FETCH", sid, layer, "RANGE", start, end, *options)
        if isinstance(answer, Refusal):
            assert "session not found" in answer, answer
        elif answer is not None:
            check_rows(answer, start)

    def map(self, ns: str) -> None:
        answer = self.wire.ask("KV.PREFIX.MAP", ns)
        if not isinstance(answer, bytes):
            assert answer == "UNKNOWN" or "under way" in answer, answer
            return
        for segment in json.loads(answer)["segments"]:
            try:
                file = safe_open(segment["path"], "np")
            except FileNotFoundError:
                continue  # dropped since
            with file:
                for tensor in segment["tensors"]:
                    array = file.get_tensor(tensor["name"])
                    if tensor["layout"] == "HND":
                        array = array[:, : tensor["rows"]].transpose(1, 0, 2)
                    rows = array.reshape(tensor["rows"], WIDTH)[tensor["row"] :]
                    shown = rows[: tensor["end"] - tensor["start"]]
                    assert shown.all()
                    check_rows(np.ascontiguousarray(shown).tobytes(), tensor["start"])


def test_clients_that_do_anything_at_once_never_see_a_wrong_row(start_server: StartServer) -> None:
    server = start_server()
    workers = [Worker(server.port, seed) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
        assert worker.done > 20
    assert "internal error" not in server.output() and "Traceback" not in server.output()
    with Wire.tcp(server.port) as wire:
        assert eventually(lambda: only_client(wire))
        settle(wire)
        before = wire.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 9_000, "FMT", "NATIVE")
    server.restart()
    with Wire.tcp(server.port) as wire:
        assert wire.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 9_000, "FMT", "NATIVE") == before
        wire.ask("KV.PREFIX.DROP", "a", "b", "c")
        assert eventually(lambda: segment_files(server) == [])


def test_a_namespace_that_goes_while_rows_arrive_gets_none_of_them(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server()
    n = 100_000
    blob = tagged(0, n, 3)
    store = request("V.STOREBATCH", "a_pk", 0, 0, n, blob, "FMT", "F16")
    register = ("KV.PREFIX.REGISTER", "a", WIDTH, "fp16", "HEADS", 2)
    with Wire.tcp(server.port) as wire:
        for again in ((), ("KV.PREFIX.REGISTER", "a", WIDTH * 2, "int8"), register):
            wire.ok(*register)
            slow = connect(server)
            slow.send(store[:-1_000_000])
            assert eventually(lambda: segment_files(server) != [])
            assert wire.ask("KV.PREFIX.DROP", "a") == 1
            if again:
                wire.ok(*again)
            slow.send(store[-1_000_000:])
            answer = slow.reply()
            if again == register:
                # the same schema again: the rows are as good as any
                assert answer == "OK"
                words = ("V.FETCH", "a_pk", 0, "RANGE", 0, n, "FMT", "NATIVE")
                assert wire.ask(*words) == blob
            else:
                assert isinstance(answer, Refusal), answer
                assert not again or wire.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 1) is None
            slow.close()
            wire.ask("KV.PREFIX.DROP", "a")
            settle(wire)
            assert eventually(lambda: segment_files(server) == [])


def test_save_and_map_do_not_wait_for_a_store_that_does_not_end(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server()
    n = 100_000
    blob = tagged(0, n, 3)
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "a", WIDTH, "fp16")
        wire.ok("V.STOREBATCH", "a_pk", 1, 0, 9_000, tagged(0, 9_000, 5), "FMT", "F16")
        wire.ok("V.STOREBATCH", "a_pv", 1, 0, 9, tagged(0, 9, 5), "FMT", "F16")
        slow = connect(server)
        store = request("V.STOREBATCH", "a_pk", 0, 0, n, blob, "FMT", "F16")
        slow.send(store[:-1_000_000])
        wire.ok("KV.PREFIX.SAVE")
        answer = wire.ask("KV.PREFIX.MAP", "a")
        assert isinstance(answer, bytes) or "under way" in answer
        wire.ok("V.STOREBATCH", "a_pk", 1, 9_000, 9_000, tagged(9_000, 9_000, 6), "FMT", "F16")
        slow.send(store[-1_000_000:])
        assert slow.reply() == "OK"
        described = json.loads(wire.ask("KV.PREFIX.MAP", "a"))
        assert all(Path(segment["path"]).exists() for segment in described["segments"])
    server.restart()
    with Wire.tcp(server.port) as wire:
        fetch = ("V.FETCH", "a_pk", 0, "RANGE", 0, n, "FMT", "NATIVE")
        assert wire.ask(*fetch) == blob
        check_rows(wire.ask("V.FETCH", "a_pk", 1, "RANGE", 0, 18_000, "FMT", "NATIVE"), 0)
