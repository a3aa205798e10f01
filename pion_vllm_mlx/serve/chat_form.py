"""The engine's chat body for a body of any of the three APIs, or the one to explain; pure."""

from __future__ import annotations

from pion_vllm_mlx.serve import anthropic_request, chat_request, responses_request
from pion_vllm_mlx.serve.api_errors import bad_request
from pion_vllm_mlx.serve.checks import Json

APIS = ("chat", "messages", "responses")
COMPLETIONS = "completions"
EXPLAINED_APIS = (*APIS, COMPLETIONS)


def chat_form(body: Json, api: str, *, normalize: bool = True, fetch: bool = False) -> Json:
    """``body``, of one of ``APIS``, as the engine gets it; nothing is asked of ``max_tokens``.

    ``fetch``: see ``chat_request.chat_body``. Raises ``ApiError`` 400.
    """
    if api == "messages":
        return anthropic_request.chat_body(body, normalize=normalize, counting=True)
    if api == "responses":
        return responses_request.chat_body(body, normalize=normalize)
    if api != "chat":
        raise bad_request(f"api must be {', '.join(APIS[:-1])} or {APIS[-1]}")
    return chat_request.chat_body(body, normalize=normalize, fetch=fetch)


def explained_form(body: Json, api: str, *, normalize: bool = True, fetch: bool = False) -> Json:
    """``chat_form``, and ``body`` of a text completion, which has a prompt for messages."""
    if known_api(api) == COMPLETIONS:
        return chat_request.completion_body(body)
    return chat_form(body, api, normalize=normalize, fetch=fetch)


def known_api(api: str) -> str:
    """``api``, if a body of it can be explained. Raises ``ApiError`` 400."""
    if api not in EXPLAINED_APIS:
        raise bad_request(f"api must be {', '.join(EXPLAINED_APIS[:-1])} or {COMPLETIONS}")
    return api
