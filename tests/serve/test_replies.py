"""Chat chunks become each API's events; what a stream says and what a body says agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pion_vllm_mlx.serve.anthropic_reply import AnthropicReply
from pion_vllm_mlx.serve.api_errors import ApiError, from_engine
from pion_vllm_mlx.serve.chat_reply import ChatReply, CompletionReply
from pion_vllm_mlx.serve.pieces import ChatReader, Reasoning, Text, ToolCall, object_json
from pion_vllm_mlx.serve.reply import Reply
from pion_vllm_mlx.serve.responses_reply import ResponsesReply
from pion_vllm_mlx.serve.sse import Decoder, Event

Json = dict[str, Any]
RECEIPT = {"tier": "mapped", "tokens_reused": 30}


def delta(reason: str | None = None, **fields: Any) -> Json:
    choice = {"index": 0, "delta": {"role": "assistant", **fields}, "finish_reason": reason}
    return {"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def usage(prompt: int = 40, cached: int = 30, completion: int = 5, **more: Any) -> Json:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    used = {"prompt_tokens": prompt, "completion_tokens": completion, **details}
    return {"id": "c1", "choices": [], "usage": used, **more}


def call(index: int, name: str | None, arguments: str | None, call_id: str | None = None) -> Json:
    function = {"name": name, "arguments": arguments}
    given = {key: value for key, value in function.items() if value is not None}
    return {"index": index, "type": "function", "function": given} | (
        {"id": call_id} if call_id else {}
    )


# As mlx-lm's server sends them: calls whole, reasoning in ``reasoning``, usage apart.
MLX_LM = [
    delta(reasoning="let me "),
    delta(reasoning="see", content="I "),
    delta(content="look"),
    delta(tool_calls=[call(0, "f", '{"a": 1}', "c0")]),
    delta(tool_calls=[call(1, "g", "{}", "c1")]),
    delta("tool_calls"),
    usage(pion=RECEIPT),
]
# As vllm-mlx does: calls in parts, ``reasoning_content``, usage in the last chunk.
VLLM_MLX = [
    delta(),
    delta(reasoning_content="let me see"),
    delta(content="I look"),
    delta(tool_calls=[call(0, "f", "", "c0")]),
    delta(tool_calls=[call(0, None, '{"a"')]),
    delta(tool_calls=[call(0, None, ": 1}")]),
    delta(tool_calls=[call(1, "g", None, "c1")]),
    {**delta("tool_calls"), "usage": usage()["usage"], "pion": RECEIPT},
]
BOTH = pytest.mark.parametrize("chunks", [MLX_LM, VLLM_MLX], ids=["mlx-lm", "vllm-mlx"])


def events(chunks: list[Json], reply: Reply) -> list[Event]:
    """All the events of a reply that is told by ``chunks``."""
    fed = (event for chunk in chunks for event in reply.feed(chunk))
    return [*reply.start(), *fed, *reply.end()]


def told(chunks: list[Json], reply: Reply) -> list[Json]:
    """The events' data, JSON on the wire and named as their type where they have a name."""
    found = []
    for event in events(chunks, reply):
        assert isinstance(event.data, dict)
        assert event.name is None or event.name == event.data["type"]
        found.append(json.loads(event.encode().decode().partition("data: ")[2]))
    return found


@BOTH
def test_pieces_are_the_same_for_both_engines(chunks: list[Json]) -> None:
    reader = ChatReader()
    pieces = [piece for chunk in chunks for piece in reader.feed(chunk)]
    pieces += reader.flush()
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == "let me see"
    assert "".join(piece.text for piece in pieces if isinstance(piece, Text)) == "I look"
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert calls == [ToolCall("c0", "f", '{"a": 1}'), ToolCall("c1", "g", "{}")]
    outcome = reader.outcome
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (40, 30, 5)
    assert (outcome.finish_reason, outcome.receipt) == ("tool_calls", RECEIPT)


@BOTH
def test_a_reply_has_begun_when_something_of_it_has_come(chunks: list[Json]) -> None:
    for chunk in (delta(), delta("stop"), usage()):  # a role, an end, a usage
        reader = ChatReader()
        list(reader.feed(chunk))
        assert not reader.outcome.begun
    for chunk in chunks[-4:-2]:  # calls, whole or in parts
        reader = ChatReader()
        list(reader.feed(chunk))
        assert reader.outcome.begun


