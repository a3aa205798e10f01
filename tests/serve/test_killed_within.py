"""Killed while a request is being served: the engine itself, or the store's server under it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.serve import options
from tests.conftest import RunningServer, running_server
from tests.serve.engines import Engine, running_engine
from tests.serve.front import Front, running_front, until
from tests.serve.served import NO_END, SEEDED, Served, family_folder, store_of

pytest.importorskip("mlx_lm")

TEXT = "A quick brown fox jumps over a lazy dog and naps. " * 11
#: tokens of a reply that is never read to its end, and of one that is.
ENDLESS, LONG, LIMIT = 3_000, 400, 60
FAMILIES = ("llama", "gemma3_text", "qwen3_5")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The server of all engines; a test that kills it starts it again."""
    with running_server(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, store: RunningServer
) -> Iterator[Served]:
    """An engine whose prefills take many steps."""
    from mlx_lm import load

    folder = tmp_path_factory.mktemp("engine")
    model, _ = family_folder(folder, request.param)
    flags = ("--prefill-step-size", "4")
    with running_engine(folder, model, *store_of(store), flags=flags) as engine:
        yield Served(engine, *load(str(model))[:2])


class Reading:
    """A streamed completion that is being read."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.text = ""
        self.finish: str | None = None
        self.receipt: Any = None

    def read(self, chunks: int = 1 << 30) -> Reading:
        """Reads so many chunks, or to the end."""
        seen = 0
        for line in self.answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            self.receipt = chunk.get("pion", self.receipt)
            for choice in chunk["choices"]:
                self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                self.finish = choice["finish_reason"] or self.finish
            seen += 1
            if seen == chunks:
                break
        return self

    def to_where_it_broke_off(self) -> Reading:
        """Reads what there still is of a reply whose server is gone."""
        with contextlib.suppress(http.client.HTTPException, OSError, ValueError):
            self.read()
        return self


@contextlib.contextmanager
def streamed(engine: Engine, prompt: str, limit: int, **more: Any) -> Iterator[Reading]:
    """A streamed completion without an end of its own."""
    body = {"prompt": prompt, "max_tokens": limit, "temperature": 0, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    with engine.open("/v1/completions", {**body, **usage, **NO_END, **more}) as answer:
        yield Reading(answer)


def stored_anew(served: Served, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with another last word, stored as a whole by a server that was gone."""
    words = iter(range(1_000))

    def written() -> int:
        """What of the chat with the next word was stored."""
        word = f"{chat[-1]['content']} {next(words)}"
        asked[:] = [*chat[:-1], {**chat[-1], "content": word}]
        before = int(served.engine.stats().get("written", 0))
        served.chat(asked)
        return int(served.engine.until_stored().get("written", 0)) - before

    asked: list[dict[str, Any]] = []
    until(lambda: written() > 0, "the store is used again", seconds=60)
    assert written() > 0
    return asked


def test_a_batched_reply_that_is_killed_while_it_is_read_is_the_same_again(
    served: Served, store: RunningServer
) -> None:
    engine, text = served.engine, "Read. " + TEXT
    both = engine.model.name == "gemma3_text"
    with streamed(engine, text, ENDLESS) as reading:
        reading.read(20)
        until(lambda: engine.until_stored().get("written"), "the prompt is stored")
        if both:
            store.kill()
        engine.end(signal.SIGKILL)
        assert reading.to_where_it_broke_off().finish is None, "tokens were still being made"
    if both:
        store.start()
    engine.start()
    again = served.complete(text, LIMIT, **NO_END)
    assert again.cached == again.prompt - 1
    assert again.receipt["resumed_tokens"] == 0, "a batched reply has no journal"
    assert again.usage["completion_tokens"] == LIMIT
    same = min(len(again.text), len(reading.text))
    assert same > 10 and again.text[:same] == reading.text[:same]


@pytest.mark.parametrize("more", [{}, SEEDED], ids=["batched", "single"])
def test_a_server_that_is_killed_within_a_reply_costs_the_client_nothing(
    served: Served, store: RunningServer, more: dict[str, Any]
) -> None:
    engine, text = served.engine, f"{len(more)} within. {TEXT}"
    expected = served.said_alone(text, LONG, **NO_END)
    with streamed(engine, text, LONG, **more) as reading:
        before = len(reading.read(20).text)
        store.kill()
        reading.read()
    try:
        assert (reading.finish, reading.text) == ("length", expected)
        assert before < len(expected)
        again = served.complete(text, LIMIT, **NO_END, **more)
        assert (again.cached, again.receipt["tier"]) == (again.prompt - 1, "memory")
        assert served.complete("Other. " + text, LIMIT, **NO_END, **more).cached < 16
    finally:
        store.start()


def test_a_server_that_is_killed_within_a_prefill_costs_the_client_nothing(
    served: Served, store: RunningServer
) -> None:
    """What is before the anchor is stored, or on its way, while the rest is computed."""
    engine = served.engine
    chat = [
        {"role": "system", "content": "You answer in one short sentence. " * 20},
        {"role": "user", "content": TEXT * 2},
    ]
    before = engine.forward
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.chat, chat)
        until(lambda: engine.forward - before >= 500, "the prefill is under way")
        store.kill()
        try:
            assert engine.forward - before < 1_500, "and was not over when the server was gone"
            reply = asked.result(120)
            assert reply.cached < 16 and reply.prompt > 1_700
            assert served.chat(chat).cached == reply.prompt - 1
        finally:
            store.start()
    found = stored_anew(served, chat)
    engine.restart()
    again = served.chat(found)
    assert again.cached == again.prompt - 1


def test_a_serve_that_is_killed_while_a_client_reads_says_the_same_again(tmp_path: Path) -> None:
    """The front and its engine at once, over the embedded server that they started."""
    from mlx_lm import load

    model, _ = family_folder(tmp_path, "llama")
    messages = [
        {"role": "system", "content": "You are terse. " * 6},
        {"role": "user", "content": "What is a prefix? " * 20},
    ]
    body = {"messages": messages, "temperature": 0, **NO_END}
    flags, engine = ("--model", str(model)), options.ENGINES["mlx-lm"].module
    with running_front(tmp_path, *flags, engine=engine) as front:
        raw = json.dumps({**body, "max_tokens": ENDLESS, "stream": True}).encode()
        asked = urllib.request.Request(
            f"{front.url}/v1/chat/completions", raw, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            reading = Reading(answer).read(20)
            until(lambda: is_stored(front), "the prompt is stored")
            for pid in (front.pid, front.engine_pids()[-1]):
                os.kill(pid, signal.SIGKILL)
            assert reading.to_where_it_broke_off().finish is None, "tokens were still being made"
        front.process.wait(timeout=30)
    with running_front(tmp_path, *flags, engine=engine) as front:
        status, again = front.request("/v1/chat/completions", {**body, "max_tokens": LIMIT})
    assert status == 200, again
    loaded, tokenizer = load(str(model))[:2]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    said = again["choices"][0]["message"]["content"]
    served = Served(None, loaded, tokenizer)  # type: ignore[arg-type]  # nothing is asked of it
    assert said == served.said_alone(prompt, LIMIT, **NO_END)
    usage = again["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    assert again["pion"]["computed_tokens"] == 1


def is_stored(front: Front) -> bool:
    stats = front.request("/v1/pion/stats")[1]
    return bool(stats.get("written")) and not stats["waiting"]
