"""What goes wrong costs time, never a wrong token and never an error of the engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from pion_vllm_mlx.cache.completion import CompletionRecord
from pion_vllm_mlx.cache.completion import token_ids as as_ids
from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore, model_key
from pion_vllm_mlx.cache.lineage.blocks import block_digests
from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.store_client import StoreClient
from pion_vllm_mlx.errors import StoreUnavailable
from tests.cache.continuing import continued
from tests.cache.lineage.driving import (
    KINDS,
    Engine,
    fresh_cache,
    kind_options,
    open_store,
    prompt,
    same_reply,
)
from tests.conftest import RunningServer
from tests.models import tiny_model

SOME = ("plain", "window", "gated delta", "mamba")


def patient(store: LineageStore) -> LineageStore:
    """Tries a store that failed at once again, instead of after a pause."""
    for client in (store._front, store._back):
        client.endpoint.door._back_off.FIRST_SECONDS = 0.0  # type: ignore[misc]
        client.endpoint.door._back_off.LONGEST_SECONDS = 0.0  # type: ignore[misc]
    return store


# -- wrong answers ----------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"key_parts": {"tenant": "b"}},
        {"key_parts": {"tenant": "a", "adapter": "x"}},
        {"key_parts": {"tenant": "a"}, "vquant": "fp16"},
    ],
)
def test_another_key_never_shares(own: RunningServer, change: dict[str, Any]) -> None:
    model = tiny_model("llama")
    ids = prompt(100, 1)
    first = Engine(model, open_store(model, own, key_parts={"tenant": "a"}))
    first.turn(ids)
    assert first.store is not None and first.store.flush()
    other = Engine(model, open_store(model, own, **change))
    assert other.turn(ids).reused == 0
    again = Engine(model, open_store(model, own, key_parts={"tenant": "a"}))
    assert again.turn(ids).reused == 99
    for engine in (first, other, again):
        assert engine.store is not None
        engine.store.close()


def test_equal_architecture_with_other_weights_never_shares_and_a_copy_does(
    own: RunningServer,
) -> None:
    """The same model loaded a second time is the same; one weight makes another."""
    ids = prompt(100, 2)
    engine = Engine(tiny_model("llama"), open_store(tiny_model("llama"), own))
    engine.turn(ids)
    assert engine.store is not None and engine.store.flush()
    twin, other = tiny_model("llama"), tiny_model("llama")
    weight = other.model.layers[0].self_attn.q_proj.weight
    other.model.layers[0].self_attn.q_proj.weight = weight + 1e-3
    with_twin, with_other = open_store(twin, own), open_store(other, own)
    assert Engine(twin, with_twin).turn(ids).reused == 99
    assert Engine(other, with_other).turn(ids).reused == 0
    for store in (engine.store, with_twin, with_other):
        store.close()


def test_an_adapter_loaded_later_is_another_key(own: RunningServer) -> None:
    """The same store object notices."""
    model = tiny_model("llama")
    store = open_store(model, own)
    engine = Engine(model, store)
    ids = prompt(100, 3)
    engine.turn(ids)
    assert store.flush() and engine.turn(ids).reused == 99
    layer = model.model.layers[0].self_attn
    before = layer.v_proj.weight
    layer.v_proj.weight = before * 1.01
    changed = engine.turn(ids)
    assert changed.reused == 0 and changed.logits == Engine(model, None).turn(ids).logits
    layer.v_proj.weight = before
    assert store.flush() and engine.turn(ids).reused == 99
    store.close()


def test_addresses_prove_nothing(own: RunningServer) -> None:
    """An index that lies about its tokens gives no hit, and goes."""
    model = tiny_model("llama")
    store = open_store(model, own)
    engine = Engine(model, store)
    ids, other = prompt(128, 4), prompt(128, 5)
    engine.turn(ids, reply=1)
    assert store.flush()
    mid = store.conversations()[0].id.partition(":")[0]
    with RespConnection(store._front.endpoint.connection().address) as raw:
        raw.command("HSET", f"pps:{mid}:seg:1", "toks", as_ids(other).tobytes())
        digests = [digest.hex() for digest in block_digests(as_ids(other))]
        for at, digest in enumerate(digests):
            raw.command("HSET", f"pps:{mid}:blk", digest, f"1:{64 * (at + 1)}")
    match = store.match(other)
    assert match.common == 127, "the lie is believed until it is to be proved"
    assert store.restore(match) is None
    assert store.flush() and store.stats()["damaged"] == 1
    turn = engine.turn(other, reply=1)
    assert turn.reused == 0 and turn.logits == Engine(model, None).turn(other, reply=1).logits
    assert store.flush() and engine.turn(other, reply=1).reused == 127
    store.close()


def test_equal_addresses_of_two_models_are_told_apart_by_their_keys(
    own: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 bits may collide."""
    monkeypatch.setattr(model_key, "model_digest", lambda digest, vquant: "0123456789ab")
    model = tiny_model("llama")
    first = Engine(model, open_store(model, own, key_parts={"tenant": "a"}))
    ids = prompt(100, 16)
    first.turn(ids, reply=1)
    assert first.store is not None and first.store.flush()
    assert first.turn(ids, reply=1).reused == 99
    store = open_store(model, own, key_parts={"tenant": "b"})
    match = store.match(ids)
    assert match.length == 99 and store.restore(match) is None
    first.store.close()
    store.close()


