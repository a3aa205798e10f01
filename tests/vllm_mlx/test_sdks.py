"""The ``openai`` and ``anthropic`` SDKs against serve over vllm-mlx, endpoint by endpoint.

The model is a random one: it says something, and the same thing every time. What it would
need to have learned, tool calls and thinking, is said by the scripted engine in ``tests/serve``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

from tests.serve.front import Front, running_front  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

LIMIT = 5
SYSTEM = "You answer in one word. " * 12
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
TOOLS: list[Any] = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """serve --engine vllm-mlx with a store."""
    folder = tmp_path_factory.mktemp("sdks")
    model = make_folder(folder / "model", "llama")
    words = ["--engine", "vllm-mlx", "--model", str(model)]
    with running_front(folder, *words, engine="pion_vllm_mlx.serve.engine_vllm_mlx") as running:
        yield running


@pytest.fixture
def gpt(front: Front) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(front: Front) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0) as made:
        yield made


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


@pytest.mark.parametrize("tools", [None, CHAT_TOOLS], ids=["plain", "tools"])
def test_chat_completions(gpt: Any, tools: list[Any] | None) -> None:
    asked = {"model": "gpt", "messages": said(f"chat {tools}"), "max_tokens": LIMIT}
    asked |= {"temperature": 0} | ({"tools": tools} if tools else {})
    first, again = (gpt.chat.completions.create(**asked) for _ in range(2))
    assert again.choices[0].message.content == first.choices[0].message.content
    assert (again.model, again.usage.completion_tokens) == ("gpt", LIMIT)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.pion["reused_tokens"] == again.usage.prompt_tokens - 1
    chunks = list(
        gpt.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert all("pion_prompt" not in (chunk.model_extra or {}) for chunk in chunks)
    told = [chunk for chunk in chunks if chunk.choices]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in told)
    assert text == (first.choices[0].message.content or "")
    usage = [chunk.usage for chunk in chunks if chunk.usage][-1]
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_completions(gpt: Any) -> None:
    asked = {"model": "gpt", "prompt": "Once upon a time. " * 9, "max_tokens": LIMIT}
    asked["temperature"] = 0
    first, again = (gpt.completions.create(**asked) for _ in range(2))
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    chunks = gpt.completions.create(stream=True, **asked)
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == first.choices[0].text


def test_responses(gpt: Any) -> None:
    asked = {"model": "gpt", "input": "respond", "instructions": SYSTEM, "temperature": 0}
    asked["max_output_tokens"] = LIMIT
    first, again = (gpt.responses.create(**asked) for _ in range(2))
    assert (again.output_text, again.model) == (first.output_text, "gpt")
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1
    with gpt.responses.stream(**asked) as streamed:
        numbers = [event.sequence_number for event in streamed]
        response = streamed.get_final_response()
    assert numbers == list(range(1, len(numbers) + 1))
    assert response.output_text == first.output_text
    assert response.usage.input_tokens_details.cached_tokens == response.usage.input_tokens - 1


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_messages(claude: Any, tools: list[Any] | None) -> None:
    asked: dict[str, Any] = {"model": "claude", "system": SYSTEM}
    asked |= {"messages": said(f"message {tools}")[1:]} | ({"tools": tools} if tools else {})
    # newer SDKs have no temperature of their own
    reply = {"max_tokens": LIMIT, "extra_body": {"temperature": 0}}
    first, again = (claude.messages.create(**asked, **reply) for _ in range(2))
    assert [block.text for block in again.content] == [block.text for block in first.content]
    used = again.usage
    assert (used.input_tokens, used.output_tokens) == (1, LIMIT)
    assert claude.messages.count_tokens(**asked).input_tokens == used.cache_read_input_tokens + 1
    begun = []
    with claude.messages.stream(**asked, **reply) as streamed:
        for event in streamed:
            if event.type == "message_start":
                begun.append(event.message.usage.model_copy())
        message = streamed.get_final_message()
    assert [(one.input_tokens, one.cache_read_input_tokens) for one in begun] == [
        (1, used.cache_read_input_tokens)
    ]
    assert [block.text for block in message.content] == [block.text for block in first.content]
    assert message.usage.cache_read_input_tokens == used.cache_read_input_tokens


def test_models_and_refusals(gpt: Any, claude: Any) -> None:
    assert len(list(gpt.models.list())) == len(list(claude.models.list())) == 1
    with pytest.raises(openai.BadRequestError, match="data URLs"):
        image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret.png"}}
        gpt.chat.completions.create(model="g", messages=[{"role": "user", "content": [image]}])
    with pytest.raises(openai.BadRequestError):
        gpt.chat.completions.create(model="g", messages=[{"role": "robot", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        claude.messages.create(model="c", max_tokens=9, messages=[])
