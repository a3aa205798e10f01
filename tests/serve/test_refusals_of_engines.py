"""What an engine would ignore, or say in its own words, is said in the front's; replies' ends."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from pion_vllm_mlx.serve import chat_request, options
from pion_vllm_mlx.serve.anthropic_reply import AnthropicReply
from pion_vllm_mlx.serve.api_errors import ApiError, from_engine
from pion_vllm_mlx.serve.engine_client import error_text
from tests.serve.front import Front, running_front, until

pytest.importorskip("mlx_lm")

from pion_vllm_mlx.serve.engine_mlx_lm_replies import FollowedReply, refuse_left  # noqa: E402

Json = dict[str, Any]
HI = {"role": "user", "content": "echo"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"response_format": 5}, "response_format"),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}},
            "response_format",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}},
            "tool_choice",
        ),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, "best_of"),
    ],
)
def test_what_the_engine_would_ignore_is_refused_by_its_name(
    front: Front, path: str, more: Json, named: str
) -> None:
    status, body = front.request(path, {"messages": [HI], **more})
    assert (status, named in body["error"]["message"]) == (400, True)


def test_an_engine_that_can_force_a_tool_is_asked_to() -> None:
    assert options.ENGINES["vllm-mlx"].steers
    assert not options.ENGINES["mlx-lm"].steers


def test_tools_that_must_not_be_called_are_not_shown_to_the_model(front: Front) -> None:
    asked = {"messages": [HI], "tools": [TOOL]}
    shown = {}
    for choice in ("auto", "none"):
        status, body = front.request("/v1/chat/completions", {**asked, "tool_choice": choice})
        assert status == 200
        shown[choice] = json.loads(body["choices"][0]["message"]["content"])
    assert shown["auto"]["tools"] == [TOOL]
    assert not {"tools", "tool_choice"} & set(shown["none"])
    assert chat_request.chosen_tools({"tool_choice": "auto", "tools": []})["tools"] == []


def test_a_field_that_an_engine_refuses_is_a_400_and_named_without_jargon() -> None:
    wrong = {"type": "x", "loc": ["body", "tools", 0, "function"], "msg": "Field required"}
    told = error_text(json.dumps({"detail": [wrong, {**wrong, "loc": ["body"]}]}).encode())
    assert told == "tools.0.function: Field required; Field required"
    assert from_engine(422, told).status == 400


def test_a_stop_sequence_that_ended_a_reply_is_its_stop_reason() -> None:
    def told(**ending: Any) -> tuple[Json, Json]:
        reply = AnthropicReply("m")
        events = reply.feed({"choices": [{"delta": {"content": "Hi"}}]})
        events += reply.feed({"choices": [{"delta": {}, **ending}]})
        events += reply.end()
        (delta,) = (
            json.loads(event.encode().partition(b"data: ")[2])["delta"]
            for event in events
            if b"message_delta" in event.encode()
        )
        return delta, reply.whole()

    for one in told(finish_reason="stop", stop_reason="END"):
        assert (one["stop_reason"], one["stop_sequence"]) == ("stop_sequence", "END")
    for one in told(finish_reason="stop"):
        assert (one["stop_reason"], one["stop_sequence"]) == ("end_turn", None)


class _Response:
    def __init__(self, token: int, reason: str | None = None) -> None:
        self.token, self.finish_reason = token, reason


def test_a_reply_ends_when_its_client_has_left_though_nothing_was_written() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            reply = FollowedReply([], ours).follow((_Response(1) for _ in range(3)), None)
            next(reply)
            refuse_left(None)
        with pytest.raises(ConnectionError):
            next(reply)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "m", "--pion-host", "127.0.0.1:1974"], "--pion-port"),
        (["--model", "m", "--pion-host", "a b"], "--pion-host"),
        (["--model", "/no/such/model"], "no such folder"),
        (["--engine", "vllm-mlx", "/no/such/model"], "no such folder"),
    ],
)
def test_a_wrong_place_is_a_sentence_at_the_start(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(words)
    assert (ended.value.code, reason in capsys.readouterr().err) == (2, True)


def test_flags_that_the_engine_refuses_are_told_to_whoever_has_it_loaded(tmp_path: Any) -> None:
    flags = ("--unload-after", "60", "--fail-to-start", "2")
    with running_front(tmp_path, *flags, healthy=False) as front:
        until(lambda: front.request("/health")[0] == 200, "the front")
        status, body = front.request("/v1/chat/completions", {"messages": [HI]})
    assert (status, "flags" in body["error"]["message"]) == (502, True)


def test_what_only_samples_refuses_forms_and_forced_tools() -> None:
    for fine in ({}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}}):
        chat_request.check_steering(fine)
    with pytest.raises(ApiError):
        chat_request.check_steering({"tool_choice": {"type": "function"}})