def test_a_segment_counts_only_behind_the_tokens_it_was_computed_behind(
    own: RunningServer,
) -> None:
    """An index that hangs a segment under another parent gives no hit."""
    model = tiny_model("llama")
    store = open_store(model, own)
    engine = Engine(model, store)
    left, right, own_part = prompt(64, 17), prompt(64, 18), prompt(64, 19)
    for ids in ([*left, *prompt(64, 20)], [*left, *own_part], [*right, *prompt(64, 21)]):
        engine.turn([*ids, 1], reply=1)
        assert store.flush()
    assert engine.turn([*left, *own_part, 5], reply=1).reused == 128, "behind its own parent"
    mid = store.conversations()[0].id.partition(":")[0]
    digests = block_digests(as_ids([*right, *own_part]))
    with RespConnection(Address(port=own.port)) as raw:
        raw.command("HSET", f"pps:{mid}:seg:2", "parent", "3", "up", "3:0")
        raw.command("HSET", f"pps:{mid}:blk", digests[1].hex(), "2:128")
    asked = [*right, *own_part, 5]
    match = store.match(asked)
    assert match.length == 128 and [piece.segment for piece in match.chain] == [3, 2]
    assert store.restore(match) is None
    turn = engine.turn(asked, reply=2)
    assert turn.reused <= 64
    same_reply(turn, Engine(model, None).turn(asked, reply=2))
    store.close()


@pytest.mark.parametrize("kind", SOME)
def test_a_stored_prefix_is_not_changed_by_what_borrows_it(kind: str, own: RunningServer) -> None:
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = open_store(model, own, **kind_options(kv_bits))
    ids = prompt(100, 6)
    Engine(model, store).turn(ids, reply=1)
    assert store.flush()
    said = []
    for _ in range(3):
        restored = store.restore(store.match(ids))
        assert restored is not None
        said.append(continued(model, restored.caches, steps=40))
    assert said[0] == said[1] == said[2]
    store.close()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_bf16_comes_back_as_bf16(name: str, own: RunningServer) -> None:
    model = tiny_model(name, mx.bfloat16)
    store = open_store(model, own)
    engine = Engine(model, store)
    ids = prompt(128, 7)
    first = engine.turn(ids, reply=1)
    assert store.flush()
    again = engine.turn(ids, reply=1)
    assert again.reused == 127 and again.logits == first.logits
    store.close()


def test_a_format_is_asked_for_and_halves_the_bytes(own: RunningServer) -> None:
    model = tiny_model("llama")
    ids = prompt(128, 8)
    sizes = {}
    for vquant in (None, "bf16", "int8", "mlx4g32"):
        store = open_store(model, own, vquant=vquant)
        Engine(model, store).turn(ids, reply=1)
        assert store.flush()
        turn = Engine(model, store).turn(ids, reply=1)
        assert turn.reused == 127, store.stats()
        sizes[vquant] = store.stats()["bytes_rows"]
        store.close()
    assert sizes["bf16"] * 2 == sizes[None] and sizes["int8"] < sizes["bf16"]
    assert sizes["mlx4g32"] < sizes["int8"]


def test_hashes_are_those_of_the_protocol_in_every_process() -> None:
    """Chained, whole, and without a seed."""
    digests = [digest.hex() for digest in block_digests(as_ids(list(range(128))))]
    assert digests == ["3eb0d2f2913a18b8d3b811a9", "f5eb5635a99750ad24b18263"]
    other = block_digests(as_ids([*range(1, 65), *range(64, 128)]))
    assert other[1].hex() != digests[1], "a block's hash includes what is before it"


