"""What vllm-mlx would ignore of a request, refused by its name.

vllm-mlx takes fields that it does not know, and some that its batching engine does nothing with:
the reply would be another than was asked for, and nobody would be told.  A value that changes
nothing passes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

from pion_vllm_mlx.cache.vllm_mlx_backend_seams import Seam, check
from pion_vllm_mlx.serve.sampling import LARGEST

Json = dict[str, Any]

GET_ENGINE = Seam("vllm_mlx.server", "get_engine", ())
#: types of a message's parts that vllm-mlx reads: those of any model, and of one that sees
_TEXT = frozenset({"text"})
_MEDIA = frozenset({"image_url", "image", "video_url", "video", "audio_url", "audio"})
#: what mlx-lm looks back at for penalties, and vllm-mlx leaves as it is
_CONTEXT_TOKENS = 20


#: the least and the largest value of vllm-mlx's flags: it takes others, too, and then requests
#: wait for ever, every one fails, or nothing is kept
_RANGES: Mapping[str, tuple[float, float]] = {
    "max_num_seqs": (1, math.inf),
    "prefill_batch_size": (1, math.inf),
    "completion_batch_size": (1, math.inf),
    "stream_interval": (1, math.inf),
    "max_tokens": (1, math.inf),
    "max_request_tokens": (1, math.inf),
    "chunked_prefill_tokens": (0, math.inf),
    "cache_memory_mb": (0, math.inf),
    "cache_memory_percent": (0, 1),
    "gpu_memory_utilization": (0.01, 1),
    "timeout": (0.001, math.inf),
    "default_temperature": (0, LARGEST),
    "default_top_p": (0, 1),
    "default_min_p": (0, 1),
    "default_top_k": (-1, math.inf),
    "default_presence_penalty": (-LARGEST, LARGEST),
    "default_thinking_token_budget": (0, math.inf),
    "default_repetition_penalty": (0, LARGEST),
}


def wrong_flag(serve: argparse.Namespace) -> str | None:
    """A sentence on a flag of vllm-mlx's serve with which it would not work, if there is one."""
    for name, (least, largest) in _RANGES.items():
        value = vars(serve).get(name)
        if value is not None and not least <= value <= largest:
            most = f" and at most {largest:g}" if largest < LARGEST else ""
            return f"--{name.replace('_', '-')} must be at least {least:g}{most}"
    if serve.specprefill and not serve.specprefill_draft_model:
        return "--specprefill wants --specprefill-draft-model: the model that scores prompts"
    return None


def check_server() -> None:
    """Raises PionMlxCompatError where the server cannot be asked what its model reads."""
    check([GET_ENGINE])


def model_sees() -> bool:
    """Whether the model may read more than text; True where several are served, or none yet."""
    from fastapi import HTTPException
    from vllm_mlx import server

    if vars(server).get("_model_manager") is not None:
        return True
    try:
        return bool(server.get_engine().is_mllm)
    except HTTPException:
        return True


def the_tokenizer() -> Any:
    """That of the one model; None where several are served, or none yet."""
    from fastapi import HTTPException
    from vllm_mlx import server

    if vars(server).get("_model_manager") is not None:
        return None
    try:
        return server.get_engine().tokenizer
    except HTTPException:
        return None


def refuse_ignored(asked: Json, *, chat: bool) -> None:
    """Raises ValueError that names a setting of a body which would be ignored.

    ``chat``: it is for the chat endpoint.
    """
    greedy = asked.get("temperature") == 0
    if asked.get("seed") is not None and not greedy:
        _refuse("seed", "this engine draws all replies from one stream of random numbers")
    if _changes(asked, "frequency_penalty"):
        _refuse("frequency_penalty")
    if _changes(asked, "xtc_probability") and not greedy:
        _refuse("xtc_probability")
    for penalty, nothing in (("repetition", (None, 0, 1)), ("presence", (None, 0))):
        size = f"{penalty}_context_size"
        if asked.get(f"{penalty}_penalty") not in nothing:
            if asked.get(size) not in (None, _CONTEXT_TOKENS):
                _refuse(size, f"this engine always has {_CONTEXT_TOKENS}")
    _refuse_no_time(asked)
    if chat:
        _refuse_choice(asked)
    else:
        _refuse_of_chats(asked)


def _refuse_no_time(asked: Json) -> None:
    """Raises ValueError for a ``timeout``, in seconds, that is over before anything is computed."""
    if asked.get("timeout") is None:
        return
    try:
        seconds = float(asked["timeout"])
    except (TypeError, ValueError, OverflowError):
        return  # vllm-mlx says so itself
    if not seconds > 0:  # nan is not, either
        _refuse("timeout", "must be a number of seconds above 0")


def _refuse_of_chats(asked: Json) -> None:
    """Raises ValueError for a setting that text completions would ignore."""
    why = "this engine has it for chat requests alone"
    biases, form = asked.get("logit_bias"), asked.get("response_format")
    if isinstance(biases, dict) and any(biases.values()):
        _refuse("logit_bias", why)
    if form is not None and form != {"type": "text"}:
        _refuse("response_format", why)
    if asked.get("thinking_token_budget") is not None:
        _refuse("thinking_token_budget", why)


def _refuse_choice(asked: Json) -> None:
    """Raises ValueError for a ``tool_choice`` that nobody could follow."""
    choice, tools = asked.get("tool_choice"), asked.get("tools")
    if choice in (None, "auto", "none"):
        return
    functions = [tool.get("function") for tool in _objects(tools)]
    names = [function.get("name") for function in _objects(functions)]
    if choice == "required":
        if not names:
            _refuse("tool_choice", "there are no tools")
        return
    named = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(named, dict) or choice.get("type") != "function":
        _refuse("tool_choice", "this engine knows auto, none, required, and a function's name")
    elif named.get("name") not in names:
        _refuse("tool_choice", f"there is no tool named {named.get('name')!r}")


def _objects(value: Any) -> list[Json]:
    """The objects of what should be a list of them; vllm-mlx refuses the others itself."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def refuse_parts(asked: Json, *, sees: bool) -> None:
    """Raises ValueError that names a part of a message which would be left out of the prompt."""
    known = _TEXT | _MEDIA if sees else _TEXT
    messages = asked.get("messages")
    for position, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in known:
                where = f"messages[{position}].content[{index}]"
                raise ValueError(f"{where}: parts of type {kind!r} cannot be read by this model")


def _changes(asked: Json, name: str) -> bool:
    return bool(asked.get(name))


def _refuse(name: str, why: str = "this engine ignores it") -> None:
    raise ValueError(f"{name}: {why}")
