"""Anthropic Messages requests as chat requests; pure.

System blocks are joined by a blank line; a tool_result becomes a ``tool`` message; images and
documents become a note, thinking blocks and tools without ``input_schema`` are dropped.
"""

from __future__ import annotations

import json

from pion_vllm_mlx.serve import checks
from pion_vllm_mlx.serve.api_errors import bad_request
from pion_vllm_mlx.serve.chat_request import MODEL
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.conversation import PARAGRAPH, Conversation
from pion_vllm_mlx.serve.normalize import strip_metadata


def chat_body(body: Json, *, normalize: bool = True, counting: bool = False) -> Json:
    """The engine's body for a Messages request. Raises ``ApiError`` 400.

    ``counting``: for ``count_tokens``, which has no ``max_tokens``.
    """
    limit = checks.count(body, "max_tokens")
    if limit is None and not counting:
        raise bad_request("max_tokens: Field required")
    checks.flag(body, "stream")
    checks.optional_text(body, "model")
    conversation = Conversation()
    system = _system_text(body.get("system"), normalize)
    if system:
        conversation.system(system)
    messages = checks.objects(body, "messages")
    if not messages:
        raise bad_request("messages: at least one message is required")
    for position, message in enumerate(messages):
        last = position == len(messages) - 1
        if message.get("content") == [] and not (last and message.get("role") == "assistant"):
            raise bad_request(f"messages.{position}.content: at least one block is required")
        _add_message(conversation, message, f"messages.{position}.")
    if all(message["role"] == "system" for message in conversation.messages):
        raise bad_request("messages: at least one message with content is required")
    out: Json = {"model": MODEL, "messages": conversation.messages}
    if limit is not None:
        out["max_tokens"] = limit
    out |= checks.numbers(body, "temperature", "top_p", "top_k")
    stop = checks.stops(body, "stop_sequences")
    if stop:
        out["stop"] = stop
    return out | _tools(body) | _thinking(body)


def _system_text(system: object, normalize: bool) -> str:
    if system is None:
        return ""
    if isinstance(system, str):
        texts = [system]
    else:
        blocks = checks.object_list(system, "system")
        texts = [checks.text(block, "text", "system.") for block in blocks]
    # Block by block: what is nothing but metadata leaves no blank line behind.
    stripped = [strip_metadata(text) if normalize else text for text in texts]
    return PARAGRAPH.join(text for text in stripped if text)


def _add_message(conversation: Conversation, message: Json, where: str) -> None:
    role = checks.text(message, "role", where)
    content = message.get("content")
    if isinstance(content, str):
        blocks: list[Json] = [{"type": "text", "text": content}]
    else:
        blocks = checks.object_list(content, f"{where}content")
    if role == "assistant":
        _add_assistant(conversation, blocks, where)
    elif role in ("user", "system"):  # a later system message is what the user's side says
        _add_user(conversation, blocks, where)
    else:
        raise bad_request(f"{where}role must be user or assistant")


def _add_user(conversation: Conversation, blocks: list[Json], where: str) -> None:
    for block in blocks:
        if block.get("type") == "tool_result":
            call_id = checks.text(block, "tool_use_id", where)
            said = _plain_text(block.get("content"), where)
            prefix = "Error: " if block.get("is_error") is True else ""
            conversation.result(call_id, prefix + said)
        else:
            conversation.user(_block_text(block, where))


def _add_assistant(conversation: Conversation, blocks: list[Json], where: str) -> None:
    for block in blocks:
        kind = block.get("type")
        if kind in ("thinking", "redacted_thinking"):
            continue
        if kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise bad_request(f"{where}tool_use.input must be an object")
            call_id, name = checks.text(block, "id", where), checks.text(block, "name", where)
            conversation.call(call_id, name, json.dumps(given, ensure_ascii=False))
        else:
            conversation.assistant(_block_text(block, where))


def _plain_text(content: object, where: str) -> str:
    """The text of a tool's result: nothing, a string, or blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = checks.object_list(content, f"{where}content")
    return PARAGRAPH.join(_block_text(block, where) for block in blocks)


def _block_text(block: Json, where: str) -> str:
    """A block's text, or a note of what a text model cannot see."""
    kind = checks.text(block, "type", where)
    if kind == "text":
        return checks.text(block, "text", where)
    source = block.get("source")
    given = source if isinstance(source, dict) else {}
    if kind == "document" and isinstance(given.get("data"), str) and given.get("type") == "text":
        return str(given["data"])
    if kind in ("image", "document"):
        return f"[{given.get('media_type') or kind} not shown: this model reads text]"
    if kind == "search_result":
        return _plain_text(block.get("content"), where)
    raise bad_request(f"{where}content: blocks of type {kind!r} are not supported")


def _tools(body: Json) -> Json:
    """Tools and the choice among them; server tools have no schema and no place here."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": checks.text(tool, "name", "tools."),
                "description": checks.optional_text(tool, "description", "tools.") or "",
                "parameters": tool["input_schema"],
            },
        }
        for tool in checks.objects(body, "tools")
        if isinstance(tool.get("input_schema"), dict)
    ]
    if not tools:
        return {}
    choice = body.get("tool_choice")
    if choice is None:
        return {"tools": tools}
    if not isinstance(choice, dict):
        raise bad_request("tool_choice must be an object")
    kind = checks.text(choice, "type", "tool_choice.")
    if kind == "tool":
        named = {"name": checks.text(choice, "name", "tool_choice.")}
        return {"tools": tools, "tool_choice": {"type": "function", "function": named}}
    words = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in words:
        raise bad_request("tool_choice.type must be auto, any, tool or none")
    return {"tools": tools, "tool_choice": words[kind]}


def _thinking(body: Json) -> Json:
    """Whether the template opens a thinking block; unsaid, it decides itself."""
    thinking = body.get("thinking")
    if thinking is None:
        return {}
    if not isinstance(thinking, dict):
        raise bad_request("thinking must be an object")
    kind = checks.text(thinking, "type", "thinking.")
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}
