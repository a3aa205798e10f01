"""Every family of models over HTTP: the same tokens as without a cache, and what was reused.

The reply to compare with is computed here, by mlx-lm alone, in one go.  How many tokens went
through the engine's model is counted in its process: those that are said to be reused must
be missing there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import running_server
from tests.real_model import alone, same_tokens
from tests.serve.engines import Engine, Reply, running_engine

pytest.importorskip("mlx_lm")

TEXT = "The quick brown fox jumps over the lazy dog and naps. " * 11
LIMIT = 6
MIN_GAIN = 16
ROWS = ("llama", "gemma3_text", "deepseek_v3", "quantized")
STATES = ("qwen3_5", "mamba", "rwkv7", "falcon_h1")
#: the flags of an engine that quantizes its KV caches, and the same for ``stream_generate``.
QUANTIZED = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
QUANTIZING = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
#: what other splits of a prefill may change of the logits where rows are rounded in between.
ROUNDED = 0.1
SEEDED = {"seed": 5}
CHATS: dict[str, list[dict[str, Any]]] = {
    name: [
        {"role": "system", "content": "You are terse. " * 6},
        {"role": "user", "content": f"{name} asks: what is a prefix? " * 3},
    ]
    for name in ("Ada", "Bob")
}


@dataclass
class Served:
    """An engine, and mlx-lm on the same model."""

    engine: Engine
    model: Any
    tokenizer: Any

    @property
    def quantized(self) -> bool:
        """Whether the engine quantizes its caches; it batches nothing then."""
        return self.engine.model.name == "quantized"

    def check(self, reply: Reply, prompt: list[int]) -> None:
        """That a reply is what mlx-lm answers without any cache."""
        how: dict[str, Any] = QUANTIZING if self.quantized else {}
        expected = alone(self.model, self.tokenizer, prompt, LIMIT, **how)
        same_tokens(reply.tokens, expected, ROUNDED if self.quantized else 0.0)

    def complete(self, text: str, **more: Any) -> Reply:
        """A completion, proved against mlx-lm alone."""
        return self._proved(self.engine.complete(text, LIMIT, **more), self.tokenizer.encode(text))

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> Reply:
        """A turn of a chat, proved against mlx-lm alone."""
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True
        )
        return self._proved(self.engine.chat(messages, LIMIT, **more), list(prompt))

    def _proved(self, reply: Reply, prompt: list[int]) -> Reply:
        self.check(reply, prompt)
        assert reply.prompt == len(prompt)
        assert reply.forward == reply.prompt - reply.cached + reply.usage["completion_tokens"]
        assert reply.receipt["reused_tokens"] == reply.cached
        return reply


@pytest.fixture(scope="module", params=[*ROWS, *STATES])
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    """One engine a family, over a server of its own."""
    from mlx_lm import load

    from tests.serve.tiny_folder import make_folder

    folder, flags = tmp_path_factory.mktemp("engine"), ()
    if request.param == "quantized":
        flags = QUANTIZED
        if "--kv-bits" not in inspect.getsource(importlib.import_module("mlx_lm.server")):
            pytest.skip("this mlx-lm's server quantizes no caches")
    model = make_folder(folder / request.param, "llama" if flags else request.param)
    with running_server(folder / "data") as server:
        store = ("--pion-host", "127.0.0.1", "--pion-port", str(server.port))
        with running_engine(folder, model, *store, flags=flags) as engine:
            yield Served(engine, *load(str(model))[:2])


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
    engine = served.engine
    first = engine.chat(turn, LIMIT, tools=tools)
    again = engine.chat(turn, LIMIT, tools=tools)
    assert (again.text, again.cached) == (first.text, first.prompt - 1)
    longer = [*turn[:2], {"role": "tool", "tool_call_id": "t", "content": "found it, and more"}]
    # The guard lies sixteen tokens before the end of the prompt.
    assert engine.chat(longer, LIMIT, tools=tools).cached >= first.prompt - 16 - 16


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
