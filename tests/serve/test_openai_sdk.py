"""The ``openai`` SDK against a running front: chat, completions, Responses, models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.front import Front

CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
TOOLS: list[Any] = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


@pytest.fixture
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, said: str, **more: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": said}]
    return client.chat.completions.create(model="gpt", messages=messages, **more)


def test_a_chat_completion_has_true_usage(client: openai.OpenAI) -> None:
    said = "say some words"
    chat(client, said)
    again = chat(client, said)
    assert again.choices[0].message.content == "some words"
    assert (again.choices[0].finish_reason, again.model) == ("stop", "gpt")
    assert again.usage.prompt_tokens == 3
    assert again.usage.prompt_tokens_details.cached_tokens == 2
    assert again.pion["tier"] == "memory"


def test_a_chat_stream_has_usage_only_when_asked(client: openai.OpenAI) -> None:
    chunks = list(chat(client, "say a b c", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a b c"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].pion["tier"] == "memory"
    assert {chunk.model for chunk in chunks} == {"gpt"}
    asked = chat(client, "say a b c", stream=True, stream_options={"include_usage": True})
    *_, last = asked
    assert (last.choices, last.usage.completion_tokens) == ([], 3)


@pytest.mark.parametrize("verb", ["call", "parts"])
def test_chat_tool_calls_come_whole_and_in_a_stream(client: openai.OpenAI, verb: str) -> None:
    said = verb + ' look {"a": 1}'
    whole = chat(client, said, tools=CHAT_TOOLS).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls[0].function.name == "look"
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"a": 1}
    parts = [
        part
        for chunk in chat(client, said, tools=CHAT_TOOLS, stream=True)
        for part in chunk.choices[0].delta.tool_calls or []
    ]
    assert parts[0].function.name == "look"
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == {"a": 1}


def test_reasoning_is_kept_apart_from_the_content(client: openai.OpenAI) -> None:
    message = chat(client, "think hm / so").choices[0].message
    assert (message.content, message.reasoning) == ("so", "hm")


def test_log_probabilities_are_asked_of_the_engine_itself(client: openai.OpenAI) -> None:
    assert chat(client, "say x", logprobs=True).logprobs_asked is True


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="gpt", prompt="say a b")
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("a b", "stop")
    chunks = client.completions.create(model="gpt", prompt="cut a b", stream=True)
    texts = [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks]
    assert ("".join(text for text, _ in texts), texts[-1][1]) == ("a b", "length")


def test_a_response(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": "think hm / so it is"}]
    for _ in range(2):
        response = client.responses.create(model="gpt", input=given, instructions="be good")
    assert response.output_text == "so it is"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (response.status, response.model, response.instructions) == (
        *("completed", "gpt", "be good"),
    )
    assert response.usage is not None
    assert response.usage.input_tokens == 8
    assert response.usage.input_tokens_details.cached_tokens == 7


def test_a_streamed_response_is_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="gpt", input="think hm / so it is") as streamed:
        numbers = [event.sequence_number for event in streamed]
        response = streamed.get_final_response()
    assert numbers == list(range(1, len(numbers) + 1))
    assert response.output_text == "so it is"
    assert response.usage is not None
    assert response.usage.output_tokens == 4


def test_function_calls_of_a_response_and_their_outputs(client: openai.OpenAI) -> None:
    said = 'call look {"a": 1} && look {"a": 2}'
    whole = client.responses.create(model="gpt", input=said, tools=TOOLS)
    with client.responses.stream(model="gpt", input=said, tools=TOOLS) as streamed:
        list(streamed)
        again = streamed.get_final_response()
    for response in (whole, again):
        calls: list[Any] = list(response.output)
        assert [call.type for call in calls] == ["function_call"] * 2
        assert [json.loads(call.arguments) for call in calls] == [{"a": 1}, {"a": 2}]
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
        for call in calls
    ]
    given: Any = [
        {"role": "user", "content": said},
        *whole.output,
        *outputs,
        {"role": "user", "content": "echo"},
    ]
    body = json.loads(client.responses.create(model="gpt", input=given, tools=TOOLS).output_text)
    assert [message["role"] for message in body["messages"]] == [
        *("user", "assistant", "tool", "tool", "user")
    ]
    assert len(body["messages"][1]["tool_calls"]) == 2


def test_a_response_that_was_cut_says_so(client: openai.OpenAI) -> None:
    response = client.responses.create(model="gpt", input="cut here", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_responses_answers_without_v1_too(front: Front) -> None:
    status, body = front.request("/responses", {"input": "say hi"})
    assert (status, body["output"][0]["content"][0]["text"]) == (200, "hi")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("org/name").id == "org/name"


def test_refusals_are_the_sdks_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="template says no") as refused:
        chat(client, "refuse 404 the template says no")
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="gpt", input="refuse 429 later")
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="gpt", prompt="refuse 500 broken")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="gpt", input="x", previous_response_id="r")


def test_a_failure_in_a_stream_is_raised(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match="out of memory"):
        list(chat(client, "fail out of memory", stream=True))
    with pytest.raises(openai.APIError, match="out of memory"):
        list(client.responses.create(model="gpt", input="fail out of memory", stream=True))
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        chat(client, "fail out of memory")
