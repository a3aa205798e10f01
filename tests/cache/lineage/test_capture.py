"""Taking rows out of live caches: by position, in any turn of a ring, on either device."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.lineage import capture as capture_module
from pion_vllm_mlx.cache.lineage.capture import Since, capture, ring_parts
from pion_vllm_mlx.cache.lineage.coverage import Window, needed
from pion_vllm_mlx.cache.lineage.shape import Shape
from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import KINDS, Engine, fresh_cache, kind_options, prompt
from tests.models import tiny_model


@pytest.mark.parametrize("keep", [0, 4])
def test_a_ring_is_read_by_token_position_however_it_was_filled(keep: int) -> None:
    rng = random.Random(3)
    for _ in range(60):
        size = rng.choice([8, 16])
        cache, seen = RotatingKVCache(max_size=size, keep=keep), 0
        for _ in range(rng.randrange(1, 12)):
            count = rng.choice([1, 1, 1, 2, 5, 20])
            rows = mx.arange(seen, seen + count).astype(mx.float32).reshape(1, 1, count, 1)
            cache.update_and_fetch(rows, rows)
            seen += count
        buffer = np.array(cache.keys)[0, 0, :, 0]
        window = Window(size, keep)
        found: set[int] = set()
        for position, first, last in ring_parts(cache._idx, len(buffer), cache.offset, window):
            assert buffer[first:last].tolist() == list(range(position, position + last - first))
            found |= set(range(position, position + last - first))
        wanted = {n for a, b in needed(window, seen) for n in range(a, b)}
        assert wanted <= found, (size, keep, seen, cache._idx)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_captured_stays_what_it_was_while_the_model_goes_on(
    kind: str, on_gpu: bool, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied by MLX as on a GPU, or shared until it is written."""
    monkeypatch.setattr(capture_module, "computes_on_gpu", lambda: on_gpu)
    monkeypatch.setattr(capture_module, "SMALL_BYTES", 0)
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = opened(model, key_parts={"device": str(on_gpu)}, **kind_options(kv_bits))
    gate = threading.Event()
    write = store._write
    store._write = lambda job: (gate.wait(30), write(job))[1]  # type: ignore[method-assign]
    engine = Engine(model, store, kv_bits)
    ids = prompt(100, 1)
    cache = fresh_cache(model, kv_bits)
    engine.prefill(ids, 0, 99, cache)
    assert store.keep(ids[:99], cache)
    logits = engine.forward(ids[99:], cache)
    engine.generate([3], 40, cache)
    gate.set()
    assert store.flush(30)
    restored = store.restore(store.match(ids))
    assert restored is not None and restored.length == 99
    assert bytes(memoryview(engine.forward(ids[99:], restored.caches))) == bytes(memoryview(logits))


def test_only_what_is_new_is_taken() -> None:
    model = tiny_model("llama")
    engine = Engine(model, None)
    cache = fresh_cache(model)
    engine.prefill(prompt(100, 2), 0, 100, cache)
    shape = Shape.of(model, None, None, 64)
    row = 2 * 2 * 2 * 32 * 4
    assert capture(cache, 100, Since(), shape, None).num_bytes == 100 * row
    assert capture(cache, 100, Since(90, 90), shape, None).num_bytes == 10 * row
    assert capture(cache, 100, Since(100, 100), shape, None).num_bytes == 0


def test_a_store_that_is_dropped_ends_its_thread_and_its_connections(opened: Opener) -> None:
    model = tiny_model("llama")
    store = LineageStore(model, opened(model).options)
    Engine(model, store).turn(prompt(50, 3), reply=1)
    assert store.flush()
    thread = store._background._thread
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def test_a_slow_server_costs_a_match_one_deadline(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model, deadline_seconds=0.3)
    Engine(model, store).turn(prompt(50, 4), reply=1)
    assert store.flush()
    ask = store._front.ask

    def slowly(namespace: str, call: object) -> object:
        time.sleep(0.35)
        return ask(namespace, call)  # type: ignore[arg-type]

    store._front.ask = slowly  # type: ignore[method-assign,assignment]
    match = store.match(prompt(50, 4))
    assert match.length == 0 and "too slowly" in match.why
