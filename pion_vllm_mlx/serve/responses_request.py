"""OpenAI Responses requests as chat requests; pure.

``instructions`` and the developer and system items that open the input become the system
message, later ones user text; reasoning items are dropped; images and files become a note.
Nothing is kept between requests, so what refers to an earlier response is refused.
"""

from __future__ import annotations

import json

from pion_vllm_mlx.serve import checks
from pion_vllm_mlx.serve.api_errors import bad_request
from pion_vllm_mlx.serve.chat_request import MODEL
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.conversation import PARAGRAPH, Conversation
from pion_vllm_mlx.serve.normalize import strip_metadata

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def chat_body(body: Json, *, normalize: bool = True) -> Json:
    """The engine's body for a Responses request. Raises ``ApiError`` 400."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise bad_request(f"{name} is not supported: nothing is kept between requests")
    if body.get("background") is True:
        raise bad_request("background is not supported")
    checks.flag(body, "stream")
    checks.optional_text(body, "model")
    conversation = Conversation()
    _add_system(conversation, checks.optional_text(body, "instructions") or "", normalize)
    _add_input(conversation, body.get("input"), normalize)
    if not any(message["role"] != "system" for message in conversation.messages):
        raise bad_request("input must be a string or a list of at least one item")
    out: Json = {"model": MODEL, "messages": conversation.messages}
    limit = checks.count(body, "max_output_tokens")
    if limit is not None:
        out["max_tokens"] = limit
    out |= checks.numbers(body, "temperature", "top_p")
    return out | _tools(body) | _text_format(body) | _reasoning(body)


def _add_system(conversation: Conversation, text: str, normalize: bool) -> None:
    cleaned = strip_metadata(text) if normalize else text
    if cleaned:
        conversation.system(cleaned)


def _add_input(conversation: Conversation, given: object, normalize: bool) -> None:
    if isinstance(given, str):
        conversation.user(given)
        return
    leading = True
    for position, item in enumerate(checks.object_list(given, "input")):
        where = f"input[{position}]."
        role = item.get("role")
        if leading and role in ("system", "developer"):
            _add_system(conversation, _text(item.get("content"), f"{where}content"), normalize)
        else:
            leading = False
            _add_item(conversation, item, where)


def _add_item(conversation: Conversation, item: Json, where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        _add_message(conversation, item, where)
    elif kind == "function_call":
        arguments = checks.text(item, "arguments", where)
        call_id, name = checks.text(item, "call_id", where), checks.text(item, "name", where)
        conversation.call(call_id, name, _call_arguments(arguments))
    elif kind == "function_call_output":
        call_id = checks.text(item, "call_id", where)
        conversation.result(call_id, _text(item.get("output"), f"{where}output"))
    elif kind != "reasoning":
        raise bad_request(f"{where}type {kind!r} is not supported")


def _add_message(conversation: Conversation, item: Json, where: str) -> None:
    role = checks.text(item, "role", where)
    said = _text(item.get("content"), f"{where}content")
    if role == "assistant":
        conversation.assistant(said)
    elif role in ("user", "system", "developer"):
        conversation.user(said)
    else:
        raise bad_request(f"{where}role must be user, assistant, system or developer")


def _call_arguments(text: str) -> str:
    """Templates read arguments as JSON: what is none would fail in the engine, unexplained."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps({"input": text})
    return text


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    return PARAGRAPH.join(_part_text(part, where) for part in checks.object_list(content, where))


def _part_text(part: Json, where: str) -> str:
    kind = checks.text(part, "type", f"{where}[].")
    if kind in _TEXT_PARTS:
        return checks.text(part, "text", f"{where}[].")
    if kind == "refusal":
        return checks.text(part, "refusal", f"{where}[].")
    if kind in ("input_image", "input_file", "input_audio"):
        return f"[{kind.removeprefix('input_')} not shown: this model reads text]"
    raise bad_request(f"{where}: parts of type {kind!r} are not supported")


def _tools(body: Json) -> Json:
    """Function tools in chat's nesting; the hosted ones have no place here."""
    tools = []
    for tool in checks.objects(body, "tools"):
        if tool.get("type") != "function":
            continue
        function: Json = {
            "name": checks.text(tool, "name", "tools[]."),
            "description": checks.optional_text(tool, "description", "tools[].") or "",
            "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
        }
        tools.append({"type": "function", "function": function})
    if not tools:
        return {}
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            return {"tools": tools}
        named = {"name": checks.text(choice, "name", "tool_choice.")}
        return {"tools": tools, "tool_choice": {"type": "function", "function": named}}
    if choice is None:
        return {"tools": tools}
    return {"tools": tools, "tool_choice": checks.text(body, "tool_choice")}


def _text_format(body: Json) -> Json:
    """A wanted JSON schema, as chat's ``response_format``."""
    settings = body.get("text")
    wanted = settings.get("format") if isinstance(settings, dict) else None
    if not isinstance(wanted, dict) or wanted.get("type") in (None, "text"):
        return {}
    if wanted["type"] != "json_schema":
        return {"response_format": {"type": wanted["type"]}}
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _reasoning(body: Json) -> Json:
    settings = body.get("reasoning")
    if isinstance(settings, dict) and settings.get("effort") == "none":
        return {"chat_template_kwargs": {"enable_thinking": False}}
    return {}
