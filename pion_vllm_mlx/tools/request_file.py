"""A request's body out of a file, as the front of ``serve`` would pass it to its engine.

And what else a tool checks before it loads a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.serve import chat_form, checks
from pion_vllm_mlx.serve.api_errors import ApiError
from pion_vllm_mlx.serve.model_path import why_no_model

Json = dict[str, Any]

MAX_BYTES = 256 << 20


def read_bytes(path: Path) -> bytes:
    """A file's content; ``-`` is standard input. Raises ConfigError."""
    try:
        source = Path("/dev/stdin") if str(path) == "-" else path
        if source.is_file() and source.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes")
        return source.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def parse(path: Path, raw: bytes) -> Json:
    """The JSON object of a file. Raises ConfigError."""
    try:
        return checks.parse_object(raw)
    except ApiError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def refuse_missing_model(model: str) -> None:
    """Raises ConfigError for a path that is none: it would be taken for a repository's name."""
    why = why_no_model(model)
    if why is not None:
        raise ConfigError(why)


def api_of(body: Json) -> str:
    """Whose request a body is: Anthropic's has a system prompt of its own, or such tools."""
    if "messages" not in body and ("input" in body or "instructions" in body):
        return "responses"
    tools = body.get("tools")
    named = isinstance(tools, list) and any(
        isinstance(tool, dict) and "input_schema" in tool for tool in tools
    )
    return "messages" if "system" in body or named else "chat"


def explained_body(path: Path, body: Json, api: str, *, normalize: bool = True) -> Json:
    """The engine's body, of a text completion too. Raises ConfigError naming what is wrong."""
    try:
        return chat_form.explained_form(body, api, normalize=normalize)
    except ApiError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def engine_body(path: Path, body: Json, api: str, *, normalize: bool = True) -> Json:
    """The engine's chat body. Raises ConfigError naming the field that is wrong."""
    try:
        return chat_form.chat_form(body, api, normalize=normalize)
    except ApiError as error:
        raise ConfigError(f"{path}: {error.message}") from error
