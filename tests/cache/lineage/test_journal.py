"""Journals and conversations: what survives a process, and how it is looked at."""

from __future__ import annotations

import threading

import pytest

from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.lineage.index import Index, Names
from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import (
    KINDS,
    Engine,
    fresh_cache,
    kind_options,
    prompt,
    same_reply,
)
from tests.models import tiny_model


def test_a_reply_that_was_cut_goes_on_where_it_was(opened: Opener) -> None:
    model = tiny_model("llama")
    first = opened(model)
    engine = Engine(model, first)
    ids = prompt(80, 1)
    cache = fresh_cache(model)
    engine.prefill(ids, 0, 79, cache)
    reply, _ = engine.generate(ids[79:], 17, cache)
    journal = first.journal("request")
    assert journal is not None
    first.keep([*ids, *reply[:-1]], cache)
    journal.note(reply)
    assert first.flush()
    rest, _ = engine.generate(reply[-1:], 8, cache)
    second = opened(model)
    noted = second.load_journal("request")
    assert noted == reply
    match = second.match([*ids, *reply])
    assert match.length == len(ids) + 16
    restored = second.restore(match)
    assert restored is not None
    assert Engine(model, None).generate(reply[-1:], 8, restored.caches)[0] == rest
    second.drop_journal("request")
    assert second.flush()
    assert first.load_journal("request") is None


def test_a_journal_ends_by_itself_and_is_off_without_resume(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model)
    journal = store.journal("a")
    assert journal is not None
    journal.note([3])
    assert store.flush()
    assert store.load_journal("a") == [3]
    (key,) = store._front.demand("x", [("KEYS", "pps:*:jr:*")])[0]
    (left,) = store._front.demand("x", [("TTL", key)])
    assert 86_000 < left <= 86_400
    off = opened(model, resume=False)
    assert off.journal("b") is None
    assert off.load_journal("a") is None


def test_a_reply_that_has_ended_is_forgotten_before_its_end_is_told(opened: Opener) -> None:
    """Nothing waits for the background thread: killed right after it, nobody finds a journal."""
    model = tiny_model("llama")
    store, other = opened(model, key_parts={"t": "end"}), opened(model, key_parts={"t": "end"})
    journal = store.journal("request")
    assert journal is not None
    journal.note([1])
    assert store.flush() and other.load_journal("request") == [1]
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(30)

    store._in_background(slow)
    assert begun.wait(30)
    journal.note([1, 2])  # waits behind the slow one
    journal.leave()  # and so does this, by the generation, which is over
    assert journal.end()
    assert other.load_journal("request") is None
    go_on.set()
    assert store.flush()
    assert other.load_journal("request") is None
    journal.note([1, 2, 3])  # by a generation that has not heard of the end yet
    assert store.flush() and other.load_journal("request") is None
    again = store.journal("request")
    assert again is not None
    again.note([7])
    assert store.flush() and other.load_journal("request") == [7]
    again.leave()
    assert store.flush() and other.load_journal("request") is None


def test_a_reply_is_forgotten_though_one_connection_is_held_up(
    opened: Opener,
) -> None:
    model = tiny_model("llama")
    store, other = opened(model, key_parts={"t": "held"}), opened(model, key_parts={"t": "held"})
    journal = store.journal("request")
    assert journal is not None
    journal.note([1])
    assert store.flush() and other.load_journal("request") == [1]
    store._front.endpoint.door._back_off.failed("the last call took too long")
    assert journal.end() and other.load_journal("request") is None


def conversation(store: LineageStore, ids: list[int]) -> str:
    (found,) = [
        one.id for one in store.conversations() if store.tokens_of(one.id)[: len(ids)] == ids
    ]
    return found


