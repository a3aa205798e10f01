"""Conversations: as few tokens computed as can be, and the replies of a run without a cache.

Every test asserts how many tokens went through the model: a store that never hits fails.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import (
    KINDS,
    STATEFUL,
    Engine,
    Oracle,
    Pair,
    kind_options,
    prompt,
    same_reply,
)
from tests.models import tiny_model


@pytest.fixture(params=list(KINDS))
def pair(request: pytest.FixtureRequest, opened: Opener) -> Pair:
    kind: str = request.param
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    return Pair(kind, opened(model, **kind_options(kv_bits)), model, Oracle(kind))


def test_a_conversation_of_turns_computes_each_token_once(pair: Pair) -> None:
    ids = prompt(90, 1)
    for turn in range(5):
        answered = pair.ask(ids)
        if turn:
            assert answered.computed <= 14, "the new message, and the last token of the reply"
        ids = [*ids, *answered.reply, *prompt(10, 50 + turn)]


def test_an_exact_repeat_and_a_regenerated_reply_compute_one_token(pair: Pair) -> None:
    ids = prompt(150, 2)
    pair.ask(ids)
    for _ in range(3):
        assert pair.ask(ids).computed == 1


def test_an_edit_in_the_middle_costs_what_follows_it(pair: Pair) -> None:
    """A divergence hits; a hybrid's at the guard of the first prompt."""
    ids = prompt(600, 3)
    pair.ask(ids)
    edited = [*ids[:590], *prompt(60, 4)]
    assert pair.ask(edited).reused >= 584
    assert pair.ask([*edited[:-1], 7]).reused >= 600


def test_a_divergence_gets_a_restore_point_for_the_third_prompt(pair: Pair) -> None:
    system = prompt(400, 5)
    pair.ask([*system, *prompt(100, 6)])
    pair.ask([*system, *prompt(100, 7)])
    third = pair.ask([*system, *prompt(100, 8)])
    assert third.reused == 400 and third.computed == 100


def test_a_prompt_that_passes_through_leaves_nothing_of_its_own_behind(opened: Opener) -> None:
    """The windows that another prompt adds to a segment end where it leaves it."""
    model = tiny_model("gemma3_text")
    store = opened(model)
    slow, plain = Engine(model, store), Engine(model, None)
    slow.chunk = 1  # a ring that holds its window and no more
    first = prompt(700, 16)
    slow.turn(first, reply=1)
    assert store.flush(30)
    engine = Engine(model, store)
    other = [*first[:400], *prompt(150, 17)]
    turn = engine.turn(other, reply=1)
    assert turn.reused == 0 and turn.match.common == 400
    assert store.flush(30)
    for at in (400, 420, 450, 500, 548, 600):
        asked = [*first[:at], 5, 6, 7]
        match = store.match(asked)
        assert match.common >= at and 400 <= match.length <= at
        same_reply(engine.turn(asked), plain.turn(asked))
        assert store.flush(30)
    assert engine.turn([*other[:549], 9, 9]).reused == 549


def test_an_anchor_serves_every_conversation_under_it(pair: Pair) -> None:
    system = prompt(80, 9)
    for seed in range(3):
        turn = pair.ask([*system, *prompt(30, 20 + seed)], anchor=80)
        assert turn.reused == (80 if seed else 0)


def test_two_interleaved_conversations_do_not_disturb_each_other(pair: Pair) -> None:
    left, right = prompt(70, 10), [*prompt(40, 10), *prompt(40, 11)]
    for turn in range(3):
        a = pair.ask(left)
        b = pair.ask(right)
        if turn:
            assert a.computed <= 14 and b.computed <= 14
        left = [*left, *a.reply, *prompt(10, 60 + turn)]
        right = [*right, *b.reply, *prompt(10, 70 + turn)]


@pytest.mark.parametrize("lane", ["mapped", "stored"])
def test_a_second_store_object_sees_what_the_first_kept(
    pair: Pair, opened: Opener, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same machine and on another one."""
    ids = prompt(140, 12 if lane == "mapped" else 18)
    first = pair.ask(ids)  # a last chunk of one token would turn a window's ring
    if lane == "stored":
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
    other = Engine(
        pair.with_store.model,
        opened(pair.with_store.model, **kind_options(pair.with_store.kv_bits)),
        pair.with_store.kv_bits,
    )
    again = other.turn(ids)
    rows = KINDS[pair.oracle.kind][0] not in ("mamba", "rwkv7")  # of states there are no files
    assert (again.reused, again.computed) == (139, 1)
    assert again.lane == (lane if rows else "stored")
    assert again.logits[0] == first.logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_without_checkpoints_only_a_whole_stored_prompt_is_reused(
    kind: str, opened: Opener
) -> None:
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = opened(model, checkpoints=False, **kind_options(kv_bits))
    engine = Engine(model, store, kv_bits)
    ids = prompt(400, 13)
    engine.turn(ids, reply=1)
    assert store.flush(30)
    assert store.cuts(ids, store.match([*ids[:300], 1]), 50) == []
    assert engine.turn([*ids[:300], 1], reply=1).reused == 0
    assert engine.turn([*ids, 1, 2], reply=1).reused == 399


def test_the_environment_switches_lineages_off(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_LINEAGE", "0")
    model = tiny_model("llama")
    store = opened(model)
    engine = Engine(model, store)
    ids = prompt(200, 14)
    engine.turn(ids, reply=1)
    assert store.flush(30)
    assert engine.turn([*ids[:150], 1, 2], reply=1).reused == 0
    assert engine.turn([*ids, 1, 2], reply=1).reused == 199, "all of what was kept"


@pytest.mark.parametrize("name", STATEFUL)
def test_at_most_four_states_of_a_segment_stay_and_their_bytes_go(
    name: str, opened: Opener
) -> None:
    model = tiny_model(name)
    store = opened(model)
    engine = Engine(model, store)
    ids, known = prompt(60, 15), 0
    for turn in range(8):
        answer = engine.turn(ids)
        assert store.flush(30)
        assert answer.reused == known
        known = len(ids) + len(answer.reply) - 1
        ids = [*ids, *answer.reply, *prompt(6, 80 + turn)]
    (mine,) = [
        one for one in store.conversations() if store.tokens_of(one.id)[:60] == prompt(60, 15)
    ]
    assert len(mine.checkpoints) <= 4
    sids = {one.sid for one in mine.checkpoints}
    assert states_of(store, mine.id) == sids


def states_of(store: Any, conversation: str) -> set[str]:
    """The sids under which the server has states of a segment."""
    mid, _, number = conversation.rpartition(":")
    namespace = f"pps{mid}s{number}"
    client = store._front
    lengths = range(1, 300)
    commands = [("SSM.PREFIX.FETCH", f"{namespace}@{n}", 65535) for n in lengths]
    replies = client.demand(namespace, commands)
    return {f"{namespace}@{n}" for n, r in zip(lengths, replies, strict=True) if r is not None}
