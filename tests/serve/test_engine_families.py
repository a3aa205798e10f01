"""Every family of models over HTTP: the same tokens as without a cache, and what was reused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.engines import Reply
from tests.serve.served import LIMIT, ROWS, SEEDED, STATES, Served, serving

pytest.importorskip("mlx_lm")

TEXT = "The quick brown fox jumps over the lazy dog and naps. " * 11
MIN_GAIN = 16
CHATS: dict[str, list[dict[str, Any]]] = {
    name: [
        {"role": "system", "content": "You are terse. " * 6},
        {"role": "user", "content": f"{name} asks: what is a prefix? " * 3},
    ]
    for name in ("Ada", "Bob")
}


@pytest.fixture(scope="module", params=[*ROWS, *STATES])
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    """One engine a family, over a server of its own."""
    with serving(tmp_path_factory.mktemp("engine"), request.param) as running:
        yield running


def rows_anywhere(served: Served) -> bool:
    """Whether the family can be cut at every token."""
    return served.engine.model.name in ROWS


@pytest.mark.parametrize("more", [{}, SEEDED], ids=["batched", "single"])
def test_what_is_reused_is_not_computed_and_the_reply_is_the_same(
    served: Served, more: dict[str, Any]
) -> None:
    text = ("Single. " if more else "Batched. ") + TEXT
    complete = functools.partial(served.complete, **more)
    size = len(text)
    assert complete(text).cached < 64
    assert complete(text).cached == size - 1
    assert complete(text + "More.").cached >= size - 1
    edited = text[:300] + "#" + text[301:]
    middle = complete(edited)
    assert middle.cached == (300 if rows_anywhere(served) else 0)
    assert complete(edited).cached == size - 1
    # The point of divergence has a state now, where one is needed.
    assert complete(text[:300] + "?" + text[301:]).cached == 300
    assert complete(text).cached == size - 1


@pytest.mark.parametrize("more", [{}, SEEDED], ids=["batched", "single"])
def test_interleaved_conversations_and_a_regenerated_turn(
    served: Served, more: dict[str, Any]
) -> None:
    ada, bob = (
        [{"role": "system", "content": f"{sorted(more)} {chat[0]['content']}"}, *chat[1:]]
        for chat in CHATS.values()
    )
    before: dict[int, int] = {}
    for turn in range(3):
        for index, chat in enumerate((ada, bob)):
            reply = served.chat(chat, **more)
            if turn:
                assert reply.cached >= before[index] - 1
            elif index:  # the system prompt is another conversation's
                assert reply.cached >= 90
            before[index] = reply.prompt
            chat.append({"role": "assistant", "content": f"Answer {turn}."})
            chat.append({"role": "user", "content": "And then?" if index else "Why?"})
    last = served.chat(ada[:-2], **more)
    assert last.cached == last.prompt - 1


def test_a_tool_turn_is_cut_and_kept_too(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"function": {"name": "look", "arguments": "{}"}, "type": "function", "id": "t"}
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "Look for it everywhere. " * 14},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "found it"},
    ]
    first = served.chat(turn, tools)
    assert first.cached < 64
    assert served.chat(turn, tools).cached == first.prompt - 1
    longer = [*turn[:2], {"role": "tool", "tool_call_id": "t", "content": "found it, and more"}]
    # The guard lies sixteen tokens before the end of the prompt.
    assert served.chat(longer, tools).cached >= first.prompt - 16 - 16


def test_prompts_of_different_lengths_at_once_get_what_each_would_get_alone(
    served: Served,
) -> None:
    """Some recurrent models would compute the padding of the shorter ones into their state."""
    texts = [f"{number}{number} at once. " + TEXT[: 40 + 83 * number] for number in range(6)]
    with ThreadPoolExecutor(len(texts)) as pool:
        at_once = list(pool.map(lambda text: served.engine.complete(text, LIMIT), texts))
    for text, reply in zip(texts, at_once, strict=True):
        served.check(reply, served.tokenizer.encode(text))
    assert all(reply.cached < 16 for reply in at_once)


def test_eight_clients_at_once_compute_what_is_new_and_get_what_each_would_get_alone(
    served: Served,
) -> None:
    engine = served.engine
    texts = [f"Eight. {TEXT[:200]}Client {n} asks. " + "So it is. " * n for n in range(8)]

    def at_once() -> tuple[list[Reply], int]:
        """Their replies, and how many tokens the model saw for all."""
        before = engine.forward
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda text: engine.complete(text, LIMIT), texts))
        for text, reply in zip(texts, replies, strict=True):
            served.check(reply, served.tokenizer.encode(text))
        return replies, engine.forward - before

    at_once()
    again, seen = at_once()
    assert [reply.cached for reply in again] == [reply.prompt - 1 for reply in again]
    made = sum(reply.usage["completion_tokens"] for reply in again)
    assert seen == len(texts) + made
    engine.until_stored()
    engine.restart()
    found, seen = at_once()
    # what another client has had restored is not read once more for a few tokens
    assert all(reply.cached >= reply.prompt - 1 - MIN_GAIN for reply in found)
    computed = sum(reply.prompt - reply.cached for reply in found)
    # prompts in one step are padded to the longest of them
    assert computed + made <= seen <= computed + made + len(texts) * MIN_GAIN


def test_an_engine_that_was_killed_finds_everything_again(served: Served) -> None:
    engine = served.engine
    text = "Killed. " + TEXT
    served.complete(text)
    chat = CHATS["Ada"]
    prompt = served.chat(chat).prompt
    engine.until_stored()
    engine.restart()
    found = served.complete(text)
    assert found.cached == len(text) - 1
    assert found.receipt["tier"] in ("memory", "mapped", "stored")
    assert served.chat(chat).cached == prompt - 1
    more = served.complete(text + " And on.", **SEEDED)
    assert more.cached >= len(text) - 1
    told = engine.stats()
    assert told["restores"] + told.get("read_ahead", 0) >= 2


def test_a_request_has_one_line_in_the_log(served: Served) -> None:
    engine = served.engine
    before = engine.output().count("\n")
    served.complete("One line. " + TEXT)
    lines = engine.output().splitlines()[before:]
    assert len(lines) == 1
    assert "0 reused" in lines[0] or "reused from" in lines[0]
    assert f"prompt of {len('One line. ' + TEXT)} tokens" in lines[0]
