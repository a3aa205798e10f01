"""How many recurrent states a conversation has, whatever its chain of segments."""

from __future__ import annotations

import numpy as np
import pytest

from pion_vllm_mlx.cache.lineage import Checkpoint, LineageStore
from pion_vllm_mlx.cache.lineage.budget import Budget
from pion_vllm_mlx.cache.lineage.index import Found, Index
from pion_vllm_mlx.cache.lineage.policy import MOST_CHECKPOINTS
from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import KINDS, Engine, prompt, same_reply
from tests.models import tiny_model


def chain_of(store: LineageStore, ids: list[int]) -> Found:
    index = Index(store._front, store._key.names)
    return index.find(np.array(ids, "<u4"), whole=True)


def states_of(found: Found) -> list[Checkpoint]:
    """All states of the chain but those of anchors."""
    return [one for part in found.chain for one in part.checkpoints if one.kind != "anchor"]


@pytest.mark.parametrize("kind", ["gated delta", "mamba", "list"])
def test_a_last_turn_that_is_edited_again_and_again_leaves_four_states_in_all(
    kind: str, opened: Opener
) -> None:
    model = tiny_model(KINDS[kind][0])
    store = opened(model)
    engine, plain = Engine(model, store), Engine(model, None)
    ids = prompt(300, 1)
    for edit in range(4):
        for turn in range(2):
            engine.turn(ids, reply=1, anchor=100)
            assert store.flush(60)
            ids = [*ids, *prompt(300, 100 + 10 * edit + turn)]
        ids = [*ids[:-450], *prompt(450, 200 + edit)]
    done = engine.turn(ids, reply=3, anchor=100)
    assert store.flush(60)
    same_reply(done, plain.turn(ids, reply=3), 1e-3)
    found = chain_of(store, ids)
    assert len(found.chain) >= 4
    assert len(states_of(found)) <= MOST_CHECKPOINTS
    assert any(one.kind == "anchor" for part in found.chain for one in part.checkpoints)
    assert engine.turn([*ids, 7], reply=1).reused == len(ids) - 1
    assert store.flush(60) and store.stats().get("damaged", 0) == 0


def test_what_was_thinned_is_not_counted_any_more(opened: Opener) -> None:
    model = tiny_model("mamba")
    store = opened(model, key_parts={"tenant": "thinned"})
    engine = Engine(model, store)
    ids = prompt(300, 2)
    for edit in range(6):
        ids = [*ids[:-10], *prompt(300, 300 + edit)] if edit else ids
        assert (engine.turn(ids, reply=1).reused > 0) == (edit > 0)
        assert store.flush(60)
    size = {
        one.number: one.size
        for one in Budget(store._front, store._key.names, 0)._members()
        if one.mid == store._key.names.mid
    }
    chain = chain_of(store, ids).chain
    states = {one.number: len(one.checkpoints) for one in chain}
    root, leaf = chain[0].number, chain[-1].number
    assert len(chain) == 6 and states[root] == 0 and states[leaf] == 2
    one_state = (size[leaf] - size[root]) / 2
    for number, count in states.items():
        assert abs(size[number] - size[root] - count * one_state) < one_state / 4


@pytest.mark.parametrize("anchor", [100, None])
def test_siblings_with_the_same_beginning_go_on_from_their_own_states(
    anchor: int | None, opened: Opener
) -> None:
    """Agents side by side do not thin out each other's conversations."""
    model = tiny_model("qwen3_next")
    store = opened(model, key_parts={"anchor": str(anchor)})
    engine = Engine(model, store)
    system = prompt(100, 3)
    talks = [[*system, *prompt(300, 400 + agent)] for agent in range(3)]
    for turn in range(4):
        for agent, ids in enumerate(talks):
            done = engine.turn(ids, reply=2, anchor=anchor)
            assert store.flush(60)
            if turn:
                assert done.reused == len(ids) - 300, (turn, agent, done.match.why)
            talks[agent] = [*ids, *done.reply[:-1], *prompt(300, 500 + 10 * turn + agent)]


@pytest.mark.parametrize("anchor", [300, None])
def test_a_prompt_that_was_gone_on_with_twice_keeps_its_state_beside_its_siblings(
    anchor: int | None, opened: Opener
) -> None:
    """Siblings differ in their last few tokens: what was gone on with is no earlier version."""
    model = tiny_model("qwen3_next")
    store = opened(model, key_parts={"siblings": str(anchor)})
    engine = Engine(model, store)
    firsts = [[*prompt(515, 6), *prompt(20, 800 + one)] for one in range(4)]
    for ids in firsts:
        engine.turn(ids, reply=1, anchor=anchor)
        assert store.flush(60)
    for turn in range(2):
        for one, ids in enumerate(firsts):
            longer = [*ids, *prompt(90, 900 + 10 * turn + one)]
            assert engine.turn(longer, reply=1, anchor=anchor).reused == len(ids) - 1
            assert store.flush(60)
    for ids in firsts:
        again = engine.turn(ids, reply=1, anchor=anchor)
        assert again.reused == len(ids) - 1, again.match.why
    found = [chain_of(store, [*ids, 1]) for ids in firsts]
    assert all(len(_on_the_way(one)) <= MOST_CHECKPOINTS for one in found)


def test_a_conversation_in_which_few_tokens_follow_the_system_prompt_is_no_version_of_another(
    opened: Opener,
) -> None:
    """A template opens every first message with the same few tokens."""
    model = tiny_model("mamba")
    store = opened(model, key_parts={"tenant": "chats"})
    engine = Engine(model, store)
    system, opening = prompt(700, 7), prompt(4, 8)
    first, other = ([*system, *opening, *prompt(40, 820 + one)] for one in range(2))
    turns = [[*first, *prompt(40 * turn, 830)] for turn in range(3)]
    for ids in turns:
        engine.turn(ids, reply=1, anchor=700)
        assert store.flush(60)
    for turn in range(4):
        engine.turn([*other, *prompt(40 * turn, 840)], reply=1, anchor=700)
        assert store.flush(60)
    for ids in turns:
        assert engine.turn(ids, reply=1, anchor=700).reused == len(ids) - 1


def _on_the_way(found: Found) -> list[Checkpoint]:
    return [
        one
        for part, end in zip(found.chain, found.ends, strict=True)
        for one in part.checkpoints
        if one.length <= end and one.kind != "anchor"
    ]


def test_a_conversation_that_shares_only_the_beginning_thins_out_nothing_of_another(
    opened: Opener,
) -> None:
    model = tiny_model("mamba")
    store = opened(model, key_parts={"tenant": "apart"})
    engine = Engine(model, store)
    first = prompt(300, 4)
    for turn in range(3):
        assert engine.turn(first, reply=1).reused == (300 * turn - 1 if turn else 0)
        assert store.flush(60)
        first = [*first, *prompt(300, 600 + turn)]
    before = states_of(chain_of(store, first))
    other = [*prompt(300, 4)[:200], *prompt(300, 5)]
    for turn in range(3):
        assert engine.turn(other, reply=1).reused == (200 + 300 * turn - 1 if turn else 0)
        assert store.flush(60)
        other = [*other, *prompt(300, 700 + turn)]
    kept = states_of(chain_of(store, first))
    assert {one.sid for one in before} <= {one.sid for one in kept}