def test_conversations_are_listed_latest_first_and_dropped(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model, key_parts={"t": "list"})
    engine = Engine(model, store)
    left, right = prompt(80, 2), [*prompt(50, 2), *prompt(40, 3)]
    engine.turn(left, reply=1)
    assert store.flush()
    engine.turn(right, reply=1)
    assert store.flush()
    listed = store.conversations()
    assert [one.tokens for one in listed] == [89, 79]
    assert [one.segments for one in listed] == [2, 1]
    assert store.drop(conversation(store, right[:89])) == 1
    assert engine.turn(right, reply=1).reused == 50
    assert store.flush()
    with pytest.raises(KeyError):
        store.tokens_of("nobody:7")
    with pytest.raises(KeyError):
        store.drop(listed[0].id)


def test_explain_names_the_first_token_that_differs(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model, key_parts={"tenant": "mine"})
    engine = Engine(model, store)
    ids = prompt(100, 5)
    engine.turn(ids, reply=1)
    assert store.flush()
    other = [*ids[:70], 1 + ids[70] % 100, *ids[71:]]
    found = store.explain(other)
    assert (found.common, found.restorable, found.position) == (70, 70, 70)
    assert (found.stored_token, found.asked_token) == (ids[70], other[70])
    assert found.stored == 99 and ids[70] in found.stored_tokens
    assert store.explain(prompt(50, 6)).common == 0


def test_explain_names_the_field_of_the_key_that_differs(opened: Opener) -> None:
    model = tiny_model("llama")
    ids = prompt(100, 7)
    mine = opened(model, key_parts={"tenant": "mine"})
    Engine(model, mine).turn(ids, reply=1)
    assert mine.flush()
    found = opened(model).explain(ids)
    assert (found.common, found.restorable) == (99, 0)
    assert (found.key_field, found.asked_key) == ("tenant", None)
    assert "mine" not in str(found)
    other = tiny_model("llama")
    weight = other.model.embed_tokens.weight
    other.model.embed_tokens.weight = weight * 1.5
    assert opened(other, key_parts={"tenant": "mine"}).explain(ids).key_field == "weights"


def test_explain_tells_one_tenant_nothing_of_another(opened: Opener) -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    other.model.embed_tokens.weight = other.model.embed_tokens.weight * 1.5
    ids = prompt(100, 7)
    mine = opened(model, key_parts={"tenant": "mine"})
    Engine(model, mine).turn(ids, reply=1)
    assert mine.flush()
    unknown = opened(model, key_parts={"tenant": "yours"}).explain(prompt(100, 8))
    for asked in (model, other):  # of the same model, and of one that differs in more
        assert opened(asked, key_parts={"tenant": "yours"}).explain(ids) == unknown
    assert (unknown.common, unknown.key_field, unknown.stored) == (0, None, 0)


@pytest.mark.parametrize("kind", ["plain", "window", "gated delta", "mamba", "quantized"])
def test_a_branch_outlives_the_conversation_it_came_from(kind: str, opened: Opener) -> None:
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = opened(model, key_parts={"t": f"branch {kind}"}, **kind_options(kv_bits))
    engine, plain = Engine(model, store, kv_bits), Engine(model, None, kv_bits)
    ids = prompt(120, 8)
    engine.turn(ids, reply=1)
    assert store.flush()
    origin = conversation(store, ids[:119])
    branch = store.branch(origin, 119)
    assert store.tokens_of(branch) == ids[:119]
    with pytest.raises(ValueError, match="119"):
        store.branch(origin, 120)
    longer = [*ids, *prompt(60, 9)]
    engine.turn(longer, reply=1)
    assert store.flush()
    store.drop(conversation(store, longer[:179]))
    same_reply(engine.turn(ids, reply=2), plain.turn(ids, reply=2))
    assert store.match([*ids[:119], 1]).length == 119
    restored = store.restore(store.match([*ids[:119], 1]))
    assert restored is not None and restored.length == 119


