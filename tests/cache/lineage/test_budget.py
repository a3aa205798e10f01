"""Bytes: counted, capped, stored once, and given back."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from pion_vllm_mlx.cache.completion import CompletionRecord
from pion_vllm_mlx.cache.connection import info_fields
from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.lineage.budget import Budget
from tests.cache.lineage.driving import (
    KINDS,
    STATEFUL,
    Engine,
    kind_options,
    open_store,
    prompt,
    same_reply,
)
from tests.conftest import RunningServer
from tests.models import tiny_model

ROW_BYTES = 2 * 2 * 2 * 32 * 4  # layers, sides, heads, width, float32


def held(store: LineageStore) -> int:
    return Budget(store._front, store._key.names, 0).held()


def server_bytes(store: LineageStore) -> int:
    (reply,) = store._front.demand("x", [("KV.PREFIX.INFO",)])
    return int(info_fields(reply)["vstore_bytes"])


def test_rows_are_stored_once_whatever_shares_them(own: RunningServer) -> None:
    """Turns, branches and repeats write each distinct row one time."""
    model = tiny_model("llama")
    store = open_store(model, own)
    engine = Engine(model, store)
    system = prompt(100, 1)
    distinct: set[tuple[int, ...]] = set()
    for seed in range(4):
        ids = [*system, *prompt(30, 10 + seed)]
        known = len(system) if seed else 0
        for _ in range(3):
            turn = engine.turn(ids)
            assert store.flush()
            assert turn.reused >= known and turn.computed == len(ids) - turn.reused
            done = [*ids, *turn.reply[:-1]]
            known = len(done)
            distinct |= {tuple(done[: n + 1]) for n in range(len(done))}
            ids = [*ids, *turn.reply, *prompt(5, 40 + seed)]
    assert store.stats()["bytes_rows"] == len(distinct) * ROW_BYTES
    assert server_bytes(store) == len(distinct) * ROW_BYTES
    store.close()


@pytest.mark.parametrize("kind", ["plain", "window", "gated delta", "mamba"])
def test_what_is_dropped_gives_back_every_byte(kind: str, own: RunningServer) -> None:
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = open_store(model, own, **kind_options(kv_bits))
    engine = Engine(model, store, kv_bits)
    for ids in (prompt(100, 2), [*prompt(60, 2), *prompt(60, 3)], prompt(80, 4)):
        engine.turn(ids)
        assert store.flush()
    assert engine.turn(prompt(80, 4)).reused == 79
    assert store.flush()
    rows = server_bytes(store)
    assert (rows > 0) == (kind != "mamba")
    counted = held(store)
    assert counted >= rows and (counted <= 1.5 * rows + 60_000 or name in STATEFUL)
    while store.conversations():
        assert store.drop(store.conversations()[0].id) >= 1
    assert server_bytes(store) == 0 and held(store) == 0
    keys = {key.decode() for key in store._front.demand("x", [("KEYS", "*")])[0]}
    left = {key.partition(":")[2].partition(":")[2] for key in keys}
    assert left <= {"layout", "key", "nextseg"}, keys
    assert engine.turn(prompt(100, 2)).reused == 0
    store.close()


def test_the_least_recently_used_goes_and_what_is_shared_goes_last(own: RunningServer) -> None:
    model = tiny_model("llama")
    one = 130 * ROW_BYTES
    store = open_store(model, own, budget_bytes=4 * one)
    engine = Engine(model, store)
    system = prompt(80, 5)
    for seed in range(12):
        assert engine.turn([*system, *prompt(50, 20 + seed)], reply=1).reused == (80 if seed else 0)
        assert store.flush()
        assert held(store) <= 4 * one
    assert store.stats()["evicted"] >= 3
    assert engine.turn([*system, *prompt(50, 31)], reply=1).reused == 129, "the latest is there"
    assert store.flush()
    assert engine.turn([*system, *prompt(50, 21)], reply=1).reused == 80, "the oldest is not"
    store.close()


def test_a_budget_below_one_conversation_keeps_nothing_and_fails_nothing(
    own: RunningServer,
) -> None:
    model = tiny_model("llama")
    store = open_store(model, own, budget_bytes=20 * ROW_BYTES)
    engine, plain = Engine(model, store), Engine(model, None)
    ids = prompt(100, 6)
    for _ in range(3):
        turn = engine.turn(ids)
        assert store.flush()
        assert (turn.reused, turn.logits) == (0, plain.turn(ids).logits)
    assert store.stats()["over_budget"] >= 3
    assert server_bytes(store) == 0 and held(store) == 0
    store.close()


def anchors(store: LineageStore) -> int:
    """The bytes of all anchors."""
    members = Budget(store._front, store._key.names, 0)._members()
    return sum(member.size for member in members if member.anchor)


def empty(store: LineageStore) -> None:
    while store.conversations():
        store.drop(store.conversations()[0].id)


def asked(engine: Engine, seed: int, turns: int) -> list[int]:
    """A conversation behind the system prompt of all, which begins as all others do, too."""
    ids = [*prompt(100, 13), *prompt(40, 14), *prompt(300, 400 + seed)]
    for turn in range(turns):
        if turn:
            ids = [*ids, *prompt(300, 500 + 10 * seed + turn)]
        done = engine.turn(ids, reply=3, anchor=100)
        assert engine.store is not None and engine.store.flush(60)
        wanted = Engine(engine.model, None, engine.kv_bits).turn(ids, reply=3)
        same_reply(done, wanted)
        ids = [*ids, *done.reply[:-1]]
    return ids


@pytest.mark.parametrize("kind", ["plain", "quantized", "window", "gated delta", "mamba", "list"])
@pytest.mark.parametrize("share", [1.2, 1.7])
def test_the_latest_conversation_behind_an_anchor_is_kept_where_two_have_no_room(
    kind: str, share: float, own: RunningServer
) -> None:
    """Every one shares its beginning, past the anchor, with the one that has to go."""
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    alone = open_store(model, own, **kind_options(kv_bits))
    asked(Engine(model, alone, kv_bits), 0, turns=3)
    anchor = anchors(alone)
    budget = int(anchor + share * (held(alone) - anchor))
    empty(alone)
    alone.close()
    store = open_store(model, own, budget_bytes=budget, **kind_options(kv_bits))
    engine = Engine(model, store, kv_bits)
    for seed in range(1, 4):
        ids = asked(engine, seed, turns=3)
        assert held(store) <= budget and server_bytes(store) <= budget
        again = engine.turn([*ids, 1], reply=1, anchor=100)
        assert again.reused >= len(ids) - 2, again.match.why
    stats = store.stats()
    assert stats.get("over_budget", 0) == stats.get("lost", 0) == stats.get("failed", 0) == 0, stats
    assert stats["evicted"] >= 2
    assert anchors(store) > 0
    store.close()


def test_what_cannot_fit_is_said_once_with_both_sizes_and_throws_out_nothing(
    own: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    budget = 500 * ROW_BYTES
    store = open_store(model, own, budget_bytes=budget)
    engine = Engine(model, store)
    system, other = prompt(100, 15), prompt(200, 16)
    engine.turn(other, reply=1)
    with caplog.at_level(logging.INFO, "pion_vllm_mlx"):
        for seed in range(3):
            engine.turn([*system, *prompt(400, 600 + seed)], anchor=100)
            assert store.flush()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and f"the budget is {budget:,} bytes" in told[0], told
    assert "499 tokens: " in told[0] and "bytes more do not fit" in told[0]
    assert engine.turn([*other, 1], reply=1).reused == 199
    assert engine.turn([*system, 1, 2], reply=1).reused == 100
    store.close()


def test_anchors_and_pinned_conversations_outlive_busy_ones(own: RunningServer) -> None:
    """Sub-agents do not throw out the system prompt."""
    model = tiny_model("llama")
    one = 130 * ROW_BYTES
    store = open_store(model, own, budget_bytes=5 * one)
    engine = Engine(model, store)
    system, pinned = prompt(60, 7), prompt(100, 8)
    engine.turn([*system, *prompt(40, 30)], reply=1, anchor=60)
    engine.turn(pinned, reply=1)
    assert store.flush()
    (mine,) = [one for one in store.conversations() if store.tokens_of(one.id) == pinned[:99]]
    store.pin(mine.id)
    for seed in range(12):
        engine.turn(prompt(120, 60 + seed), reply=1)
        assert store.flush()
    assert engine.turn(pinned, reply=1).reused == 99
    assert engine.turn([*system, *prompt(40, 30)], reply=1).reused == 60
    store.pin(mine.id, False)
    for seed in range(12):
        engine.turn(prompt(120, 80 + seed), reply=1)
        assert store.flush()
    assert engine.turn(pinned, reply=1).reused == 0
    store.close()


def test_a_server_with_few_sessions_keeps_the_latest(own: RunningServer) -> None:
    own.restart("--max-sessions", "32")
    model = tiny_model("llama")
    store = open_store(model, own)
    engine = Engine(model, store)
    for seed in range(20):
        engine.turn(prompt(40, 100 + seed), reply=1)
        assert store.flush()
    assert engine.turn(prompt(40, 119), reply=1).reused == 39
    assert len(store.conversations()) <= 8
    store.close()


def test_what_other_models_hold_counts_and_goes_too(own: RunningServer) -> None:
    first, second = tiny_model("llama"), tiny_model("deepseek_v3")
    one = 130 * ROW_BYTES
    old = open_store(first, own, budget_bytes=3 * one)
    for reused in (0, 119):
        assert Engine(first, old).turn(prompt(120, 9), reply=1).reused == reused
        assert old.flush()
    new = open_store(second, own, budget_bytes=3 * one)
    for seed in range(8):
        Engine(second, new).turn(prompt(120, 110 + seed), reply=1)
        assert new.flush()
        assert held(new) <= 3 * one
    assert Engine(first, old).turn(prompt(120, 9), reply=1).reused == 0
    old.close()
    new.close()


def runs_of(store: LineageStore, number: int = 1) -> dict[tuple[int, str], int]:
    """How many runs each leaf and side of a segment has."""
    blob = store._front.record(store._key.names.namespace(number))
    assert blob is not None
    return dict(Counter((run.layer, run.side) for run in CompletionRecord.decode(blob).runs))


@pytest.mark.parametrize("kind", ["plain", "quantized", "window", "gated delta"])
def test_many_short_turns_become_few_runs_and_each_row_is_sent_about_once_more(
    kind: str, own: RunningServer
) -> None:
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = open_store(model, own, **kind_options(kv_bits))
    engine = Engine(model, store, kv_bits)
    ids = prompt(40, 12)
    early = store.match(ids)
    for turn in range(30):
        engine.turn(ids, reply=1)
        assert store.flush()
        if turn == 6:
            early = store.match(ids)
        ids = [*ids, *prompt(5, 300 + turn)]
    assert max(runs_of(store).values()) <= 9
    stats = store.stats()
    assert 0 < stats["bytes_merged"] <= 2 * stats["bytes_rows"]
    turn_ = engine.turn(ids, reply=2)
    assert turn_.reused == len(ids) - 6
    wanted = Engine(model, None, kv_bits).turn(ids, reply=2)
    same_reply(turn_, wanted)
    again = store.restore(early)
    if name in STATEFUL:
        assert again is None, "its state was thinned out meanwhile"
    else:
        assert again is not None and again.length == early.length, "a match from before holds"
    assert store.flush()
    assert store.stats().get("damaged", 0) == 0
    assert engine.turn(ids, reply=1).reused == len(ids) - 1
    store.close()
