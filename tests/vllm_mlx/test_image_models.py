"""Models that vllm-mlx runs as multimodal: text requests to them, and what is told of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")
pytest.importorskip("mlx_vlm", reason="mlx_vlm is not installed")

from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    PionPrefixCache,
    install_vllm_mlx_backend,
    installed_caches,
)
from tests.models import tiny_model  # noqa: E402
from tests.serve.front import Front, running_front, until  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

Json = dict[str, Any]
CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
HI = {"messages": [{"role": "user", "content": "hello, all of you who read images"}]}
GREEDY = {"temperature": 0, "max_tokens": 12}
#: one red pixel
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4"
    "z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
#: has a reply be one letter again and again
LETTERS = {"logit_bias": {"90": 100}}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("seeing")
    model = make_folder(folder / "model", "llama")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    spoken = "(message.content if message.content is string else '<image>')"
    settings["chat_template"] = settings["chat_template"].replace("message.content", spoken)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    words = ["--engine", "vllm-mlx", "--model", str(model), "--no-pion", "--mllm"]
    engine = "pion_vllm_mlx.serve.engine_vllm_mlx"
    with running_front(folder, *words, engine=engine) as running:
        yield running


def answer(front: Front, path: str, **asked: Any) -> Json:
    status, body = front.request(path, {**GREEDY, **HI, **asked})
    assert status == 200, body
    return body


def test_stop_sequences_end_the_replies_of_models_that_see(front: Front) -> None:
    whole = answer(front, CHAT, **LETTERS)["choices"][0]
    text = whole["message"]["content"]
    assert len(text) == 12 and len(set(text)) == 1
    stopped = answer(front, CHAT, **LETTERS, stop=["never said", 3 * text[0]])
    assert (stopped["choices"][0]["finish_reason"], stopped["usage"]["completion_tokens"]) == (
        "stop",
        3,
    )
    assert not stopped["choices"][0]["message"]["content"]
    assert answer(front, CHAT, **LETTERS, stop=["never said"])["choices"][0] == whole
    plain = answer(front, MESSAGES)["content"][0]["text"]
    body = answer(front, MESSAGES, stop_sequences=[plain[-1]])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", plain[-1])


def test_tokens_are_counted_and_explained_without_an_answer(front: Front) -> None:
    told = front.request(COUNT, {"model": "m", **HI})
    assert told == (200, {"input_tokens": answer(front, CHAT)["usage"]["prompt_tokens"]})
    status, told = front.request("/v1/pion/explain", HI)
    assert (status, told["sentence"]) == (200, "prompts of image models are not stored")
    seen = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, IMAGE]}]
    status, told = front.request("/v1/pion/explain", {"messages": seen})
    assert status == 400 and "images" in told["error"]["message"]


@pytest.mark.usefixtures("uninstalled")
def test_caches_of_classes_that_are_not_known_stay_vllm_mlxs_own() -> None:
    from mlx_vlm.models.cache import KVCache
    from vllm_mlx import mllm_batch_generator
    from vllm_mlx.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig

    seeing, reading = tiny_model("llama"), tiny_model("llama")
    seeing.make_cache = lambda: [KVCache(), KVCache()]
    config = MemoryCacheConfig(max_memory_mb=1)
    install_vllm_mlx_backend(settings=BackendSettings())
    own = mllm_batch_generator.MemoryAwarePrefixCache(model=seeing, config=config)
    assert type(own) is MemoryAwarePrefixCache
    (beside,) = installed_caches()
    assert beside.model is seeing and "own cache" in beside.pion_stats()["bypass"]
    ours = mllm_batch_generator.MemoryAwarePrefixCache(model=reading, config=config)
    assert isinstance(ours, PionPrefixCache)


def test_a_chat_with_an_image_says_that_it_is_not_stored(front: Front) -> None:
    said = [{"type": "text", "text": "what is on this picture? " * 4}, IMAGE]
    body = {**GREEDY, "messages": [{"role": "user", "content": said}]}
    why = "images are not stored"
    for _ in range(2):
        status, told = front.request(CHAT, body)
        used, receipt = told["usage"], told["pion"]
        assert (status, receipt["why"], receipt["tier"]) == (200, why, "none")
        assert receipt["reused_tokens"] == used["prompt_tokens_details"]["cached_tokens"] == 0
        assert receipt["computed_tokens"] == receipt["prompt_tokens"] == used["prompt_tokens"]
    until(lambda: front.output().count(f'why="{why}"') == 2, "both lines")
    streamed = front.request(CHAT, {**body, "stream": True})[1]["text"]
    assert why in streamed and "pion_prompt" not in streamed
    assert why not in str(answer(front, CHAT))


def test_of_a_text_request_nothing_is_claimed_that_vllm_mlx_does_not_tell(front: Front) -> None:
    """Its own cache serves the second one from memory; nobody is told how much of it."""
    body = {**GREEDY, "messages": [{"role": "user", "content": "what do you see? " * 9}]}
    for _ in range(2):
        status, told = front.request(CHAT, body)
        receipt = told["pion"]
        assert (status, "does not tell" in receipt["why"]) == (200, True)
        names = ("reused_tokens", "computed_tokens", "tier", "saved_ms")
        assert [receipt[name] for name in names] == [None] * 4
        assert receipt["prompt_tokens"] == told["usage"]["prompt_tokens"] > 100
    until(lambda: front.output().count("reused=? computed=? generated=12 ") >= 2, "both lines")
    streamed = front.request(CHAT, {**body, "stream": True})[1]["text"]
    assert "does not tell" in streamed
    assert "does not tell" in str(answer(front, MESSAGES, messages=body["messages"]))