def test_deleting_what_others_stand_on_takes_its_own_tokens_out(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model, key_parts={"t": "shorten"})
    engine = Engine(model, store)
    left, right = prompt(200, 10), [*prompt(150, 10), *prompt(40, 11)]
    engine.turn(left, reply=1)
    assert store.flush()
    engine.turn(right, reply=1)
    assert store.flush()
    store.drop(conversation(store, left[:199]))
    assert [store.tokens_of(one.id) for one in store.conversations()] == [right[:189]]
    assert store.match(left).common == 150
    assert engine.turn(right, reply=1).reused == 189
    turn = engine.turn(left, reply=2)
    assert turn.reused == 150
    same_reply(turn, Engine(model, None).turn(left, reply=2))
    assert store.flush() and engine.turn(left, reply=1).reused == 199


@pytest.mark.parametrize("length", [64, 127, 128, 129, 192, 198])
def test_a_branch_takes_nothing_away_from_the_conversation_it_came_from(
    length: int, opened: Opener
) -> None:
    """Wherever it leaves it: at the end of a block, too, whose address both could claim."""
    model = tiny_model("llama")
    store = opened(model, key_parts={"t": f"branch at {length}"})
    engine = Engine(model, store)
    ids = prompt(200, 12)
    engine.turn(ids, reply=1)
    assert store.flush()
    origin = conversation(store, ids[:199])
    branch = store.branch(origin, length)
    fresh = opened(model, key_parts={"t": f"branch at {length}"})
    for count in (70, 100, 127, 128, 140, 190, 198):
        asked = [*ids[:count], 1 + ids[count] % 100, 5]
        match = fresh.match(asked)
        assert (match.common, match.length) == (count, count)
        restored = fresh.restore(match)
        assert restored is not None and restored.length == count
    longer = [*ids[:length], *prompt(30, 13)]
    assert engine.turn(longer, reply=1).reused == length
    assert store.flush()
    store.drop(origin)
    found = fresh.match([*ids[:length], *prompt(30, 13)[:20], 3, 3, 3])
    assert found.length == length + 20
    assert store.tokens_of(branch) == ids[:length]
    assert fresh.match([*ids[:length], 1, 1]).length == length


def test_unpinning_leaves_what_others_that_are_pinned_stand_on(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model, key_parts={"t": "pins"})
    engine = Engine(model, store)
    system = prompt(64, 14)
    first, second = [*system, *prompt(40, 15)], [*system, *prompt(40, 16)]
    for ids in (first, second):
        engine.turn(ids, reply=1, anchor=64)
        assert store.flush()
    longer = [*first[:103], *prompt(40, 17)]
    engine.turn(longer, reply=1)
    assert store.flush()
    one, two = (conversation(store, ids[:-1]) for ids in (longer, second))
    for name in (one, two):
        store.pin(name)
    store.pin(one, False)
    assert pinned(store, two) == [True, True]
    assert pinned(store, one)[0] and not pinned(store, one)[-1]
    store.pin(two, False)
    assert pinned(store, two) == [False, False]  # the anchor was pinned for them alone
    anchor = one_above(store, two)
    for own_first in (True, False):
        for name in (anchor, two) if own_first else (two, anchor):
            store.pin(name)
        store.pin(two, False)
        assert pinned(store, two) == [True, False]  # its pin is its own, too
        store.pin(anchor, False)
        assert pinned(store, two) == [False, False]


def one_above(store: LineageStore, name: str) -> str:
    """The id of what a conversation goes on from."""
    mid, _, number = name.partition(":")
    (leaf,) = Index(store._front, Names(mid)).segments([int(number)])
    assert leaf is not None
    return f"{mid}:{leaf.parent}"


def pinned(store: LineageStore, name: str) -> list[bool]:
    """Which segments of a conversation's chain are pinned, from the root on."""
    names = Names(name.partition(":")[0])
    index = Index(store._front, names)
    (leaf,) = index.segments([int(name.partition(":")[2])])
    assert leaf is not None
    return [one.pinned for one in [*index.segments([n for n, _ in leaf.up]), leaf] if one]
