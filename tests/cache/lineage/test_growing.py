"""A reply that is stored while it grows: what waits is one thing, however far it has come."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pion_vllm_mlx.cache.layers import cache_arrays
from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.lineage.background import Background, Line, Task
from pion_vllm_mlx.cache.lineage.capture import Since, capture
from pion_vllm_mlx.cache.lineage.growing import together
from pion_vllm_mlx.cache.lineage.shape import Shape
from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import KINDS, Engine, fresh_cache, kind_options, prompt
from tests.models import tiny_model

EVERY = 4


def grow(
    engine: Engine, store: LineageStore, ids: list[int], cache: list[Any], count: int
) -> list[int]:
    """Greedy tokens behind ``ids``, stored and noted every few; as an engine calls the store."""
    journal = store.journal(f"reply to {ids[:4]}")
    assert journal is not None
    tokens: list[int] = []
    last, kept = ids[-1], 0
    for _ in range(count):
        logits = engine.model(mx.array([[last]]), cache=cache)[:, -1]
        grown = None
        if tokens and len(tokens) % EVERY == 0:
            known = np.array([*ids, *tokens[:-1]], np.uint32)
            grown = store.growing(known, cache, len(ids) + len(tokens))
            assert grown is not None
        mx.eval(logits, cache_arrays(cache), grown.taken.arrays if grown is not None else [])
        if kept and kept == len(tokens) - 1:
            journal.note(tokens)
        if grown is not None:
            assert store.grew(np.array([*ids, *tokens], np.uint32), grown, journal)
            kept = len(tokens)
        last = int(mx.argmax(logits, axis=-1).item())
        tokens.append(last)
    return tokens


def held_up(store: LineageStore) -> threading.Event:
    """Has the thread that stores wait until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)

    store._in_background(slow)
    assert begun.wait(30)
    return go_on


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_of_a_reply_does_not_grow_with_it_and_is_stored_whole(
    kind: str, opened: Opener
) -> None:
    family, kv_bits = KINDS[kind]
    model = tiny_model(family)
    options = {**kind_options(kv_bits), "key_parts": {"t": f"growing {kind}"}}
    store = opened(model, **options)
    engine = Engine(model, store, kv_bits)
    ids, cache = prompt(60, 31), fresh_cache(model, kv_bits)
    engine.prefill(ids, 0, 59, cache)
    assert store.keep(ids[:59], cache) and store.flush()
    go_on = held_up(store)
    tokens = grow(engine, store, ids, cache, 30 * EVERY + 2)
    assert store._background.waiting == 3  # the slow one, the rows, the note
    before = store.stats()["written"]
    go_on.set()
    assert store.flush(60), store.stats()
    assert store.stats()["written"] == before + 1

    again = opened(model, **options)
    whole = [*ids, *tokens]
    noted = again.load_journal(f"reply to {ids[:4]}")
    assert noted == tokens[: 30 * EVERY + 1]
    match = again.match([*ids, *noted])
    assert match.length == len(ids) + 30 * EVERY
    restored = again.restore(match)
    assert restored is not None and restored.length == match.length
    more, _ = Engine(model, None).generate([noted[-1]], 8, restored.caches)
    rest, _ = Engine(model, None).generate([whole[-1]], 7, cache)
    assert more == [tokens[-1], *rest]


def test_a_reply_of_which_very_many_parts_wait_is_stored_whole(opened: Opener) -> None:
    model, parts = tiny_model("llama"), 1100
    store = opened(model, key_parts={"t": "many"})
    engine, ids, cache = Engine(model, store), prompt(40 + parts, 71), fresh_cache(model)
    go_on = held_up(store)
    start = 0
    for end in range(40, len(ids) + 1):
        engine.prefill(ids, start, end, cache)
        known, start = np.array(ids[:end], np.uint32), end
        grown = store.growing(known, cache, end)
        assert grown is not None
        mx.eval(grown.taken.arrays)
        assert store.grew(known, grown, model)
    go_on.set()
    assert store.flush(60)
    assert opened(model, key_parts={"t": "many"}).match([*ids, 1]).length == len(ids)


def test_all_are_told_whose_parts_of_a_reply_were_stored_as_one(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model, key_parts={"t": "told"})
    engine, ids, cache = Engine(model, store), prompt(40, 61), fresh_cache(model)
    go_on = held_up(store)
    told: list[int] = []
    start = 0
    for end in (20, 30, 40):
        engine.prefill(ids, start, end, cache)
        start = end
        known = np.array(ids[:end], np.uint32)
        grown = store.growing(known, cache, end)
        assert grown is not None
        mx.eval(grown.taken.arrays)
        taken = replace(grown.taken, over=partial(told.append, end))
        assert store.grew(known, replace(grown, taken=taken), model)
    assert store._background.waiting == 2 and not told
    go_on.set()
    assert store.flush(60)
    assert sorted(told) == [20, 30, 40]
    assert opened(model, key_parts={"t": "told"}).match([*ids, 1]).length == 40


def test_what_two_replies_are_to_store_stays_apart(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model, key_parts={"t": "two replies"})
    engine = Engine(model, store)
    go_on = held_up(store)
    whole = []
    for seed in (41, 42, 43):
        ids, cache = prompt(40, seed), fresh_cache(model)
        engine.prefill(ids, 0, 39, cache)
        whole.append([*ids, *grow(engine, store, ids, cache, 10 * EVERY + 2)])
    assert store._background.waiting == 1 + 2 * 3
    go_on.set()
    assert store.flush(60)
    again = opened(model, key_parts={"t": "two replies"})
    assert [again.match(one).length for one in whole] == [40 + 10 * EVERY] * 3