def test_anthropics_sequence() -> None:
    got = told(MLX_LM, AnthropicReply("claude"))
    kinds = [
        (event["type"], event.get("delta", event.get("content_block", {})).get("type"))
        for event in got
    ]
    assert kinds == [
        ("message_start", None),
        ("content_block_start", "thinking"),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", "text"),
        ("content_block_delta", "text_delta"),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", None),
        ("content_block_start", "tool_use"),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", None),
        ("content_block_start", "tool_use"),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", None),
        ("message_delta", None),
        ("message_stop", None),
    ]
    indexes = [event["index"] for event in got if "index" in event]
    assert indexes == sorted(indexes)
    assert set(indexes) == {0, 1, 2, 3}
    assert got[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert got[-2]["usage"] == {
        "input_tokens": 10,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 30,
        "output_tokens": 5,
    }
    assert got[-2]["pion"] == RECEIPT
    assert got[11]["delta"]["partial_json"] == '{"a": 1}'


def begun(prompt: int = 40, cached: int = 30) -> Json:
    """The first chunk of an engine of ours, which says what usage will say of the prompt."""
    return {**delta(), "pion_prompt": {"prompt_tokens": prompt, "cached_tokens": cached}}


def test_anthropics_first_event_says_how_much_of_the_prompt_was_read_from_the_cache() -> None:
    reply = AnthropicReply("claude")
    assert reply.start() == []  # nobody knows it yet: pings, until the engine says so
    (first,) = [event.data for event in reply.feed(begun())]
    assert isinstance(first, dict) and first["type"] == "message_start"
    assert first["message"]["usage"] == {
        "input_tokens": 10,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 30,
        "output_tokens": 0,
    }
    rest = [event.data for chunk in MLX_LM for event in reply.feed(chunk)]
    assert "message_start" not in [one["type"] for one in rest if isinstance(one, dict)]


@BOTH
def test_anthropics_first_event_comes_first_whatever_the_engine_says(chunks: list[Json]) -> None:
    for some in (chunks, [begun(), *chunks], chunks[-2:], [delta(tool_calls=[call(0, "f", "{}")])]):
        kinds = [event["type"] for event in told(some, AnthropicReply("claude"))]
        assert kinds[0] == "message_start" and kinds.count("message_start") == 1


def test_what_the_engine_tells_the_front_alone_goes_no_further() -> None:
    for reply in (ChatReply("m"), CompletionReply("m")):
        got = events([begun(), *MLX_LM], reply)
        assert all("pion_prompt" not in one.data for one in got if isinstance(one.data, dict))


@BOTH
def test_anthropics_body_says_what_its_stream_said(chunks: list[Json]) -> None:
    reply = AnthropicReply("claude")
    got = told(chunks, reply)
    blocks: list[Json] = []
    for event in got:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            kind = event["delta"].pop("type")
            (field, value), *_ = event["delta"].items()
            if kind == "input_json_delta":
                blocks[-1]["input"] = json.loads(value)
            else:
                blocks[-1][field] += value
    whole = reply.whole()
    assert whole["content"] == blocks
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"] == got[-2]["usage"]
    assert got[0]["message"]["usage"]["output_tokens"] == 0
    assert whole["id"] == got[0]["message"]["id"]


def test_responses_sequence_is_numbered_from_one() -> None:
    got = told(MLX_LM, ResponsesReply("gpt", {"temperature": 0.5}))
    assert [event["sequence_number"] for event in got] == list(range(1, len(got) + 1))
    assert [event["type"].removeprefix("response.") for event in got] == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    response = got[-1]["response"]
    assert response["usage"] == {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 30},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 45,
    }
    assert (response["temperature"], response["pion"]) == (0.5, RECEIPT)
    assert {event["response"]["id"] for event in got if "response" in event} == {response["id"]}


@BOTH
def test_a_responses_items_are_done_as_they_stand_in_the_response(chunks: list[Json]) -> None:
    reply = ResponsesReply("gpt", {})
    got = told(chunks, reply)
    done = [event["item"] for event in got if event["type"].endswith("output_item.done")]
    added = [event["item"] for event in got if event["type"].endswith("output_item.added")]
    response = got[-1]["response"]
    assert response == json.loads(json.dumps(reply.whole()))
    assert response["output"] == done
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert [item["status"] for item in done] == ["completed"] * 4
    assert done[1]["content"][0]["text"] == "I look"
    assert done[2]["arguments"] == '{"a": 1}'
    for event in got:
        if "output_index" in event and "item_id" in event:
            assert done[event["output_index"]]["id"] == event["item_id"]


def test_a_reply_that_was_cut_says_so_everywhere() -> None:
    cut = [delta(content="so far"), delta("length"), usage()]
    chat, anthropic, responses = ChatReply("m"), AnthropicReply("m"), ResponsesReply("m", {})
    for reply in (chat, anthropic, responses):
        events(cut, reply)
    assert chat.whole()["choices"][0]["finish_reason"] == "length"
    assert anthropic.whole()["stop_reason"] == "max_tokens"
    whole = responses.whole()
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert whole["output"][0]["status"] == "incomplete"


def test_a_cut_in_a_tool_turn_is_a_cut() -> None:
    reply = AnthropicReply("m")
    events([delta(tool_calls=[call(0, "f", "{}")]), delta("length")], reply)
    assert reply.whole()["stop_reason"] == "max_tokens"


def test_a_tool_call_outweighs_an_engine_that_calls_it_stop() -> None:
    reply = AnthropicReply("m")
    list(events([delta(tool_calls=[call(0, "f", "{}")]), delta("stop")], reply))
    assert reply.whole()["stop_reason"] == "tool_use"


