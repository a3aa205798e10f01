"""``--pion-attend``: a served reply is the one that mlx-lm gives, its system part attended away."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server
from tests.serve.engines import Engine, Reply, running_engine

pytest.importorskip("mlx_lm")

LIMIT = 6
TERSE = {"role": "system", "content": "You are terse, and you know the whole manual. " * 8}


@dataclass
class Served:
    """An engine with the flag, its store, and mlx-lm on the same model."""

    engine: Engine
    store: RunningServer
    model: Any
    tokenizer: Any

    @property
    def whole(self) -> int:
        """Layers that see all tokens; the windows of the others soon leave the system part."""
        return {"llama": 2, "gemma3_text": 1}[self.engine.model.name]

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> Reply:
        """A turn, proved against mlx-lm alone."""
        from mlx_lm import stream_generate

        reply = self.engine.chat(messages, LIMIT, **more)
        prompt = self.prompt(messages)
        alone = stream_generate(self.model, self.tokenizer, prompt, max_tokens=LIMIT)
        assert reply.tokens == [one.token for one in alone]
        assert reply.prompt == len(prompt)
        return reply

    def attended(self) -> int:
        """How many attentions were computed at the store."""
        stats = self.engine.stats()
        assert "attended_in_process" not in stats
        return int(stats.get("attended_binary", 0)) + int(stats.get("attended_resp", 0))


def flags(store: RunningServer) -> tuple[str, ...]:
    return ("--pion-host", "127.0.0.1", "--pion-port", str(store.port), "--pion-attend")


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    from mlx_lm import load

    from tests.serve.tiny_folder import make_folder

    folder = tmp_path_factory.mktemp("attending")
    model = make_folder(folder / request.param, request.param)
    with running_server(folder / "data") as store:
        with running_engine(folder, model, *flags(store)) as engine:
            yield Served(engine, store, *load(str(model))[:2])


def only_system(cached: int, content: str = TERSE["content"]) -> bool:
    """Whether so many tokens are those of the system part, and none behind it."""
    return len(content) <= cached <= len("<|im_start|>system..") + len(content)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def until_attended(served: Served) -> None:
    """Right replies until the store, which is asked again after a moment, is used again."""
    before = served.attended()
    for attempt in range(50):
        served.chat([TERSE, user(f"Is it back? {attempt}")])
        if served.attended() > before:
            return
        time.sleep(0.1)
    raise AssertionError("the store is not used again")


@pytest.mark.parametrize("more", [{}, {"seed": 5}], ids=["plain", "seeded"])
def test_a_reply_is_the_unpatched_one_and_its_system_part_was_attended_at_the_store(
    served: Served, more: dict[str, Any]
) -> None:
    system = {**TERSE, "content": f"{sorted(more)} {TERSE['content']}"}
    first = served.chat([system, user("What is a prefix?")], **more)
    assert first.cached == 0 and first.forward >= first.prompt  # who stores it computes it
    before = served.attended()
    reply = served.chat([system, user("And a suffix?")], **more)
    assert reply.cached >= len(system["content"])
    # not one token of the system part went through the model
    assert reply.forward == reply.prompt - reply.cached + reply.usage["completion_tokens"]
    assert served.attended() - before >= served.whole * reply.usage["completion_tokens"]


def test_a_conversation_goes_on_in_this_process_and_a_turn_may_be_asked_again(
    served: Served,
) -> None:
    chat = [TERSE, user("First question of many.")]
    before = 0
    for turn in range(3):
        reply = served.chat(chat)
        if turn:
            assert reply.cached >= before
        before = reply.prompt
        chat += [{"role": "assistant", "content": f"Answer {turn}."}, user("And then?")]
    again = served.chat(chat[:-2])
    assert again.cached == again.prompt - 1
    other = served.chat([TERSE, user("First quarrel.")])
    assert other.cached >= len(TERSE["content"])


def test_another_process_finds_the_system_prompt_and_computes_none_of_it(
    served: Served, tmp_path: Path
) -> None:
    served.chat([TERSE, user("Here it is stored.")])
    with running_engine(tmp_path, served.engine.model, *flags(served.store)) as other:
        there = Served(other, served.store, served.model, served.tokenizer)
        reply = there.chat([TERSE, user("Never asked before.")])
        assert only_system(reply.cached)
        computed = reply.prompt - reply.cached + reply.usage["completion_tokens"]
        # a new cache may be tried out with a few tokens
        assert computed <= reply.forward < computed + 8
        assert there.attended() >= served.whole * reply.usage["completion_tokens"]


def test_there_is_nothing_to_explain_and_that_is_said(served: Served) -> None:
    status, told = served.engine.request("/v1/pion/explain", {})
    assert status == 200 and "--pion-attend" in told["sentence"]


def test_what_has_no_system_part_is_served_as_ever(served: Served) -> None:
    before = served.attended()
    reply = served.chat([user("Nobody told me anything.")])
    assert reply.cached == 0
    assert served.attended() == before
    text = "Nor here. " * 9
    assert served.engine.complete(text, LIMIT).cached == 0
    assert served.engine.complete(text, LIMIT).cached == len(text) - 1


def test_a_conversation_without_a_system_part_is_reused_as_without_the_flag(
    served: Served, tmp_path: Path
) -> None:
    chat = [user("Nobody told me what to be. " * 6)]
    with running_engine(tmp_path, served.engine.model, "--no-pion") as plain:
        for turn in range(4):
            one = served.chat(chat)
            other = plain.chat(chat, LIMIT)
            assert one.text == other.text
            if turn:  # the first begins as another test's chats may have
                assert one.cached == other.cached > 0 and one.forward == other.forward
            chat += [{"role": "assistant", "content": f"Answer {turn}."}, user("And then?")]


@pytest.mark.parametrize(
    ("family", "why"), [("mamba", "ArraysCache"), ("deepseek_v3", "keys of")]
)
def test_a_model_that_cannot_be_attended_is_refused_at_the_start(
    served: Served, tmp_path: Path, family: str, why: str
) -> None:
    from tests.serve.tiny_folder import make_folder

    folder = make_folder(tmp_path / family, family)
    with pytest.raises(RuntimeError, match="--pion-attend does not go with this model") as refused:
        with running_engine(tmp_path, folder, *flags(served.store)):
            pass
    assert why in str(refused.value) and "Traceback" not in str(refused.value)


def test_a_store_that_was_killed_costs_a_prefill_and_no_reply(served: Served) -> None:
    served.chat([TERSE, user("While it lives.")])
    served.store.kill()
    try:
        # the live caches' prefix is out of reach, and said so: the reply is computed whole
        reply = served.chat([TERSE, user("While it is gone.")])
        assert reply.cached == 0 and reply.forward >= reply.prompt
        assert served.engine.stats()["not_attended"] >= 1
    finally:
        served.store.start()
    until_attended(served)


def test_a_store_that_is_killed_within_a_reply_ends_it_with_an_error(served: Served) -> None:
    body = {
        "messages": [TERSE, user("Tell me everything.")],
        "max_tokens": 4000,
        "stream": True,
        "temperature": 0,
        "logit_bias": {"0": -100.0},
    }
    with served.engine.open("/v1/chat/completions", body) as answer:
        while b"delta" not in answer.readline():
            pass  # comments while the prompt is computed
        served.store.kill()
        try:
            with contextlib.suppress(http.client.HTTPException, OSError):
                rest = b""
                while line := answer.readline():
                    rest += line
        finally:
            served.store.start()
    assert b"[DONE]" not in rest and b'"finish_reason": "' not in rest
    error = json.loads(rest.rpartition(b"data: ")[2])["error"]
    assert "cannot go on" in error["message"] and error["code"] == 503
    assert "Traceback" not in served.engine.output()
    until_attended(served)
