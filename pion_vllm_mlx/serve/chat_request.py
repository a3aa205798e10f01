"""OpenAI chat and completion requests, checked before they reach the engine; pure.

The engine's own checks are kept; here is what would otherwise fail late or be ignored without a
word.  ``model`` is replaced, since one process serves one model under any name.
"""

from __future__ import annotations

from pion_vllm_mlx.serve import checks
from pion_vllm_mlx.serve.api_errors import bad_request
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.normalize import normalize_messages

MODEL = "default_model"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def chat_body(body: Json, *, normalize: bool = True) -> Json:
    """The engine's body for a chat completion request. Raises ``ApiError`` 400."""
    messages = checks.objects(body, "messages")
    if not messages:
        raise bad_request("messages must be a list of at least one message")
    for position, message in enumerate(messages):
        _check_message(message, f"messages[{position}].")
    messages = [_known_role(message) for message in messages]
    checks.objects(body, "tools")
    return {
        **_common(body),
        "messages": normalize_messages(messages) if normalize else messages,
    }


def completion_body(body: Json) -> Json:
    """The engine's body for a text completion request. Raises ``ApiError`` 400."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise bad_request("prompt must be a string")
    return {**_common(body), "prompt": prompt}


def streamed(body: Json) -> Json:
    """``body``, answered as a stream that ends with its usage."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def wants_usage(body: Json) -> bool:
    """Whether a client asked for the usage chunk of a stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def requested_model(body: Json) -> str:
    """The name to answer under."""
    return checks.optional_text(body, "model") or MODEL


def _common(body: Json) -> Json:
    checks.flag(body, "stream")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise bad_request("stream_options must be an object")
    if checks.count(body, "n") not in (None, 1):
        raise bad_request("n must be 1: one reply a request")
    requested_model(body)
    checks.stops(body, "stop")
    # Absent and null mean the same, but not to every engine.
    given = {name: value for name, value in body.items() if value is not None}
    return {**given, "model": MODEL}


def _known_role(message: Json) -> Json:
    """A developer message is a system message by a newer name, which few templates know."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _check_message(message: Json, where: str) -> None:
    role = checks.text(message, "role", where)
    if role not in _ROLES:
        raise bad_request(f"{where}role {role!r} is not one of {', '.join(_ROLES)}")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        for part in checks.object_list(content, f"{where}content"):
            kind = checks.text(part, "type", f"{where}content[].")
            if kind == "text":
                checks.text(part, "text", f"{where}content[].")
    for call in checks.objects(message, "tool_calls", where):
        if not isinstance(call.get("function"), dict):
            raise bad_request(f"{where}tool_calls[].function must be an object")