def test_an_empty_reply_is_a_whole_one() -> None:
    nothing = [delta("stop"), usage(completion=0)]
    assert [event["type"] for event in told(nothing, AnthropicReply("m"))] == [
        *("message_start", "message_delta", "message_stop")
    ]
    assert [event["type"] for event in told(nothing, ResponsesReply("m", {}))] == [
        *("response.created", "response.in_progress", "response.completed")
    ]
    chat = ChatReply("m")
    list(events(nothing, chat))
    assert chat.whole()["choices"][0]["message"]["content"] == ""
    chat = ChatReply("m")
    list(events([delta(tool_calls=[call(0, "f", "{}")]), delta("tool_calls")], chat))
    assert chat.whole()["choices"][0]["message"]["content"] is None


def test_text_between_tool_calls_keeps_its_place() -> None:
    chunks = [
        delta(tool_calls=[call(0, "f", "{}")]),
        delta(content="and"),
        delta(tool_calls=[call(1, "g", "{}")]),
        delta("tool_calls"),
    ]
    reply = AnthropicReply("m")
    list(events(chunks, reply))
    assert [block["type"] for block in reply.whole()["content"]] == [
        *("tool_use", "text", "tool_use")
    ]


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("", {}),
        ("  ", {}),
        ('{"a": [1]}', {"a": [1]}),
        ("[1]", {"input": [1]}),
        ("5", {"input": 5}),
        ("{broken", {"input": "{broken"}),
        ("[" * 100_000, {"input": "[" * 100_000}),
    ],
)
def test_arguments_are_an_object_whatever_the_model_wrote(written: str, kept: Json) -> None:
    assert json.loads(object_json(written)) == kept


def test_a_chat_stream_passes_chunks_on_under_the_clients_name_for_the_model() -> None:
    got = list(events(MLX_LM, ChatReply("gpt-9", include_usage=True)))
    assert got[-1].encode() == b"data: [DONE]\n\n"
    data = [event.data for event in got[:-1]]
    assert data == [
        {**chunk, "object": "chat.completion.chunk", "model": "gpt-9"} for chunk in MLX_LM
    ]


def test_without_include_usage_the_receipt_moves_to_the_last_chunk() -> None:
    got = list(events(MLX_LM, ChatReply("gpt-9")))
    last = got[-2].data
    assert isinstance(last, dict)
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert last["pion"] == RECEIPT
    assert not [
        event for event in got if isinstance(event.data, dict) and not event.data["choices"]
    ]


def test_a_chat_body_has_what_its_stream_had() -> None:
    reply = ChatReply("gpt-9")
    list(events(VLLM_MLX, reply))
    whole = reply.whole()
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("I look", "let me see")
    assert [entry["function"]["name"] for entry in message["tool_calls"]] == ["f", "g"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 30}
    assert (whole["id"], whole["model"], whole["pion"]) == ("c1", "gpt-9", RECEIPT)


def test_a_completion_is_text() -> None:
    chunks = [
        {"id": "c1", "choices": [{"index": 0, "text": "a", "finish_reason": None}]},
        {"id": "c1", "choices": [{"index": 0, "text": "b", "finish_reason": "length"}]},
        usage(),
    ]
    reply = CompletionReply("m")
    got = list(events(chunks, reply))
    assert [
        event.data["choices"][0]["text"] for event in got[:-1] if isinstance(event.data, dict)
    ] == [*("a", "b")]
    assert reply.whole()["choices"][0] == {
        "index": 0,
        "text": "ab",
        "finish_reason": "length",
        "logprobs": None,
    }


@pytest.mark.parametrize(
    "make",
    [ChatReply, CompletionReply, AnthropicReply, lambda model: ResponsesReply(model, {})],
)
def test_a_failure_ends_a_stream_in_its_apis_words(make: Callable[[str], Reply]) -> None:
    reply = make("m")
    reply.start()
    reply.feed(delta(content="so far"))
    data = [event.data for event in reply.failure(ApiError(502, "gone", "engine_gone"))]
    last = data[-1]
    assert isinstance(last, dict)
    assert last["error"]["message"] == "gone"
    assert not any(isinstance(one, dict) and one.get("type") == "message_stop" for one in data)


def test_an_engines_error_keeps_its_status_but_for_its_own_key_and_a_refused_prompt() -> None:
    assert [from_engine(status, "x").status for status in (400, 404, 401, 429, 500, 503, 200)] == [
        *(400, 400, 502, 429, 500, 503, 502)
    ]


def test_the_decoder_takes_events_cut_anywhere() -> None:
    stream = b': keepalive 1/2\n\ndata: {"a": "h\xc3\xb6r"}\r\n\r\ndata:[DONE]\n\n'
    whole = list(Decoder().feed(stream))
    assert whole == [None, '{"a": "hör"}', "[DONE]"]
    decoder = Decoder()
    assert [one for byte in stream for one in decoder.feed(bytes([byte]))] == whole


def test_no_output_can_break_the_framing() -> None:
    text = "a\n\ndata: [DONE]\n\n\r\u2028\x00\ud800"
    encoded = Event({"text": text}).encode()
    assert encoded.count(b"\n") == 2
    assert json.loads(next(iter(Decoder().feed(encoded))) or "") == {"text": text}