# -- half-way ---------------------------------------------------------------------


class Fuse:
    """Lets the N-th call to the store fail, and all after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        original = StoreClient.ask

        def ask(client: StoreClient, namespace: str, call: Any) -> Any:
            if isinstance(client, LineageClient) and client is self.client:
                if self.left == 0:
                    raise StoreUnavailable("cut here")
                self.left -= 1
            return original(client, namespace, call)

        self.client: Any = None
        monkeypatch.setattr(StoreClient, "ask", ask)


@pytest.mark.parametrize("kind", ["plain", "gated delta", "window"])
def test_a_store_cut_anywhere_is_invisible_or_whole(
    kind: str, own: RunningServer, monkeypatch: pytest.MonkeyPatch, long_run: bool
) -> None:
    """Every call to the server is the last one, once (every third, in short)."""
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    fuse = Fuse(monkeypatch)
    own.restart("--max-sessions", "8192")
    base, grown, branch = prompt(70, 9), prompt(110, 9), [*prompt(70, 9)[:40], *prompt(60, 10)]
    plain = Engine(model, None)
    clean, at = 0, 0
    while clean < 2:
        tenant = {"key_parts": {"tenant": f"{kind}{at}"}}
        writer, reader = open_store(model, own, **tenant), open_store(model, own, **tenant)
        Engine(model, writer).turn(base, reply=1)
        assert writer.flush(30)
        fuse.client, fuse.left = writer._back, at
        for ids in (grown, branch):
            Engine(model, writer).turn(ids, reply=2)
        assert writer.flush(30)
        clean = clean + 1 if fuse.left > 0 else 0
        fuse.client = None
        forget_locks(own)
        for ids in (base, grown, branch):
            turn = Engine(model, reader).turn(ids, reply=2)
            same_reply(turn, plain.turn(ids, reply=2))
            assert turn.reused >= (69 if ids is not branch or kind == "plain" else 0) - 30
        assert reader.stats().get("damaged", 0) == 0, reader.stats()
        assert reader.flush(30)
        assert Engine(model, reader).turn(grown, reply=1).reused == 109, (at, reader.stats())
        writer.close()
        reader.close()
        at += 1 if long_run else 3
    assert at > 30, "a store takes many calls"


def forget_locks(server: RunningServer) -> None:
    """What the end of their time does to the locks of writers that died."""
    with RespConnection(Address(port=server.port)) as raw:
        held = raw.call_array("KEYS", "pps:*:lock:*")
        if held:
            raw.command("DEL", *[key for key in held if key is not None])


@pytest.mark.parametrize("kind", ["plain", "window", "gated delta"])
def test_damage_on_disk_is_a_counted_miss_and_heals(kind: str, own: RunningServer) -> None:
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = patient(open_store(model, own, **kind_options(kv_bits)))
    engine = Engine(model, store)
    ids = prompt(300, 11)
    engine.turn(ids, reply=1)
    assert store.flush(30)
    own.stop()
    flipped = flip_in_every_file(own.dir)
    assert flipped
    own.start()
    turn = engine.turn(ids, reply=1)
    assert turn.logits == Engine(model, None).turn(ids, reply=1).logits or turn.reused
    same_reply(turn, Engine(model, None).turn(ids, reply=1))
    assert store.flush(30)
    healed = engine.turn(ids, reply=1)
    assert store.flush(30)
    healed = engine.turn(ids, reply=1)
    assert healed.reused == 299, store.stats()
    same_reply(healed, Engine(model, None).turn(ids, reply=1))
    store.close()


def flip_in_every_file(folder: Path) -> int:
    """One byte in the middle of every file of rows."""
    count = 0
    for path in sorted(folder.rglob("*.safetensors")):
        size = path.stat().st_size
        with open(path, "r+b") as file:
            at = size - size // 3
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x40]))
            os.fsync(file.fileno())
        count += 1
    return count


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
def test_a_state_that_does_not_verify_goes_alone(name: str, own: RunningServer) -> None:
    """The rows of its lineage and its other states stay."""
    model = tiny_model(name)
    store = open_store(model, own)
    engine, plain = Engine(model, store), Engine(model, None)
    ids = prompt(400, 15)
    engine.turn(ids, reply=1)
    assert store.flush(30)
    sid = next(one.sid for one in store.conversations()[0].checkpoints if one.length == 399)
    slot = 0 if name == "mamba" else first_state(store, sid)
    (blob,) = store._front.demand(sid, [("SSM.PREFIX.FETCH", sid, slot)])
    store._front.demand(sid, [("SSM.PREFIX.STORE", sid, slot, blob[:-1] + b"\x7f")])
    match = store.match(ids)
    assert match.length == 399 and store.restore(match) is None
    assert store.flush(30) and store.stats()["damaged"] == 1
    turn = engine.turn(ids, reply=2)
    assert turn.reused == 384, "the guard is there"
    same_reply(turn, plain.turn(ids, reply=2))
    assert store.flush(30) and engine.turn(ids, reply=1).reused == 399
    store.close()


def first_state(store: LineageStore, sid: str) -> int:
    (blob,) = store._front.demand(sid, [("SSM.PREFIX.FETCH", sid, 65535)])
    return CompletionRecord.decode(blob).states[0].slot


# -- liveness ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOME)
def test_a_server_killed_at_any_moment_costs_hits_and_nothing_else(
    kind: str, own: RunningServer
) -> None:
    """Between keep and match, between match and restore, before the write."""
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = patient(open_store(model, own, deadline_seconds=0.5, **kind_options(kv_bits)))
    engine, plain = Engine(model, store), Engine(model, None)
    ids = prompt(120, 12)
    wanted = plain.turn(ids)
    engine.turn(ids)
    assert store.flush(30)
    own.kill()
    turn = engine.turn(ids)
    assert turn.reused == 0 and turn.logits == wanted.logits
    assert "no store" in turn.match.why
    assert store.flush(30) and store.stats()["unavailable"] >= 1
    own.start()
    match = store.match(ids)
    assert match.length == 119
    own.kill()
    assert store.restore(match) is None
    own.start()
    again = engine.turn(ids)
    assert again.reused == 119
    same_reply(again, wanted)
    store.close()


def test_without_any_server_an_engine_runs_as_if_the_store_were_empty(tmp_path: Path) -> None:
    model = tiny_model("llama")
    options = LineageOptions(url=f"unix://{tmp_path}/nobody.sock", deadline_seconds=0.3)
    store = LineageStore(model, options)
    ids = prompt(100, 13)
    turn = Engine(model, store).turn(ids)
    assert turn.reused == 0 and turn.logits == Engine(model, None).turn(ids).logits
    assert store.flush(30)
    assert store.load_journal("x") is None
    assert "no store" in store.explain(ids).sentence
    store.close(1.0)


def test_image_ids_and_other_prompts_that_are_no_text_bypass_with_a_reason(
    own: RunningServer,
) -> None:
    model = tiny_model("llama")
    store = open_store(model, own)
    for ids in ([*range(50), -(2**59)], [*range(50), 2**33], ["a"], [[1, 2], [3, 4]]):
        match = store.match(ids)
        assert match.length == 0 and match.why
        assert store.keep(ids, []) is False
    assert store.match([]).length == 0
    store.close()


def test_a_cache_that_does_not_fit_the_model_is_refused_by_name(own: RunningServer) -> None:
    model = tiny_model("llama")
    store = open_store(model, own)
    engine = Engine(model, store)
    ids = prompt(50, 14)
    other = Engine(tiny_model("gemma3_text"), None)
    cache = other.model.make_cache()
    other.forward(ids, cache)
    assert store.keep(ids, cache) is False
    shorter = fresh_cache(model)
    engine.forward(ids[:40], shorter)
    assert store.keep(ids, shorter) is False, "fewer tokens than it says"
    assert store.stats()["refused"] == 2
    store.close()


def test_a_full_queue_skips_and_counts_and_never_waits(own: RunningServer) -> None:
    model = tiny_model("llama")
    store = open_store(model, own, queue_bytes=1 << 16)
    engine = Engine(model, store)
    own.process.send_signal(19)  # type: ignore[union-attr]  # SIGSTOP: nothing is written
    taken = []
    for seed in range(6):
        ids = prompt(100, 100 + seed)
        cache = fresh_cache(model)
        engine.forward(ids, cache)
        taken.append(store.keep(ids, cache))
    own.process.send_signal(18)  # type: ignore[union-attr]
    assert taken[0] and not all(taken)
    assert store.stats()["queue_full"] == taken.count(False)
    assert store.stats()["waiting_bytes"] <= (1 << 16) + 200_000
    store.close()
