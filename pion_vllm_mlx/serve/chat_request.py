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
#: fields of a message's part that name what is to be looked at.
_MEDIA = ("image_url", "image", "video_url", "video", "audio_url", "audio")
#: what the engine says to a template itself, or reads its answer by.
_TEMPLATE_OWN = frozenset(
    "conversation messages tools tokenize add_generation_prompt continue_final_message padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask "
    "tokenizer_kwargs".split()
)
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

#: as many as mlx-lm's server tells.
MOST_TOP_LOGPROBS = 11



def chat_body(body: Json, *, normalize: bool = True, fetch: bool = False) -> Json:
    """The engine's body for a chat completion request. Raises ``ApiError`` 400.

    Engines fetch images, and other media, from the URLs that a request names, wherever those
    lead: with ``fetch`` they may, else only data URLs go through.
    """
    messages = checks.objects(body, "messages")
    if not messages:
        raise bad_request("messages must be a list of at least one message")
    for position, message in enumerate(messages):
        where = f"messages[{position}]."
        _check_message(message, where)
        if not fetch:
            _check_media(message.get("content"), f"{where}content[]")
    messages = [_known_role(message) for message in messages]
    checks.objects(body, "tools")
    if not checks.flag(body, "logprobs"):
        _refuse_top_alone(body)
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
    if not prompt:
        raise bad_request("prompt must not be empty")
    return {**_common(body), "prompt": prompt, **_log_probabilities(body)}


def _refuse_top_alone(body: Json) -> None:
    """Raises ``ApiError`` 400 for ``top_logprobs``, which would be ignored."""
    if (checks.count(body, "top_logprobs", -1) or 0) > 0:
        raise bad_request("top_logprobs stand beside the others: send logprobs, too")


def _log_probabilities(body: Json) -> Json:
    """``logprobs`` of a text completion, a number there, in the words of a chat.

    It counts the likeliest tokens beside each; with 0 there is that of the token itself.
    """
    if body.get("logprobs") is None or isinstance(body["logprobs"], bool):
        if not body.get("logprobs"):
            _refuse_top_alone(body)
        return {}
    number = checks.count(body, "logprobs", least=0)
    if number and number > MOST_TOP_LOGPROBS:  # the engine would name its own field
        raise bad_request(f"logprobs must be at most {MOST_TOP_LOGPROBS}")
    if body.get("top_logprobs") not in (None, -1, number):
        raise bad_request("top_logprobs: here the number of logprobs says how many")
    return {"logprobs": True, **({"top_logprobs": number} if number else {})}


def chosen_tools(body: Json) -> Json:
    """``body`` as an engine should see it: tools that must not be called are not shown."""
    if body.get("tool_choice") != "none":
        return body
    return {name: value for name, value in body.items() if name not in ("tools", "tool_choice")}


def check_steering(body: Json) -> None:
    """Raises ``ApiError`` 400 for what an engine that only samples would not do."""
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise bad_request(
            "tool_choice: this engine cannot force a call: send auto, and ask for it in a message"
        )
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise bad_request("response_format: this engine cannot hold a reply to a form, only text")


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
    if checks.count(body, "best_of") not in (None, 1):
        raise bad_request("best_of must be 1: one reply a request")
    if checks.flag(body, "echo"):
        raise bad_request("echo is not supported: the prompt is not repeated")
    if checks.optional_text(body, "suffix"):
        raise bad_request("suffix is not supported: replies follow the prompt")
    requested_model(body)
    stops = checks.stops(body, "stop", lone=True)
    _check_template_settings(body)
    checks.mapping(body, "role_mapping")
    for name, flag in (("adapters", "--adapter-path"), ("draft_model", "--draft-model")):
        if body.get(name) not in (None, MODEL):
            raise bad_request(f"{name} cannot be chosen by a request: see serve's {flag}")
    seed = checks.seed(body, "seed")
    checks.count(body, "max_tokens", least=0)
    limit = checks.count(body, "max_completion_tokens", least=0)
    # Absent and null mean the same, but not to every engine.
    given = {name: value for name, value in body.items() if value is not None}
    if seed is not None:
        given["seed"] = seed
    if stops:
        given["stop"] = stops  # vllm-mlx takes no single one
    if limit is not None:
        given["max_tokens"] = given.pop("max_completion_tokens")  # the name that engines know
    return {**given, "model": MODEL}


def _check_template_settings(body: Json) -> None:
    name = "chat_template_kwargs"
    for setting in sorted(_TEMPLATE_OWN.intersection(checks.mapping(body, name))):
        raise bad_request(f"{name}.{setting} is the engine's own")


def _known_role(message: Json) -> Json:
    """A developer message is a system message by a newer name, which few templates know."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _check_media(content: object, where: str) -> None:
    """Refuses what would be fetched, or read from a file, for the parts of a message."""
    for part in content if isinstance(content, list) else []:
        for name, value in part.items():
            url = value.get("url") if isinstance(value, dict) else value
            if name not in _MEDIA or url is None:
                continue
            if not isinstance(url, str) or not url.startswith("data:"):
                raise bad_request(
                    f"{where}.{name}: only data URLs are taken; serve --allow-media-urls has the "
                    "engine fetch others"
                )


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
    for index, call in enumerate(checks.objects(message, "tool_calls", where)):
        called = f"{where}tool_calls[{index}].function"
        if not isinstance(call.get("function"), dict):
            raise bad_request(f"{called} must be an object")
        checks.object_text(call["function"], "arguments", f"{called}.")
