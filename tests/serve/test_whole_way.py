"""The whole way on a real model: the front over a tiny random model, in two engines.

One is mlx-lm's own server, the other ours over it.

What a random model says is noise, so these tests compare APIs with each other: the same prompt
through each of them is the same prompt to the model.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pion_vllm_mlx.serve import options
from tests.serve.front import Front, running_front, until

pytest.importorskip("mlx_lm")

SYSTEM, SAID = "Be good and brief.", "What is a prefix?"
MESSAGES: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SAID}]
USER: list[Any] = MESSAGES[1:]
HEADER = "x-anthropic-billing-header: cc_version=2.0; nonce="
LIMIT = 24


ENGINES = ("tests.serve.stock_engine", options.ENGINES["mlx-lm"].module)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    from tests.serve.tiny_folder import make_folder

    return make_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module", params=ENGINES)
def running(
    tmp_path_factory: pytest.TempPathFactory, model: Path, request: pytest.FixtureRequest
) -> Iterator[Front]:
    """A front over each engine."""
    folder = tmp_path_factory.mktemp("front")
    with running_front(folder, "--model", str(model), engine=request.param) as front:
        yield front


@pytest.fixture
def gpt(running: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(running: Front) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0) as client:
        yield client


def chat(gpt: openai.OpenAI, **more: Any) -> Any:
    return gpt.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=LIMIT, temperature=0, **more
    )


def test_every_api_says_the_same_streaming_and_not(
    gpt: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    said = chat(gpt).choices[0].message.content
    chunks = chat(gpt, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    asked: dict[str, Any] = {
        "model": "any",
        "system": SYSTEM,
        "messages": USER,
        "max_tokens": LIMIT,
    }
    message: Any = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed_message = stream.get_final_text()
    given: dict[str, Any] = {
        "model": "any",
        "instructions": SYSTEM,
        "input": SAID,
        "max_output_tokens": LIMIT,
        "temperature": 0,
    }
    response = gpt.responses.create(**given)
    with gpt.responses.stream(**given) as events:
        streamed_response = events.get_final_response()
    assert said
    assert {
        said,
        streamed,
        message.content[0].text,
        streamed_message,
        response.output_text,
        streamed_response.output_text,
    } == {said}
    assert message.stop_reason == "max_tokens"
    assert response.status == "incomplete"


def test_a_text_completion_says_the_same_streaming_and_not(gpt: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "prompt": "Once upon a time. " * 9}
    asked |= {"max_tokens": LIMIT, "temperature": 0}
    first, again = (gpt.completions.create(**asked) for _ in range(2))
    assert first.choices[0].text
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    chunks = list(
        gpt.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    )
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == first.choices[0].text
    used = [chunk.usage for chunk in chunks if chunk.usage][-1]
    assert used.prompt_tokens_details.cached_tokens == used.prompt_tokens - 1


def test_usage_is_the_same_count_in_every_api(
    gpt: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    chat(gpt)
    usage = chat(gpt).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    used = claude.messages.create(model="any", system=SYSTEM, messages=USER, max_tokens=LIMIT).usage
    assert (used.input_tokens, used.cache_read_input_tokens) == (1, usage.prompt_tokens - 1)
    assert used.output_tokens == usage.completion_tokens
    counted = claude.messages.count_tokens(model="any", system=SYSTEM, messages=USER)
    assert counted.input_tokens == usage.prompt_tokens


def test_a_nonce_in_the_billing_header_does_not_cost_the_prefix(
    claude: anthropic.Anthropic,
) -> None:
    def reused(nonce: str) -> int | None:
        system: Any = [
            {"type": "text", "text": HEADER + nonce},
            {"type": "text", "text": "Another system prompt."},
        ]
        used = claude.messages.create(model="any", system=system, messages=USER, max_tokens=1).usage
        prompts.add(used.input_tokens + (used.cache_read_input_tokens or 0))
        return used.cache_read_input_tokens

    prompts: set[int] = set()
    reused("one")
    assert reused("two") == max(prompts) - 1
    assert len(prompts) == 1


def test_a_prompt_that_the_template_refuses_is_a_400(running: Front) -> None:
    status, body = running.request("/v1/chat/completions", {"messages": [*MESSAGES, MESSAGES[0]]})
    assert status == 400
    assert "the system message must be first" in body["error"]["message"]


def test_wrong_sampling_settings_are_a_400(running: Front) -> None:
    for wrong in ({"temperature": "hot"}, {"temperature": -1}, {"top_p": 2}, {"max_tokens": 0}):
        status, body = running.request("/v1/chat/completions", {"messages": MESSAGES, **wrong})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_log_probabilities_come_with_a_whole_reply(running: Front, gpt: openai.OpenAI) -> None:
    line = re.compile(rf"reused=\d+ computed=\d+ generated={LIMIT} ")
    before = len(line.findall(running.output()))
    whole = chat(gpt, logprobs=True)
    assert (len(whole.choices[0].logprobs.content), whole.model) == (LIMIT, "any")
    until(lambda: len(line.findall(running.output())) > before, "its line")


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_text_completion_counts_the_log_probabilities_beside_its_own(
    running: Front, number: int
) -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": LIMIT, "temperature": 0}
    status, body = running.request("/v1/completions", {**asked, "logprobs": number})
    told = body["choices"][0]["logprobs"]["content"]
    assert (status, len(told)) == (200, LIMIT)
    assert [len(one.get("top_logprobs", ())) for one in told] == [number] * LIMIT
    for wrong in (-1, "x", 1.5):
        status, body = running.request("/v1/completions", {**asked, "logprobs": wrong})
        assert (status, "logprobs" in body["error"]["message"]) == (400, True)


def test_a_tool_turn_is_the_same_prompt_in_every_api(
    gpt: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    function = {"name": "look", "description": "", "parameters": schema}
    call = {"name": "look", "arguments": '{"a": 1}'}
    asked = gpt.chat.completions.create(
        model="any",
        max_tokens=1,
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        messages=[
            *USER,
            {
                "role": "assistant",
                "content": "so",
                "tool_calls": [{"id": "t", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "t", "content": "x"},
        ],
    )
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    turn: list[Any] = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "so"}, use]},
        {"role": "user", "content": [result]},
    ]
    tools: list[Any] = [{"name": "look", "input_schema": schema}]
    used = claude.messages.create(model="any", max_tokens=1, messages=turn, tools=tools).usage
    given: list[Any] = [
        *USER,
        {"type": "message", "role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "t", **call},
        {"type": "function_call_output", "call_id": "t", "output": "x"},
    ]
    flat: list[Any] = [{"type": "function", **function}]
    response = gpt.responses.create(model="any", input=given, tools=flat, max_output_tokens=1)
    assert asked.usage is not None
    assert response.usage is not None
    # All but the last token was in the cache: not only as long, but the same.
    reused = asked.usage.prompt_tokens - 1
    assert used.cache_read_input_tokens == reused
    assert response.usage.input_tokens_details.cached_tokens == reused


def test_a_conversation_outlives_a_kill_of_front_and_engine(tmp_path: Path, model: Path) -> None:
    messages = [{"role": "system", "content": SYSTEM * 10}, *USER]
    asked = {"messages": messages, "max_tokens": LIMIT, "temperature": 0}

    def ask(front: Front) -> Any:
        status, body = front.request("/v1/chat/completions", asked)
        assert status == 200, body
        return body

    def stored(front: Front) -> bool:
        stats = front.request("/v1/pion/stats")[1]
        return bool(stats.get("written")) and not stats["waiting"]

    flags, engine = ("--model", str(model)), ENGINES[1]
    with running_front(tmp_path, *flags, engine=engine) as front:
        first = ask(front)
        until(lambda: stored(front), "the prompt in the store")
        os.kill(front.pid, signal.SIGKILL)
        front.process.wait(timeout=30)
    with running_front(tmp_path, *flags, engine=engine) as front:
        again = ask(front)
    assert again["choices"] == first["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    reused = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused == again["usage"]["prompt_tokens"] - 1
    assert again["pion"]["tier"] in ("memory", "mapped", "stored")
