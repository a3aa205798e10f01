"""What an engine notices of a hit and of a store, in counts: buffers, threads, single tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList

from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import KINDS, Engine, fresh_cache, kind_options, prompt
from tests.models import tiny_model

MADE = ("zeros", "concatenate", "contiguous", "stack", "eval", "async_eval", "depends")
"""Functions of MLX that make an array or compute one."""


def leaves(caches: Iterable[Any]) -> list[Any]:
    """The caches that hold rows."""
    found: list[Any] = []
    for cache in caches:
        if isinstance(cache, CacheList):
            found += leaves(cache.caches)
        elif not isinstance(cache, ArraysCache):
            found.append(cache)
    return found


def buffers(caches: list[Any]) -> list[Any]:
    """Class, sizes and dtypes of all that holds rows."""
    told = []
    for cache in leaves(caches):
        parts = cache.keys if isinstance(cache.keys, list | tuple) else [cache.keys]
        told.append((type(cache), [(part.shape[2], part.dtype) for part in parts]))
    return told


def decoded(engine: Engine, ids: list[int], cache: list[Any], count: int) -> tuple[int, list[Any]]:
    """How often buffers were made anew in ``count`` tokens, and what they are at the end."""
    times, before = 0, buffers(cache)
    for _ in range(count):
        logits = engine.forward(ids, cache)
        ids = [int(mx.argmax(logits, axis=-1).item())]
        now = buffers(cache)
        times += now != before
        before = now
    return times, before


@pytest.mark.parametrize("count", [255, 256, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_behind_a_hit_makes_no_more_buffers_than_behind_a_prefill(
    kind: str, count: int, opened: Opener
) -> None:
    """Every buffer made anew is a copy of all rows: a hit that does so decodes slowly."""
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    key = {"decoding": f"{kind} {count}"}
    store = opened(model, key_parts=key, **kind_options(kv_bits))
    engine, ids = Engine(model, store, kv_bits), prompt(count, 41)
    cold = fresh_cache(model, kv_bits)
    engine.prefill(ids, 0, count - 1, cold)
    assert store.keep(ids[:-1], cold) and store.flush()
    found = opened(model, key_parts=key, **kind_options(kv_bits))
    restored = found.restore(found.match(ids))
    assert restored is not None and restored.length == count - 1
    times, at_end = decoded(engine, ids[-1:], cold, 300)
    warm_times, warm_at_end = decoded(engine, ids[-1:], restored.caches, 300)
    assert warm_times <= times + 1  # a full ring, or rows without any to spare, once
    classes = [(kind, [dtype for _, dtype in parts]) for kind, parts in at_end]
    assert [(kind, [dtype for _, dtype in parts]) for kind, parts in warm_at_end] == classes


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_thread_that_writes_makes_and_computes_no_array(
    kind: str, given: bool, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would need a stream of the thread that generates."""
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    key = {"writes": f"{kind} {given}"}
    store = opened(model, key_parts=key, **kind_options(kv_bits))
    engine, ids = Engine(model, store, kv_bits), prompt(150, 42)
    cache = fresh_cache(model, kv_bits)
    engine.prefill(ids, 0, 149, cache)
    threads: set[str] = set()

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return call(*args, **options)

        return calling

    for made in MADE:
        monkeypatch.setattr(mx, made, noted(getattr(mx, made)))
    assert store.keep(ids[:-1], cache, given=given)
    assert store.flush()
    monkeypatch.undo()
    assert store.stats()["written"] == 1
    assert "pion-lineage" not in threads


def test_a_token_that_merges_with_what_follows_costs_itself_and_nothing_before(
    opened: Opener,
) -> None:
    """As a tokenizer does it at the end of a text that goes on."""
    model = tiny_model("llama")
    store = opened(model, key_parts={"merge": "1"})
    engine, start = Engine(model, store), prompt(130, 43)
    engine.turn([*start, 7, 3], reply=1)
    assert store.flush()
    longer = [*start, 9, *prompt(40, 44)]  # 7 and what comes next are one token, 9
    told = store.explain(longer)
    assert (told.position, told.stored_token, told.asked_token) == (130, 7, 9)
    turn = engine.turn(longer)
    assert (turn.reused, turn.computed) == (130, len(longer) - 130)


def test_a_prompt_whose_caches_wait_to_be_computed_is_not_counted_as_gone(opened: Opener) -> None:
    """An engine computes what it keeps along with later steps: who asks meanwhile is early."""
    model = tiny_model("llama")
    store = opened(model, key_parts={"tenant": "early"})
    ids, cache = prompt(100, 12), fresh_cache(model)
    Engine(model, None).prefill(ids, 0, 100, cache)
    waiting: list[Callable[[], None]] = []

    def later(arrays: Iterable[mx.array], then: Callable[[], None]) -> None:
        mx.eval(*arrays)
        waiting.append(then)

    assert store.keep(ids, cache, schedule=later)
    store.recheck(ids)
    assert store.match([*ids, 1]).length == 0
    assert store.flush(60) and "gone" not in store.stats(), store.stats()
    while waiting:
        waiting.pop()()
    assert store.flush(60)
    again = store.match([*ids, 1])
    assert again.length == 100 and "gone" not in store.stats()
    store.drop(store.conversations()[0].id)
    store._recent.note(again.tokens, 100, 100, None)
    store.recheck(ids)
    assert store.flush(60) and store.stats()["gone"] == 1
