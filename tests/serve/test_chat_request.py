"""Chat and completion requests are checked before the engine sees them."""

from __future__ import annotations

from typing import Any

import pytest

from pion_vllm_mlx.serve.api_errors import ApiError
from pion_vllm_mlx.serve.chat_request import chat_body, completion_body, streamed
from pion_vllm_mlx.serve.checks import parse_object
from pion_vllm_mlx.serve.pion_flags import PionFlags, take_pion_flags

Json = dict[str, Any]
HI = {"role": "user", "content": "hi"}
HEADER = "x-anthropic-billing-header: 1"


def called(arguments: Any) -> Json:
    """An assistant's message with one call."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


def test_any_model_name_is_the_one_model() -> None:
    assert chat_body({"model": "gpt-9", "messages": [HI]})["model"] == "default_model"
    assert completion_body({"prompt": "x"})["model"] == "default_model"


@pytest.mark.parametrize(
    ("stop", "words"), [("x", ["x"]), (["x", "y"], ["x", "y"]), ([], []), (None, None)]
)
def test_stop_sequences_are_a_list_for_the_engine(stop: Any, words: Any) -> None:
    assert chat_body({"messages": [HI], "stop": stop}).get("stop") == words
    assert completion_body({"prompt": "x", "stop": stop}).get("stop") == words


@pytest.mark.parametrize("more", [{}, {"max_tokens": None}, {"max_tokens": 9}])
def test_the_newer_name_of_the_limit_is_told_to_the_engine_by_the_older(more: Json) -> None:
    asked = {"max_completion_tokens": 3, **more}
    for body in (chat_body({"messages": [HI], **asked}), completion_body({"prompt": "x", **asked})):
        assert body["max_tokens"] == 3
        assert "max_completion_tokens" not in body
    assert chat_body({"messages": [HI], "max_tokens": 9})["max_tokens"] == 9


def test_system_messages_are_normalized_in_both_forms_and_others_are_not() -> None:
    parts = [{"type": "text", "text": f"{HEADER}\na"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": f"{HEADER}\nbe good"},
        {"role": "developer", "content": parts},
        {"role": "user", "content": HEADER},
    ]
    got = chat_body({"messages": messages})["messages"]
    assert got[0] == {"role": "system", "content": "be good"}
    assert got[1] == {"role": "system", "content": [{"type": "text", "text": "a"}, parts[1]]}
    assert got[2] == messages[2]
    kept = chat_body({"messages": messages}, normalize=False)["messages"]
    assert kept[0] == messages[0]


def test_what_the_engine_knows_passes_through_and_null_means_absent() -> None:
    body = {"messages": [HI], "min_p": 0.1, "seed": 3, "temperature": None}
    assert chat_body(body) == {
        "model": "default_model",
        "messages": [HI],
        "min_p": 0.1,
        "seed": 3,
    }
    assert streamed(body)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "robot"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ({"messages": [{**HI, "tool_calls": [{}]}]}, "tool_calls"),
        ({"messages": [HI], "stream": 1}, "stream"),
        ({"messages": [HI], "stream_options": "x"}, "stream_options"),
        ({"messages": [HI], "n": 2}, "n must be 1"),
        ({"messages": [HI], "max_tokens": True}, "max_tokens must be an integer"),
        ({"messages": [HI], "max_tokens": -1}, "max_tokens must be at least 0"),
        ({"messages": [HI], "stop": 5}, "stop"),
        ({"messages": [HI], "stop": ""}, "stop has an empty string"),
        ({"messages": [HI], "stop": ["x", ""]}, "stop has an empty string"),
        ({"messages": [HI], "tools": "x"}, "tools"),
        ({"messages": [HI], "model": 5}, "model"),
        ({"messages": [HI], "seed": 1 << 70}, "seed"),
        ({"messages": [HI], "seed": "a"}, "seed"),
        ({"messages": [HI], "adapters": "/nowhere"}, "adapters"),
        ({"messages": [HI], "draft_model": "/nowhere"}, "draft_model"),
        ({"messages": [HI], "role_mapping": "x"}, "role_mapping"),
        ({"messages": [HI], "chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"messages": [HI], "chat_template_kwargs": {"tokenize": False}}, "kwargs.tokenize"),
        ({"messages": [HI], "chat_template_kwargs": {"return_dict": True}}, "kwargs.return_dict"),
        ({"messages": [HI], "logprobs": "x"}, "logprobs"),
        ({"messages": [HI], "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [called("{bad")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called("[1]")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called(5)]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called('{"a": "\\ud800"}')]}, "tool_calls[0].function.arguments"),
    ],
)
def test_a_wrong_chat_field_is_refused_by_its_name(body: Json, named: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_body(body)
    assert (refused.value.status, named in refused.value.message) == (400, True)


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": 1}', {"a": 1}, None])
def test_arguments_of_a_call_are_an_object_as_text_or_as_itself(arguments: Any) -> None:
    assert chat_body({"messages": [called(arguments)]})["messages"] == [called(arguments)]


@pytest.mark.parametrize(("given", "sent"), [(-1, (1 << 64) - 1), (0, 0), (1 << 63, 1 << 63)])
def test_a_seed_of_64_bits_with_or_without_a_sign_is_taken(given: int, sent: int) -> None:
    assert chat_body({"messages": [HI], "seed": given})["seed"] == sent


def test_the_loaded_model_s_own_adapter_and_draft_may_be_named() -> None:
    own = {"adapters": None, "draft_model": "default_model", "chat_template_kwargs": {"x": 1}}
    assert chat_body({"messages": [HI], **own})["chat_template_kwargs"] == {"x": 1}


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b'{"prompt": "a\\ud800b"}', "prompt"),
        (b'{"messages": [{"role": "user", "content": "\\uDC00"}]}', "messages[0].content"),
        (b'{"tools": [{"\\ud83d": 1}]}', "tools[0]"),
    ],
)
def test_half_a_character_is_refused_by_its_field(raw: bytes, named: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_object(raw)
    assert (refused.value.status, named in refused.value.message) == (400, True)
    assert parse_object(b'{"prompt": "\\ud83d\\ude00"}')["prompt"] == "\U0001f600"


@pytest.mark.parametrize("prompt", [None, 5, ["a", "b"], [1, 2], "", [""]])
def test_a_prompt_is_one_string(prompt: Any) -> None:
    assert completion_body({"prompt": ["a"]})["prompt"] == "a"
    with pytest.raises(ApiError, match="prompt"):
        completion_body({"prompt": prompt})


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({"top_logprobs": 2}, "^top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "^top_logprobs"),
        ({"top_logprobs": 2, "logprobs": 3}, "^top_logprobs"),
        ({"logprobs": 99}, "^logprobs must be at most 11"),
    ],
)
def test_log_probabilities_of_a_completion_that_it_would_not_get_are_refused_by_name(
    body: Json, refusal: str
) -> None:
    with pytest.raises(ApiError, match=refusal):
        completion_body({"prompt": "a", **body})
    sent = completion_body({"prompt": "a", "logprobs": 11})
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 11)
    assert completion_body({"prompt": "a", "logprobs": True, "top_logprobs": 2})["logprobs"] is True
    assert completion_body({"prompt": "a", "top_logprobs": 0})["prompt"] == "a"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff{}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": 1' + b"0" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_object(raw)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "flags",
    [
        PionFlags(),
        PionFlags(host="::1", port=7, vquant="fp8", budget_gb=0.5, min_gain=0, enabled=False),
        PionFlags(durable_tokens=64, resume=False, budget_gb=0),
    ],
)
def test_the_engine_is_given_the_flags_that_serve_was_given(flags: PionFlags) -> None:
    assert take_pion_flags([*flags.to_arguments(), "--model", "m"]) == (flags, ["--model", "m"])
    assert PionFlags(host="::1").url == "tcp://[::1]:1974"
    assert PionFlags(port=7).url == "tcp://127.0.0.1:7"
    assert PionFlags().url == "embedded:"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
        {"type": "image_url", "image_url": "https://example.com/a.png"},
        {"type": "image", "image": "/etc/passwd"},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"type": "text", "text": "x", "audio_url": {"url": ["data:,"]}},
    ],
)
def test_an_engine_is_not_sent_anywhere_by_a_request(part: Json) -> None:
    body = {"messages": [HI, {"role": "user", "content": [part]}]}
    with pytest.raises(ApiError, match=r"messages\[1\].*data URLs.*--allow-media-urls") as refused:
        chat_body(body)
    assert refused.value.status == 400
    assert chat_body(body, fetch=True)["messages"] == body["messages"]


def test_an_image_in_the_request_itself_goes_through() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}]
    assert chat_body({"messages": messages})["messages"] == messages
