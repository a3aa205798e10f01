"""Messages requests become chat requests by the rules of the module's docstring."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pion_vllm_mlx.serve.anthropic_request import chat_body
from pion_vllm_mlx.serve.api_errors import ApiError

Json = dict[str, Any]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
HEADER = "x-anthropic-billing-header: cc_version=1; nonce=8f3a"


def text(said: str) -> Json:
    return {"type": "text", "text": said}


def ask(*messages: tuple[str, Any], **more: Any) -> Json:
    listed = [{"role": role, "content": content} for role, content in messages]
    return {"model": "claude", "max_tokens": 9, "messages": listed, **more}


def translated(*messages: tuple[str, Any], **more: Any) -> list[Json]:
    result: list[Json] = chat_body(ask(*messages, **more))["messages"]
    return result


def test_system_blocks_are_joined_by_a_blank_line() -> None:
    system = [text("be good"), {**text("be brief"), "cache_control": {"type": "ephemeral"}}]
    assert translated(("user", "hi"), system=system) == [
        {"role": "system", "content": "be good\n\nbe brief"},
        {"role": "user", "content": "hi"},
    ]


def test_billing_headers_go_block_by_block_and_nothing_else_does() -> None:
    system = [text(HEADER), text(f"a\n{HEADER}\nb {HEADER}\n"), text("c\r\n")]
    assert translated(("user", "hi"), system=system)[0]["content"] == f"a\nb {HEADER}\n\n\nc\r\n"
    assert translated(("user", "hi"), system=HEADER) == [{"role": "user", "content": "hi"}]


def test_two_sessions_with_other_headers_send_the_same_prompt() -> None:
    one = ask(("user", "hi"), system=[text(HEADER), text("be good")])
    other = ask(("user", "hi"), system=[text(HEADER + "0"), text("be good")])
    assert chat_body(one) == chat_body(other)
    assert chat_body(one, normalize=False) != chat_body(other, normalize=False)


def test_a_header_in_a_users_text_is_left_alone() -> None:
    assert translated(("user", HEADER)) == [{"role": "user", "content": HEADER}]


def test_consecutive_user_texts_are_one_message() -> None:
    assert translated(("user", [text("a"), text("b")]), ("user", "c"), ("system", "d")) == [
        {"role": "user", "content": "a\n\nb\n\nc\n\nd"}
    ]


def test_a_tool_turn_keeps_its_order_and_its_ids() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"where": "hör"}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [text("x"), IMAGE]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
        text("go on"),
    ]
    got = translated(
        ("user", "hi"),
        ("assistant", [{"type": "thinking", "thinking": "…", "signature": "s"}, text("ok"), use]),
        ("user", results),
    )
    function = {"name": "look", "arguments": json.dumps({"where": "hör"}, ensure_ascii=False)}
    calls = [{"id": "t1", "type": "function", "function": function}]
    assert got == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok", "tool_calls": calls},
        {
            "role": "tool",
            "tool_call_id": "t1",
            "content": "x\n\n[image/png not shown: this model reads text]",
        },
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "go on"},
    ]


def test_a_thinking_block_leaves_no_trace() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "…"}
    with_it = translated(("user", "a"), ("assistant", [thinking, redacted, text("b")]))
    assert with_it == translated(("user", "a"), ("assistant", "b"))


def test_tools_without_a_schema_are_dropped() -> None:
    schema = {"type": "object", "properties": {}}
    tools = [
        {"name": "look", "description": "looks", "input_schema": schema},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    body = chat_body(ask(("user", "hi"), tools=tools, tool_choice={"type": "any"}))
    function = {"name": "look", "description": "looks", "parameters": schema}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == "required"
    assert "tools" not in chat_body(ask(("user", "hi"), tools=tools[1:]))


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_a_tool_choice_keeps_its_meaning(choice: Json, chat: Any) -> None:
    tools = [{"name": "f", "input_schema": {}}]
    assert chat_body(ask(("user", "hi"), tools=tools, tool_choice=choice))["tool_choice"] == chat


def test_sampling_settings_arrive_under_chats_names() -> None:
    body = chat_body(
        ask(("user", "hi"), temperature=0.5, top_p=1, top_k=3, stop_sequences=["x"], stream=True)
    )
    assert body["stop"] == ["x"]
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "max_tokens")} == {
        "temperature": 0.5,
        "top_p": 1,
        "top_k": 3,
        "max_tokens": 9,
    }


@pytest.mark.parametrize(("kind", "enabled"), [("enabled", True), ("disabled", False)])
def test_thinking_is_passed_to_the_template(kind: str, enabled: bool) -> None:
    body = chat_body(ask(("user", "hi"), thinking={"type": kind, "budget_tokens": 1024}))
    assert body["chat_template_kwargs"] == {"enable_thinking": enabled}


def test_the_last_turn_of_a_model_that_has_not_begun_may_be_empty() -> None:
    sent = chat_body(ask(("user", "hi"), ("assistant", [])))["messages"]
    assert sent == [{"role": "user", "content": "hi"}]
    with pytest.raises(ApiError, match="messages.1.content"):
        chat_body(ask(("user", "hi"), ("assistant", []), ("user", "go on")))


def test_counting_needs_no_limit() -> None:
    body = ask(("user", "hi"))
    del body["max_tokens"]
    assert "max_tokens" not in chat_body(body, counting=True)
    with pytest.raises(ApiError, match="max_tokens"):
        chat_body(body)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "video"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "text"}]}, "system.text"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"input_schema": {}}]}, "tools.name"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences must be a list of strings"),
        ({"stop_sequences": ""}, "stop_sequences must be a list of strings"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences has an empty string"),
        ({"stream": "yes"}, "stream"),
        ({"model": 5}, "model"),
        ({"thinking": True}, "thinking"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(change: Json, named: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_body({**ask(("user", "hi")), **change})
    assert refused.value.status == 400
    assert named in refused.value.message
