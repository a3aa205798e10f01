"""A tool call that a model says, in every API, through an engine's own parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.serve.front import running_front
from tests.serve.tiny_folder import make_folder

ARGUMENTS = {"city": "Paris", "days": 3}
SAYS = "I look.<tool_call>" + json.dumps({"name": "look", "arguments": ARGUMENTS}) + "</tool_call>"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
USER = [{"role": "user", "content": "How is the weather there?"}]


def prove_tool_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str, *words: str
) -> None:
    """Asks a serve over an engine whose model says ``SAYS``."""
    model = make_folder(folder / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["tool_parser_type"] = "json_tools"  # mlx-lm knows real templates by their words
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, value in (("MODEL", str(model)), ("SAYS", SAYS), ("ENGINE", engine)):
        monkeypatch.setenv(f"PION_TEST_{name}", value)
    flags = ("--model", str(model), *words)
    with running_front(folder, *flags, engine="tests.serve.steered") as front:
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as gpt:
            for _ in range(2):  # computed, and reused
                _chats(gpt)
        with anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0) as claude:
            _messages(claude)


def _chats(gpt: openai.OpenAI) -> None:
    function = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
    asked: dict[str, object] = {"model": "m", "messages": USER, "max_tokens": 200}
    asked["tools"] = [{"type": "function", "function": function}]
    whole = gpt.chat.completions.create(**asked).choices[0]  # type: ignore[call-overload]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I look.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", ARGUMENTS)
    with gpt.chat.completions.stream(**asked) as streamed:  # type: ignore[arg-type]
        for _ in streamed:
            pass
        last = streamed.get_final_completion().choices[0]
    (call,) = last.message.tool_calls or ()
    assert (last.finish_reason, last.message.content) == ("tool_calls", "I look.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", ARGUMENTS)
    tool = {"type": "function", **function}
    given: dict[str, Any] = {"model": "m", "input": "And there?", "tools": [tool]}
    told = gpt.responses.create(**given)
    with gpt.responses.stream(**given) as events:
        for _ in events:
            pass
        streamed_response = events.get_final_response()
    for response in (told, streamed_response):
        (called,) = [one for one in response.output if one.type == "function_call"]
        assert (called.name, json.loads(called.arguments)) == ("look", ARGUMENTS)
        assert response.output_text == "I look."


def _messages(claude: anthropic.Anthropic) -> None:
    tools = [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}]
    asked: dict[str, object] = {"model": "m", "messages": USER, "max_tokens": 200, "tools": tools}
    whole = claude.messages.create(**asked)  # type: ignore[call-overload]
    with claude.messages.stream(**asked) as streamed:  # type: ignore[arg-type]
        last = streamed.get_final_message()
    for message in (whole, last):
        text, use = message.content
        assert (message.stop_reason, text.text) == ("tool_use", "I look.")
        assert (use.name, use.input) == ("look", ARGUMENTS)
