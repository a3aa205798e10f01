"""The engine protocol around vllm-mlx's application: the key, and the ``/v1/pion`` endpoints.

``count_tokens`` and ``explain`` send their body through vllm-mlx's own chat endpoint up to the
point where its engine would be given the prompt, so that they mean the very same tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pion_vllm_mlx.cache.lineage import Explanation, LineageStore
from pion_vllm_mlx.cache.vllm_mlx_backend import installed_caches
from pion_vllm_mlx.cache.vllm_mlx_backend_usage import (
    RENDER_ONLY,
    App,
    Message,
    Receive,
    Rendered,
    Send,
)
from pion_vllm_mlx.serve.engine_child import EngineLink, authorized
from pion_vllm_mlx.serve.engine_mlx_lm_sampling import refuse_foreign_tokens, vocabulary_of
from pion_vllm_mlx.serve.engine_vllm_mlx_refusals import (
    model_sees,
    refuse_ignored,
    refuse_parts,
    the_tokenizer,
)
from pion_vllm_mlx.serve.explained import explained

log = logging.getLogger(__name__)

STATS, COUNT, EXPLAIN = "/v1/pion/stats", "/v1/pion/count_tokens", "/v1/pion/explain"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

#: counters that are one for all models, or cannot be added up.
OF_ALL = ("allocator_bytes", "budget_bytes", "prefill_tokens_per_second")

Scope = Any
Said = list[Message]
Explain = Callable[[LineageStore], Explanation]
T = TypeVar("T")


class EngineLayer:
    """The outermost ASGI layer of the engine."""

    def __init__(self, app: App, link: EngineLink, model: str) -> None:
        """``app`` is vllm-mlx's, ``link`` has the front's key, ``model`` is its name there."""
        self._app = app
        self._link = link
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, in_a_sentence(send, self._model))
            return
        headers = {key.lower(): value for key, value in scope["headers"]}
        if not authorized(self._link, headers.get(b"authorization", b"").decode("latin-1")):
            await answer(send, 401, {"error": "this engine serves its front only"})
            return
        asked = (scope["method"], scope["path"])
        if asked == ("GET", STATS):
            await answer(send, 200, stats())
        elif asked == ("POST", COUNT):
            await self._count(scope, receive, send)
        elif asked == ("POST", EXPLAIN):
            await self._explain(scope, receive, send)
        elif asked in (("POST", CHAT), ("POST", COMPLETIONS)):
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vllm-mlx's own, but for what it ignores, or the step of every request fails on."""
        body = await body_of(receive)
        try:
            refuse(body, chat=scope["path"] == CHAT)
        except ValueError as error:
            await answer(send, 400, {"error": str(error)})
            return
        await self._app(scope, replayed(body, receive), send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        rendered = await self._render(scope, await body_of(receive), send)
        if rendered is not None:
            await answer(send, 200, {"input_tokens": len(rendered.tokens)})

    async def _explain(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive)
        if body.strip() in (b"", b"{}"):
            misses = [cache.last_miss for cache in installed_caches() if cache.last_miss]
            if misses:
                last = max(misses, key=lambda miss: miss.at)
                tokens = last.missed.ids.tolist()
                told = await explanation(Rendered(last.core, tokens), last.missed.explained)
            else:
                told = {"sentence": "no request has missed so far"}
            await answer(send, 200, told)
            return
        rendered = await self._render(scope, body, send)
        if rendered is not None:
            await answer(send, 200, await explanation(rendered))

    async def _render(self, scope: Scope, body: bytes, send: Send) -> Rendered | None:
        """The tokens of a chat body; None where it was refused, which has been answered."""
        try:
            asked = json.loads(body)
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            await answer(send, 400, {"error": "the body must be a JSON object"})
            return None
        try:
            refuse_parts(asked, sees=model_sees())
        except ValueError as error:
            await answer(send, 400, {"error": str(error)})
            return None
        found, said = await render(self._app, scope, {"model": self._model, **asked})
        if found is None:
            for message in said:
                await send(message)
        return found


def in_a_sentence(send: Send, model: str) -> Send:
    """A channel that tells why an application did not start by the last line of its traceback."""

    async def tell(message: Message) -> None:
        if message["type"] == "lifespan.startup.failed":
            log.debug("%s", message.get("message"))
            why = str(message.get("message")).strip().rpartition("\n")[2]
            message = {**message, "message": f"the model {model} cannot be loaded: {why}"}
        await send(message)

    return tell


async def render(app: App, scope: Scope, body: dict[str, Any]) -> tuple[Rendered | None, Said]:
    """The prompt that a chat body is, or the answer that refuses it."""
    rendered: list[Rendered] = []
    token = RENDER_ONLY.set(rendered)
    try:
        said = await asked_of(app, scope, {**body, "stream": False, "max_tokens": 1})
    finally:
        RENDER_ONLY.reset(token)
    return (rendered[0] if rendered else None), said


async def asked_of(app: App, scope: Scope, body: dict[str, Any]) -> Said:
    """What vllm-mlx's endpoint answers to a body: that of chats, or of a prompt's completion."""
    said: Said = []

    async def listen(message: Message) -> None:
        said.append(message)

    data = json.dumps(body).encode()
    path = CHAT if "messages" in body else COMPLETIONS
    inner = {**scope, "path": path, "raw_path": path.encode()}
    inner["headers"] = _with_length(scope["headers"], len(data))
    await app(inner, whole(data), listen)
    return said


def stats() -> dict[str, Any]:
    """Flat counters of the engine's caches; ``{"pion": "disabled"}`` without a store."""
    told = [cache.pion_stats() for cache in installed_caches()]
    if not told:
        return {"pion": "no model is loaded yet"}
    if "pion" in told[0]:
        return {"pion": told[0]["pion"]}
    return told[0] if len(told) == 1 else {"models": len(told), **added(told)}


def added(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counters of several models as those of one; what is no number is the last one's."""
    total: dict[str, Any] = {}
    for name, value in ((name, value) for one in told for name, value in one.items()):
        if value is None:
            total.setdefault(name, None)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            total[name] = value
        elif name in OF_ALL:
            total[name] = max(value, total.get(name) or 0)
        else:
            total[name] = (total.get(name) or 0) + value
    return total


async def explanation(asked: Rendered, explain: Explain | None = None) -> dict[str, Any]:
    """Why these tokens are not a longer hit, with the first differing token decoded.

    ``explain`` asks a store why; without it the store is asked as it is now.
    """
    core, tokens = asked.core, asked.tokens
    if core is None:
        return {"prompt_tokens": len(tokens), "sentence": "prompts of image models are not stored"}
    cache = core.scheduler.memory_aware_cache
    store: LineageStore | None = await on_mlx_thread(core, cache.store_or_none)
    if store is None:
        return {"prompt_tokens": len(tokens), "sentence": "there is no store"}
    ask = explain or (lambda one: one.explain(tokens))
    found = await asyncio.wrap_future(cache.beside(lambda: ask(store)))
    return explained(found, core.scheduler._actual_tokenizer.decode, tokens)


async def on_mlx_thread(core: Any, call: Callable[[], T]) -> T:
    """What ``call`` gives where vllm-mlx does its MLX work."""
    worker = core._external_generation_worker
    if worker is None:
        return call()
    found: T = await asyncio.wrap_future(worker.submit(call))
    return found


async def answer(send: Send, status: int, value: Any) -> None:
    """Send a JSON answer."""
    body = json.dumps(value, ensure_ascii=False, default=str).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        body += bytes(message.get("body", b""))
        if not message.get("more_body", False):
            return body


def whole(body: bytes) -> Receive:
    """A receive channel that gives ``body`` and then waits, as a patient client does."""
    left = [body]

    async def receive() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return receive


def replayed(body: bytes, receive: Receive) -> Receive:
    """A receive channel that gives ``body``, and then what ``receive`` does."""
    left = [body]

    async def again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again


def refuse(body: bytes, *, chat: bool) -> None:
    """Raises ValueError for what of a request vllm-mlx takes, and should not have."""
    try:
        asked = json.loads(body)
    except ValueError:
        return  # vllm-mlx says so itself
    if not isinstance(asked, dict):
        return
    refuse_parts(asked, sees=model_sees())
    refuse_ignored(asked, chat=chat)
    biased = biased_tokens(asked)
    refuse_foreign_tokens(biased, vocabulary() if biased else 0)


def biased_tokens(asked: dict[str, Any]) -> list[int]:
    """The token ids that a chat body biases; none where vllm-mlx refuses it itself."""
    try:
        return [int(token) for token in asked.get("logit_bias") or {}]
    except (ValueError, TypeError):
        return []


def vocabulary() -> int:
    """How many token ids every model that is loaded has, and the tokenizer of the one."""
    models, tokenizer = [cache.model for cache in installed_caches()], the_tokenizer()
    return min((vocabulary_of(model, tokenizer) for model in models), default=0)


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(k, v) for k, v in headers if k.lower() not in (b"content-length", b"content-type")]
    return [
        *kept,
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
