"""The ``anthropic`` SDK against a running front, streaming and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.serve.front import Front

TOOLS: list[Any] = [
    {"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}
]


@pytest.fixture
def client(front: Front) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0) as made:
        yield made


def ask(client: anthropic.Anthropic, said: str, **more: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": said}]
    return client.messages.create(model="claude", max_tokens=50, messages=messages, **more)


def stream(client: anthropic.Anthropic, said: str, **more: Any) -> tuple[list[str], Any]:
    messages: list[Any] = [{"role": "user", "content": said}]
    with client.messages.stream(
        model="claude", max_tokens=50, messages=messages, **more
    ) as streamed:
        kinds = [event.type for event in streamed]
        return kinds, streamed.get_final_message()


def test_a_message_has_text_stop_reason_and_true_usage(client: anthropic.Anthropic) -> None:
    said = "say these are five words"
    first, again = ask(client, said), ask(client, said)
    assert first.content[0].text == "these are five words"
    assert (first.stop_reason, first.model, first.role) == ("end_turn", "claude", "assistant")
    assert (first.usage.input_tokens, first.usage.cache_read_input_tokens) == (5, 0)
    assert (again.usage.input_tokens, again.usage.cache_read_input_tokens) == (1, 4)
    assert again.usage.output_tokens == 4
    assert again.pion["tier"] == "memory"


def test_a_streamed_message_is_the_message(client: anthropic.Anthropic) -> None:
    kinds, message = stream(client, "say streams say the same")
    assert message.content[0].text == "streams say the same"
    assert message.usage.output_tokens == 4
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == 5


def test_thinking_comes_before_the_text_with_a_signature(client: anthropic.Anthropic) -> None:
    for message in (
        ask(client, "think hm well / so it is"),
        stream(client, "think hm well / so it is")[1],
    ):
        thinking, text = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "hm well")
        assert thinking.signature
        assert text.text == "so it is"


@pytest.mark.parametrize("verb", ["call", "parts"])
def test_tool_calls_are_blocks_with_parsed_input(client: anthropic.Anthropic, verb: str) -> None:
    said = f'{verb} look {{"where": "hör", "n": [1, 2]}}'
    for message in (ask(client, said, tools=TOOLS), stream(client, said, tools=TOOLS)[1]):
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        assert (block.type, block.name) == ("tool_use", "look")
        assert block.input == {"where": "hör", "n": [1, 2]}
        assert block.id


def test_a_tool_turn_reaches_the_engine_as_chat_has_it(client: anthropic.Anthropic) -> None:
    first = ask(client, 'call look {"a": 1} && look {"a": 2}', tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "seen"}
        for block in first.content
    ]
    messages: list[Any] = [
        {"role": "user", "content": "call"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "echo"}]},
    ]
    echoed = client.messages.create(model="c", max_tokens=9, messages=messages, tools=TOOLS)
    body = json.loads(echoed.content[0].text)
    assert [message["role"] for message in body["messages"]] == [
        *("user", "assistant", "tool", "tool", "user")
    ]
    calls = body["messages"][1]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}, {"a": 2}]
    assert body["tools"][0]["function"]["name"] == "look"
    assert (body["max_tokens"], body["model"]) == (9, "default_model")


def test_the_token_limit_is_the_stop_reason(client: anthropic.Anthropic) -> None:
    assert ask(client, "cut here").stop_reason == "max_tokens"
    assert stream(client, "cut here")[1].stop_reason == "max_tokens"


def test_tokens_are_counted_without_a_reply(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "one two three"}]
    counted = client.messages.count_tokens(model="c", messages=messages, system="four five")
    assert counted.input_tokens == 5


def test_a_prefill_pings_and_the_reply_follows(client: anthropic.Anthropic, front: Front) -> None:
    assert stream(client, "prefill 3")[1].content[0].text == "done"
    messages: list[Any] = [{"role": "user", "content": "prefill 3"}]
    with client.messages.with_streaming_response.create(
        model="c", max_tokens=9, messages=messages, stream=True
    ) as raw:
        assert raw.read().count(b"event: ping\n") == 3


def test_refusals_are_the_sdks_own_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, "refuse 404 the template says no")
    assert "the template says no" in str(refused.value)
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(anthropic.InternalServerError):
        ask(client, "refuse 500 broken")
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(model="c", max_tokens=9, messages=[])


def test_a_failure_in_a_stream_is_an_error_event(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="out of memory"):
        stream(client, "fail out of memory")
    with pytest.raises(anthropic.InternalServerError, match="out of memory"):
        ask(client, "fail out of memory")


def test_the_models_can_be_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("claude-x").id == "claude-x"
