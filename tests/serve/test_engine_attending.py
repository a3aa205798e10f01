"""``--pion-attend``: a served reply is the one that mlx-lm gives, its system part attended away."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.errors import StoreUnavailable
from tests.conftest import RunningServer, running_server
from tests.serve.engines import Engine, Reply, running_engine

pytest.importorskip("mlx_lm")

LIMIT = 6
#: a random model would end its reply somewhere, or have it taken for thoughts or a call of a tool.
NO_END = {str(token): -100.0 for token in (*range(7), *range(101, 263))}
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


@pytest.mark.parametrize(
    "more",
    [{}, {"seed": 7, "temperature": 1.0}, {"repetition_penalty": 1.5}],
    ids=["greedy", "drawn", "penalized"],
)
def test_a_reply_goes_on_when_the_store_is_killed_within_it(
    served: Served, more: dict[str, Any]
) -> None:
    limit = 400
    body = {
        "messages": [TERSE, user(f"Tell me everything. {sorted(more)}")],
        "max_tokens": limit,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "logit_bias": NO_END,
        **more,
    }
    whole, usage = said(served, body)
    assert usage["completion_tokens"] == limit
    again, usage = said(served, body)
    assert again == whole and usage["prompt_tokens_details"]["cached_tokens"] > 0
    before = served.engine.stats()["not_attended"]
    try:
        again, usage = said(served, body, after=limit // 10, then=served.store.kill)
    finally:
        served.store.restart()
    assert again == whole and usage["completion_tokens"] == limit
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0  # all was computed in the end
    assert served.engine.stats()["not_attended"] == before + 1
    until_attended(served)


def said(
    served: Served, body: dict[str, Any], after: int = 0, then: Callable[[], None] | None = None
) -> tuple[str, dict[str, Any]]:
    """The text of a stream, and its usage; ``then`` is called after so many parts of it."""
    text, usage, parts = "", {}, 0
    with served.engine.open("/v1/chat/completions", body) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                parts += 1
            if then is not None and parts >= after:
                then()
                then = None
    assert then is None
    return text, usage


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_that_cannot_go_on_says_why(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    from pion_vllm_mlx.serve import engine_mlx_lm_http

    def broken(self: Any, request: Any, stop_words: list[str]) -> None:
        self._headers_buffer = [b"HTTP/1.1 200 OK"]
        raise StoreUnavailable("the layer is gone")

    monkeypatch.setattr(engine_mlx_lm_http.server.APIHandler, "handle_completion", broken)
    monkeypatch.setattr(engine_mlx_lm_http.Handler, "_set_cors_headers", lambda self: None)
    handler = object.__new__(engine_mlx_lm_http.Handler)
    vars(handler).update(
        stream=stream, wfile=io.BytesIO(), request_version="HTTP/1.1", close_connection=False,
        protocol_version="HTTP/1.1", requestline="POST /",
    )  # fmt: skip
    handler.handle_completion(None, [])
    told = handler.wfile.getvalue()
    assert told.startswith(b"data: {" if stream else b"HTTP/1.1 503") and b"200 OK" not in told
    error = json.loads(told[told.index(b'{"error"') :])["error"]
    assert error == {"message": "the reply cannot go on: the layer is gone", "code": 503}
