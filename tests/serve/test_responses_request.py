"""Responses requests become chat requests by the rules of the module's docstring."""

from __future__ import annotations

from typing import Any

import pytest

from pion_vllm_mlx.serve.api_errors import ApiError
from pion_vllm_mlx.serve.responses_request import chat_body

Json = dict[str, Any]
HEADER = "x-anthropic-billing-header: 1"


def said(role: str, *texts: str) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "role": role, "content": parts}


def call(call_id: str, name: str = "look", arguments: str = "{}") -> Json:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def result(call_id: str, output: Any) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def translated(given: Any, **more: Any) -> list[Json]:
    messages: list[Json] = chat_body({"input": given, **more})["messages"]
    return messages


def test_a_string_is_what_the_user_says() -> None:
    assert translated("hi") == [{"role": "user", "content": "hi"}]


def test_leading_system_items_join_the_instructions_and_later_ones_are_user_text() -> None:
    given = [
        said("developer", "b"),
        {"role": "system", "content": "c"},
        said("user", "hi"),
        said("developer", "d"),
        said("assistant", "ok"),
        said("system", "e"),
    ]
    assert translated(given, instructions=f"{HEADER}\na") == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "hi\n\nd"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "e"},
    ]


def test_consecutive_calls_share_the_turn_in_which_the_model_spoke() -> None:
    given = [
        said("user", "hi"),
        {"type": "reasoning", "id": "r", "summary": []},
        said("assistant", "well"),
        call("c1", arguments='{"a": 1}'),
        {"type": "reasoning", "id": "r2", "summary": []},
        call("c2"),
        result("c1", "one"),
        result("c2", [{"type": "input_text", "text": "two"}, {"type": "input_image"}]),
        call("c3"),
        result("c3", ""),
    ]
    got = translated(given)
    assert [message["role"] for message in got] == [
        *("user", "assistant", "tool", "tool", "assistant", "tool")
    ]
    assert got[1]["content"] == "well"
    assert [entry["id"] for entry in got[1]["tool_calls"]] == ["c1", "c2"]
    assert got[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    assert got[3] == {
        "role": "tool",
        "tool_call_id": "c2",
        "content": "two\n\n[image not shown: this model reads text]",
    }
    assert [entry["id"] for entry in got[4]["tool_calls"]] == ["c3"]


def test_arguments_that_are_no_json_still_reach_the_template_as_json() -> None:
    got = translated([said("user", "hi"), call("c", arguments="{broken")])
    assert got[1]["tool_calls"][0]["function"]["arguments"] == '{"input": "{broken"}'


def test_tools_are_nested_as_chat_has_them_and_hosted_ones_dropped() -> None:
    flat = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
    body = chat_body(
        {
            "input": "hi",
            "tools": [flat, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "f"},
            "max_output_tokens": 7,
            "temperature": 0,
            "reasoning": {"effort": "none"},
        }
    )
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (body["max_tokens"], body["temperature"]) == (7, 0)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_wanted_schema_becomes_the_response_format() -> None:
    wanted = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = chat_body({"input": "hi", "text": {"format": wanted}})
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert body["response_format"] == {"type": "json_schema", "json_schema": schema}


@pytest.mark.parametrize("stop", ["", "x", ["x"], 5])
def test_fields_that_the_api_does_not_have_change_nothing(stop: Any) -> None:
    assert chat_body({"input": "hi", "stop": stop}) == chat_body({"input": "hi"})


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "clip"}]}]}, "clip"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "arguments"),
        ({"input": "hi", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "instructions": 5}, "instructions"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[].name"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(body: Json, named: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_body(body)
    assert refused.value.status == 400
    assert named in refused.value.message