def test_a_prompt_that_ends_where_a_reply_had_come_has_its_state_stored(opened: Opener) -> None:
    """Of a reply that waits the last state is stored alone: the one before is not known."""
    model = tiny_model("qwen3_next")
    store = opened(model, key_parts={"t": "within a reply"})
    engine = Engine(model, store)
    go_on = held_up(store)
    ids, cache = prompt(40, 51), fresh_cache(model)
    engine.prefill(ids, 0, 39, cache)
    whole = [*ids, *grow(engine, store, ids, cache, 4 * EVERY + 2)]
    go_on.set()
    assert store.flush(60)

    end = len(ids) + 2 * EVERY
    again = fresh_cache(model)
    engine.prefill(whole, 0, end, again)
    assert store.keep(whole[:end], again) and store.flush(60)
    match = opened(model, key_parts={"t": "within a reply"}).match([*whole[:end], 3, 4])
    assert match.length == end


@pytest.mark.parametrize("vquant", [None, "int8", "turbo4"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_taken_one_after_the_other_are_together_what_is_taken_at_once(
    kind: str, vquant: str | None
) -> None:
    family, kv_bits = KINDS[kind]
    if kv_bits is not None and vquant is not None:
        pytest.skip("quantized caches are stored as they are")
    model = tiny_model(family)
    engine, ids = Engine(model, None), prompt(90, 5)
    shape = Shape.of(model, None, kv_bits, 32)
    cache = fresh_cache(model, kv_bits)
    parts, ends = [], [60, 61, 77, 90]
    for start, end in zip([0, *ends], ends, strict=False):
        engine.prefill(ids, start, end, cache)
        parts.append(capture(cache, end, Since(start, start), shape, vquant))
        mx.eval(parts[-1].arrays)
    found = parts[0]
    for part in parts[1:]:
        found = together(found, part)
    wanted = capture(cache, 90, Since(), shape, vquant)
    mx.eval(wanted.arrays)
    leaves = {leaf.layer: leaf for leaf in wanted.leaves}
    assert found.slots == wanted.slots and dict(found.state_blobs()) == dict(wanted.state_blobs())
    spans = [(0, 90), (3, 61), (60, 61), (70, 90)]
    for held in wanted.rows:
        (mine,) = [
            one
            for one in found.rows
            if (one.layer, one.side) == (held.layer, held.side) and one.end == held.end
        ]
        assert mine.start <= held.start
        for start, end in spans:
            if held.start <= start:
                blob = mine.encoded(start, end, leaves[held.layer])
                assert blob.tobytes() == held.encoded(start, end, leaves[held.layer]).tobytes()
    cut = [one.until(61) for one in found.rows]
    assert {one.end for one in cut} <= {60, 61}


@pytest.mark.parametrize("fails", ["over", "failed", "both"])
def test_the_thread_goes_on_whatever_those_raise_that_are_told(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    background = Background(1 << 20, lambda: None)
    done: list[str] = []

    def raising(name: str, given: BaseException | None = None) -> None:
        done.append(name)
        if fails in (name, "both"):
            raise ValueError(name)

    def run() -> None:
        raise OSError("no room")

    task = Task(run, partial(raising, "failed"), 1, over=partial(raising, "over"))
    assert background.put(task) and background.flush(30)
    assert background.put(Task(partial(done.append, "next"), lambda error: None, 1))
    assert background.flush(30) and background.waiting_bytes == 0
    assert done == ["failed", "over", "next"]
    assert "could not be told" in caplog.text
    background.close(1)


@pytest.mark.parametrize("seed", range(20))
def test_a_note_never_comes_before_the_rows_that_were_given_before_it(seed: int) -> None:
    """Rows and notes of two replies and other things, while the thread gets on now and then."""
    chance = random.Random(seed)
    done: list[tuple[str, str, int]] = []
    steps = threading.Semaphore(0)
    background = Background(1 << 20, lambda: None)
    given = {"a": 0, "b": 0}

    def put(name: str, sort: str, numbers: tuple[int, ...]) -> Task:
        def run() -> None:
            steps.acquire()
            done.extend((name, sort, number) for number in numbers)

        def joined(former: tuple[int, ...]) -> Task:
            return put(name, sort, (*former, *numbers) if sort == "rows" else numbers)

        line = None if sort == "other" else Line(name, sort, joined, numbers, sort == "note")
        return Task(run, lambda error: None, 1, line)

    for _ in range(200):
        name, sort = chance.choice("ab"), chance.choice(["rows", "note", "other", "step"])
        if sort == "step":
            steps.release()
            continue
        given[name] += sort == "rows"
        assert background.put(put(name, sort, (given[name],)))
        assert sum(task.line is not None for task in background._tasks) <= 2 * 3
    for _ in range(200):
        steps.release()
    assert background.flush(30) and background.waiting_bytes == 0
    for name in "ab":
        rows = [number for one, sort, number in done if (one, sort) == (name, "rows")]
        assert rows == list(range(1, given[name] + 1))
        held = 0
        for one, sort, number in done:
            if one == name:
                held = number if sort == "rows" else held
                assert sort != "note" or number <= held
        notes = [number for one, sort, number in done if (one, sort) == (name, "note")]
        assert notes == sorted(notes) and notes
    background.close(1)
