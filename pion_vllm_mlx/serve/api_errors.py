"""Refusals as HTTP answers, in the shape of the API that was asked.

A refusal is raised as ``ApiError`` wherever it is found; ``body`` gives its JSON.  Statuses mean
the same in both shapes: 400 the request, 401 the key, 403 the host or origin, 404 the path, 413 too
long, 500 the engine's answer, 502 the engine has gone, 503 not now.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from pion_vllm_mlx.errors import PionError

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    **_OPENAI_TYPES,
    413: "request_too_large",
    503: "overloaded_error",
    529: "overloaded_error",
}


class Shape(Enum):
    """Which API's errors a client understands."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class ApiError(PionError):
    """A request is refused with ``status``; ``code`` is OpenAI's short name of the reason."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code

    def body(self, shape: Shape) -> dict[str, Any]:
        """The JSON object of the answer."""
        if shape is Shape.ANTHROPIC:
            return {"type": "error", "error": {"type": self.kind(shape), "message": self.message}}
        return {
            "error": {
                "message": self.message,
                "type": self.kind(shape),
                "param": None,
                "code": self.code,
            }
        }

    def kind(self, shape: Shape) -> str:
        """The error's type in the words of an API."""
        anthropic = shape is Shape.ANTHROPIC
        known = (_ANTHROPIC_TYPES if anthropic else _OPENAI_TYPES).get(self.status)
        if known is not None:
            return known
        if self.status < 500:
            return "invalid_request_error"
        return "api_error" if anthropic else "server_error"


def bad_request(message: str) -> ApiError:
    """The request cannot be understood or is not supported."""
    return ApiError(400, message)


def engine_gone(message: str) -> ApiError:
    """The engine ended, or never answered."""
    return ApiError(502, message, "engine_gone")


def unavailable(message: str) -> ApiError:
    """Not now: starting, or shutting down."""
    return ApiError(503, message, "unavailable")


def from_engine(status: int, text: str) -> ApiError:
    """What the engine refused.

    mlx-lm's server answers 404 to whatever goes wrong before the first token, which for a
    known path is a prompt that its template or tokenizer refuses; vllm-mlx says 422 where a field
    has the wrong type.  The engine's own key is the front's business, so a 401 from it is no
    client's fault.
    """
    if status in (404, 422):
        return ApiError(400, text)
    if status == 401:
        return ApiError(502, "the engine refused the front's key", "engine_gone")
    return ApiError(status if 400 <= status < 600 else 502, text)
