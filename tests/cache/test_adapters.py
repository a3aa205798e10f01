"""The adapters of other projects, against a real server."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pion_vllm_mlx.cache as cache
from pion_vllm_mlx.cache import (
    LMCacheRemoteBackend,
    PionAttentionClient,
    PionKVClient,
    PionLayerClient,
    PionStore,
)
from pion_vllm_mlx.cache.pion_store import _RESPClient, _RESPError
from pion_vllm_mlx.errors import ConfigError, StoreUnavailable
from tests.conftest import RunningServer, free_port_block

MB = 1 << 20
rng = np.random.default_rng(3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("adapters") / "data"
    folder.mkdir(mode=0o700)
    running = RunningServer(free_port_block(), folder)
    try:
        yield running.start()
    finally:
        running.stop()


@pytest.fixture
def store(server: RunningServer) -> Iterator[PionStore]:
    with PionStore(port=server.port) as opened:
        yield opened


def values(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# -- PionStore -------------------------------------------------------------------


def test_a_prefix_comes_back_as_its_format_keeps_it(store: PionStore) -> None:
    keys, vals = values(2, 5, 64), values(2, 5, 64)
    assert not store.lookup("p1")
    store.store_prefix("p1", keys, vals)
    assert store.lookup("p1")
    k, v = store.fetch_prefix("p1", 2, 5, 64)
    np.testing.assert_array_equal(k, keys.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(v, vals.astype(np.float16).astype(np.float32))
    assert k.flags.writeable
    exact = values(1, 3, 8)
    store.store_prefix("p2", exact, exact, vquant="fp32")
    np.testing.assert_array_equal(store.fetch_prefix("p2", 1, 3, 8)[1], exact)


def test_rows_past_the_end_and_layers_without_rows_are_zero(store: PionStore) -> None:
    store.register("p3", 8, "fp32")
    rows = values(3, 8)
    store.store_layer("p3", "K", 1, 2, rows)
    store.store_layer("p3", "K", 1, 9, np.zeros((0, 8), np.float32))
    found = store.fetch_layer("p3", "K", 1, 0, 8, 8)
    np.testing.assert_array_equal(found[2:5], rows)
    assert not found[:2].any() and not found[5:].any()
    assert not store.fetch_layer("p3", "V", 0, 0, 4, 8).any()
    assert store.fetch_layer("p3", "V", 0, 4, 4, 8).shape == (0, 8)
    assert store.fetch_prefix("p3", 0, 4, 8)[0].shape == (0, 4, 8)


def test_a_run_longer_than_a_command_is_stored_in_several(
    store: PionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pion_vllm_mlx.cache.pion_store.STORE_BYTES", 1000)
    store.register("p4", 8, "fp32")
    rows = values(100, 8)
    store.store_layer("p4", "V", 0, 1, rows)
    np.testing.assert_array_equal(store.fetch_layer("p4", "V", 0, 1, 101, 8), rows)


def test_what_cannot_be_is_refused_before_or_by_the_server(store: PionStore) -> None:
    with pytest.raises(ConfigError, match="vquant"):
        PionStore(vquant="fp17")
    with pytest.raises(ConfigError, match="side"):
        store.store_layer("p5", "Q", 0, 0, values(1, 8))
    with pytest.raises(ConfigError, match=r"\[n, W\]"):
        store.store_layer("p5", "K", 0, 0, values(8))
    with pytest.raises(ConfigError, match="alike"):
        store.store_prefix("p5", values(1, 2, 8), values(1, 3, 8))
    with pytest.raises(_RESPError, match="session not found"):
        store.store_layer("nowhere", "K", 0, 0, values(1, 8))
    store.register("p5", 8)
    with pytest.raises(RuntimeError, match="already exists"):
        store.store_layer("p5", "K", 0, 0, values(1, 8))
        store.register("p5", 16)
    with pytest.raises(ConfigError, match="wide"):
        store.fetch_layer("p5", "K", 0, 0, 1, 16)


def test_info_save_and_owner_tell_what_the_server_tells(store: PionStore) -> None:
    store.register("p6", 8)
    info = store.info()
    assert info["vstore_max_sessions"] == 256 and isinstance(info["vstore_bytes"], int)
    assert store.save() is True
    assert store.owner("p6") == 0
    assert store.owner("nobody") == -1


def test_the_tenant_prefix_is_before_every_namespace(server: RunningServer) -> None:
    with (
        PionStore(port=server.port, tenant_prefix="t:") as mine,
        PionStore(port=server.port) as plain,
    ):
        mine.register("x", 8)
        assert mine.lookup("x") and plain.lookup("t:x") and not plain.lookup("x")


def test_an_absent_server_is_an_error_but_saving_only_says_no() -> None:
    port = free_port_block()
    with PionStore(port=port) as nobody:
        assert nobody.save() is False
        with pytest.raises(StoreUnavailable):
            nobody.lookup("x")


class Worker(threading.Thread):
    """Answers every command with one line: a worker of a server, as redirects see it."""

    def __init__(self, port: int, line: bytes) -> None:
        super().__init__(daemon=True)
        self.line = line
        self.seen = 0
        self.listener = socket.create_server(("127.0.0.1", port))

    def run(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(sock,), daemon=True).start()

    def serve(self, sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(65536):
                if b"PING" in data:
                    sock.sendall(b"+PONG\r\n")
                else:
                    self.seen += 1
                    sock.sendall(self.line)

    def close(self) -> None:
        self.listener.close()


def test_a_namespace_of_another_worker_is_asked_for_there_in_one_hop() -> None:
    port = free_port_block()
    elsewhere = Worker(port, b"-ERR session lives on worker 1\r\n")
    owner = Worker(port + 3, b"+HIT\r\n")
    for worker in (elsewhere, owner):
        worker.start()
    try:
        with PionStore(port=port) as store:
            assert store.lookup("x") and store.lookup("x")
            assert store.redirect_count == 1
            assert (elsewhere.seen, owner.seen) == (1, 2)
        with (
            PionStore(port=port, auto_redirect=False) as stays,
            pytest.raises(_RESPError, match="lives on worker 1"),
        ):
            stays.lookup("x")
    finally:
        elsewhere.close()
        owner.close()


def test_a_worker_out_of_reach_is_looked_for_on_the_shared_port_and_not_forever() -> None:
    port = free_port_block()
    shared = Worker(port, b"-ERR session lives on worker 1\r\n")
    shared.start()
    try:
        with PionStore(port=port, max_redirects=3) as store:
            with pytest.raises(_RESPError, match="lives on worker 1"):
                store.lookup("x")
            assert store.redirect_count == 3
            assert shared.seen == 4
    finally:
        shared.close()


def test_a_client_given_is_used_and_answers_in_bytes(server: RunningServer) -> None:
    client = _RESPClient("127.0.0.1", server.port)
    assert client.cmd("PING") == b"PONG"
    assert client.cmd("GET", "no such key") is None
    with pytest.raises(_RESPError, match="^ERR unknown command"):
        client.cmd("BOGUS")
    with pytest.raises(_RESPError, match="^ERR unknown command"):
        client.pipeline([("PING",), ("BOGUS",)])
    assert client.pipeline([("ECHO", "a"), ("ECHO", "b")]) == [b"a", b"b"]
    with PionStore(client=client) as store:
        store.register("given", 8)
        assert store.lookup("given")


# -- LMCache ---------------------------------------------------------------------


def test_lmcache_chunks_go_in_and_out_under_their_prefix(server: RunningServer) -> None:
    backend = LMCacheRemoteBackend("127.0.0.1", server.port, ns_prefix="lm")
    chunk = os.urandom(9 * MB + 1)
    assert backend.ping()
    assert backend.get("k") is None and not backend.contains("k")
    assert backend.put("k", chunk) is True
    assert backend.contains("k") and backend.get("k") == chunk
    assert backend.mput({"a": b"1", "b": b"\x01\x02\xff"}) is True
    assert backend.mput([("c", memoryview(b"3"))]) is True
    assert backend.mget(["a", "none", "b", "c"]) == [b"1", None, b"\x01\x02\xff", b"3"]
    with _RESPClient("127.0.0.1", server.port) as plain:
        assert plain.cmd("GET", "lm:a") == b"1"
    assert backend.remove("k") is True and backend.remove("k") is False
    assert backend.mget([]) == []
    backend.close()
    assert backend.contains("a")
    backend.close()


def test_lmcache_of_an_absent_server_says_so() -> None:
    backend = LMCacheRemoteBackend("127.0.0.1", free_port_block(), timeout=1.0)
    assert backend.ping() is False
    with pytest.raises(StoreUnavailable):
        backend.get("k")


# -- blobs by embedding, layers ----------------------------------------------------


def test_a_blob_is_found_by_its_embedding_its_model_and_its_threshold(
    server: RunningServer,
) -> None:
    one, other = values(768), values(768)
    with PionKVClient(port=server.port) as client:
        client.connect()
        assert client.kv_store("id", one, b"blob", model="m") is True
        assert client.kv_fetch(one) == b"blob"
        assert client.kv_fetch(one, model="m") == b"blob"
        assert client.kv_fetch(one, model="other") is None
        assert client.kv_fetch(other) is None
        assert client.kv_fetch(other, threshold=-1.0) == b"blob"
        assert client.kv_store("id", values(5), b"blob") is False
        assert client.kv_info()["entries"] == 1
    absent = PionKVClient(port=free_port_block(), timeout=1.0)
    assert absent.kv_store("id", one, b"blob") is False
    assert absent.kv_fetch(one) is None
    assert absent.kv_info() == {}


@pytest.mark.parametrize("mode", ["resp", "binary"])
def test_layers_come_back_byte_for_byte(server: RunningServer, mode: str) -> None:
    tensors = {0: values(3, 5), 1: os.urandom(4 * MB - 7), 7: b""}
    with PionLayerClient(port=server.port, mode=mode) as client:
        assert client.store_layer("s", 3, tensors[0]) is True
        assert client.fetch_layer("s", 3) == tensors[0].tobytes()
        assert client.store_layers_batch("s", tensors) is True
        found = client.fetch_layers_batch("s", [1, 0, 9, 7])
        assert found == [tensors[1], tensors[0].tobytes(), None, b""]
        assert client.fetch_layer("t", 3) is None


def test_a_layer_that_no_frame_can_name_is_not_stored(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with PionLayerClient(port=server.port, mode="binary") as client:
        for session, layer in (("s", 70_000), ("s", -1), ("s" * 70_000, 1)):
            assert client.store_layer(session, layer, b"x") is False
            assert client.fetch_layers_batch(session, [layer]) == [None]
        assert client.store_layer("s", 65_535, b"x") is True
        assert client.fetch_layer("s", 65_535) == b"x"
    assert "a layer is a number of 0 to 65535, not 70000" in caplog.text
    assert "a session id has up to 65535 bytes, not 70000" in caplog.text


def test_layers_of_an_absent_server_are_not_there() -> None:
    for mode in ("resp", "binary"):
        client = PionLayerClient(port=free_port_block(), mode=mode, timeout=1.0)
        assert client.store_layer("s", 0, b"x") is False
        assert client.fetch_layers_batch("s", [0, 1]) == [None, None]
    with pytest.raises(ConfigError):
        PionLayerClient(mode="carrier pigeon")


# -- attention index ---------------------------------------------------------------


def test_the_attention_client_finds_rows_by_their_keys(server: RunningServer) -> None:
    keys, vals = values(10, 16), values(10, 4)
    with PionAttentionClient(port=server.port) as client:
        assert client.create_session("a1", 16, 4, v_format="fp32") >= 0
        assert client.create_session("a1 bad", 0, 4) == -1
        assert client.store_tokens("a1", 0, keys[:6], vals[:6])
        assert client.store_tokens("a1", 0, keys[6:], vals[6:])
        assert client.store_tokens("a1", 0, keys, vals[:3]) is False
        assert client.finalize_layer("a1", 0)
        reply = client.query_topk("a1", 0, keys[7], k=3)
        assert reply is not None and len(reply) == 3 * 4 * 4
        np.testing.assert_array_equal(np.frombuffer(reply, "<f4")[:4], vals[7])
        found = client.query_with_distances("a1", [0, 0], keys[[2, 3]], 2, 4)
        assert found is not None
        for number, (rows, distances) in zip((2, 3), found, strict=True):
            exact = np.sort(np.linalg.norm(keys - keys[number], axis=1))
            np.testing.assert_array_equal(rows[0], vals[number])
            np.testing.assert_allclose(distances, exact[:2], atol=1e-5)
        assert client.query_topk("none", 0, keys[0]) is None
        assert client.query_with_distances("a1", [0, 0], keys[:1], 2, 4) is None
        assert client.query_with_distances("a1", [0], keys[:2], 2, 4) is None
        assert "sessions" in client.info()


def test_attention_over_a_batch_is_softmax_attention(server: RunningServer) -> None:
    q, k, v = values(2, 8), values(2, 6, 8), values(2, 6, 8)
    scores = np.einsum("hd,hnd->hn", q, k, dtype=np.float64) / np.sqrt(8)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = np.einsum("hn,hnd->hd", weights / weights.sum(1, keepdims=True), v)
    with PionAttentionClient(port=server.port) as client:
        out = client.query_batch_gpu(2, 6, 8, 6, q, k, v)
        assert out is not None
        np.testing.assert_allclose(out, expected, atol=1e-6)
        assert client.query_batch_gpu(2, 6, 8, 6, q, k[:1], v) is None


def test_every_adapter_has_its_name_in_the_package() -> None:
    without_torch = set(cache.__all__) - {
        "ExternalizedAttentionLayer",
        "patch_model_for_externalized_attention",
    }
    assert all(getattr(cache, name).__name__ == name for name in without_torch)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = cache.NoSuchAdapter
