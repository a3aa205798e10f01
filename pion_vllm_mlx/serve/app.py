"""The endpoints: which request goes where, and which reply tells what comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pion_vllm_mlx.serve import anthropic_request, chat_request, responses_request
from pion_vllm_mlx.serve.anthropic_reply import AnthropicReply
from pion_vllm_mlx.serve.api_errors import ApiError, bad_request
from pion_vllm_mlx.serve.chat_form import chat_form, explained_form, known_api
from pion_vllm_mlx.serve.chat_reply import ChatReply, CompletionReply
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.engine_client import Answer, EngineClient, error_text
from pion_vllm_mlx.serve.exchange import Exchange, error_response, unless_disconnected
from pion_vllm_mlx.serve.front_metrics import (
    CONTENT_TYPE,
    FrontMetrics,
    RequestRecord,
    numbers_of,
)
from pion_vllm_mlx.serve.gate import RECORD, Door, Gate, shape_of
from pion_vllm_mlx.serve.reply import Reply
from pion_vllm_mlx.serve.request_body import Lingering, read_object
from pion_vllm_mlx.serve.responses_reply import ResponsesReply
from pion_vllm_mlx.serve.sampling import check_sampling
from pion_vllm_mlx.serve.supervisor import Supervisor

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EXPLAIN = "/v1/pion/explain"
Endpoint = Callable[[Request], Awaitable[ASGIApp]]
_STATS_SECONDS = 2.0


@dataclass(frozen=True)
class Front:
    """The endpoints over one supervised engine; ``normalize``: see ``normalize``.

    ``media_urls``: the engine may fetch what chat requests name.
    """

    supervisor: Supervisor
    normalize: bool = True
    media_urls: bool = False
    metrics: FrontMetrics = field(default_factory=FrontMetrics)

    async def chat(self, request: Request) -> ASGIApp:
        """``/v1/chat/completions``."""
        body = await read_object(request)
        sent = self._chat_form(body, "chat")
        model = chat_request.requested_model(body)
        reply = ChatReply(model, chat_request.wants_usage(body))
        return self._exchange(request, CHAT, sent, reply, body)

    async def completions(self, request: Request) -> ASGIApp:
        """``/v1/completions``."""
        body = await read_object(request)
        sent = chat_request.completion_body(body)
        model = chat_request.requested_model(body)
        reply = CompletionReply(model, chat_request.wants_usage(body))
        return self._exchange(request, COMPLETIONS, sent, reply, body)

    async def messages(self, request: Request) -> ASGIApp:
        """``/v1/messages``."""
        body = await read_object(request)
        sent = anthropic_request.chat_body(body, normalize=self.normalize)
        reply = AnthropicReply(chat_request.requested_model(body))
        return self._exchange(request, CHAT, sent, reply, body)

    async def count_tokens(self, request: Request) -> ASGIApp:
        """``/v1/messages/count_tokens``."""
        body = await read_object(request)
        sent = anthropic_request.chat_body(body, normalize=self.normalize, counting=True)
        return self._forward("POST", "/v1/pion/count_tokens", sent)

    async def responses(self, request: Request) -> ASGIApp:
        """``/v1/responses``."""
        body = await read_object(request)
        sent = responses_request.chat_body(body, normalize=self.normalize)
        reply = ResponsesReply(chat_request.requested_model(body), body)
        return self._exchange(request, CHAT, sent, reply, body)

    async def explain(self, request: Request) -> ASGIApp:
        """``/v1/pion/explain``: ``?api=`` says whose body it is; an empty one: the last miss."""
        body = await read_object(request) if request.method == "POST" else {}
        api, fetch = known_api(request.query_params.get("api", "chat")), self.media_urls
        if not body:
            return self._forward("POST", EXPLAIN, {})
        sent = explained_form(body, api, normalize=self.normalize, fetch=fetch)
        return self._forward("POST", EXPLAIN, sent)

    async def models(self, request: Request) -> ASGIApp:
        """``/v1/models``: the one model there is, under the name that was asked for, if any."""
        name = request.path_params.get("name")
        model = _model_entry(name or self.supervisor.model)
        if name:
            return JSONResponse(model)
        ends = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return JSONResponse({"object": "list", "data": [model], **ends})

    async def stats(self, request: Request) -> ASGIApp:
        """``/v1/pion/stats``; an engine that was unloaded is not loaded to be asked."""
        if self.supervisor.unload_after is not None and self.supervisor.client is None:
            return JSONResponse({"pion": "unloaded"})
        return self._forward("GET", "/v1/pion/stats")

    async def supervisor_status(self, request: Request) -> ASGIApp:
        """``/v1/pion/supervisor``, in supervisor mode."""
        if self.supervisor.unload_after is None:
            raise ApiError(404, "only with --unload-after")
        return JSONResponse(self.supervisor.status())

    async def health(self, request: Request) -> ASGIApp:
        """``/health``: an engine that was unloaded is well; one that died is on its way up."""
        _record(request).endpoint = "probe"
        client = self.supervisor.client
        if client is None:
            if self.supervisor.unload_after is not None and not self.supervisor.starting:
                return JSONResponse({"status": "ok", "engine": "unloaded"})
            self.supervisor.wake()
            return JSONResponse({"status": "unavailable", "engine": "starting"}, 503)
        answer = await client.get("/health")
        return Response(answer.body, answer.status, media_type="application/json")

    async def show_metrics(self, request: Request) -> ASGIApp:
        """``/metrics``: the engine's numbers are left out where it does not answer soon."""
        _record(request).endpoint = "probe"
        counters = self.supervisor.counters
        numbers = {
            "loaded": float(self.supervisor.client is not None),
            "loads": float(counters.loads),
            "unloads": float(counters.unloads),
            "deaths": float(counters.deaths),
        }
        if self.supervisor.client is not None:
            with contextlib.suppress(ApiError, asyncio.TimeoutError):
                asked = self.supervisor.client.get("/v1/pion/stats")
                numbers |= numbers_of((await asyncio.wait_for(asked, _STATS_SECONDS)).json())
        return Response(self.metrics.render(numbers), media_type=CONTENT_TYPE)

    def _chat_form(self, body: Json, api: str) -> Json:
        return chat_form(body, api, normalize=self.normalize, fetch=self.media_urls)

    def _exchange(
        self, request: Request, path: str, sent: Json, reply: Reply, body: Json
    ) -> ASGIApp:
        stream = body.get("stream") is True
        check_sampling(sent)
        if not self.supervisor.command.steers:
            chat_request.check_steering(sent)
        sent = chat_request.chosen_tools(sent)
        probabilities = bool(body.get("logprobs") or sent.get("logprobs"))
        if probabilities and not self.supervisor.command.logprobs:
            raise bad_request("logprobs: this engine gives none")
        if not stream and probabilities and isinstance(reply, ChatReply | CompletionReply):
            # Only an answer that does not stream has them.
            return _Forwarded(self.supervisor, "POST", path, sent, reply)
        return Exchange(self.supervisor, path, sent, reply, stream, _record(request))

    def _forward(self, method: str, path: str, body: Json | None = None) -> ASGIApp:
        return _Forwarded(self.supervisor, method, path, chat_request.chosen_tools(body or {}))


@dataclass(frozen=True)
class _Forwarded:
    """An ASGI application that passes one request on and its whole answer back.

    ``reply``: reads the answer for the log and the metrics, and names its model; None where the
    model generates nothing.
    """

    supervisor: Supervisor
    method: str
    path: str
    body: Json
    reply: Reply | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.reply is not None:
            scope[RECORD].outcome = self.reply.outcome
        if not await unless_disconnected(receive, self._run(scope, receive, send)):
            scope[RECORD].note = "the client left"

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self.supervisor.asking(self._answer) as answer:
                if answer.status == 404 and self.path.startswith("/v1/pion/"):
                    reason = error_text(answer.body)
                    raise ApiError(501, f"this engine does not answer {self.path}: {reason}")
                answered: Response = JSONResponse(self._told(answer.json()))
        except ApiError as error:
            scope[RECORD].note = error.message
            answered = error_response(error, shape_of(scope["path"]))
        await answered(scope, receive, send)

    def _told(self, answer: Json) -> Json:
        if self.reply is None:
            return answer
        self.reply.feed(answer)
        return {**answer, "model": self.reply.model}

    @contextlib.asynccontextmanager
    async def _answer(self, engine: EngineClient) -> AsyncIterator[Answer]:
        if self.method == "GET":
            yield await engine.get(self.path)
        else:
            yield await engine.post(self.path, self.body)


def _model_entry(name: str) -> Json:
    """A model in the words of both APIs."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "pion-vllm-mlx",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def build(front: Front, door: Door) -> Gate:
    """The whole application, behind its gate."""
    app = Starlette(
        routes=_routes(front),
        exception_handlers={
            ApiError: _refused,
            HTTPException: _not_found,
            Exception: _failed,
        },
    )
    return Gate(app, door, front.metrics)


def _routes(front: Front) -> list[Route]:
    posts = {
        CHAT: front.chat,
        "/chat/completions": front.chat,
        COMPLETIONS: front.completions,
        "/v1/messages": front.messages,
        "/v1/messages/count_tokens": front.count_tokens,
        "/v1/responses": front.responses,
        "/responses": front.responses,
    }
    gets = {
        "/v1/models": front.models,
        "/v1/models/{name:path}": front.models,
        "/health": front.health,
        "/metrics": front.show_metrics,
        "/v1/pion/stats": front.stats,
        "/v1/pion/supervisor": front.supervisor_status,
    }
    return [
        *(Route(path, _named(path, call), methods=["POST"]) for path, call in posts.items()),
        *(Route(path, _named(path, call), methods=["GET"]) for path, call in gets.items()),
        Route(EXPLAIN, _named(EXPLAIN, front.explain), methods=["GET", "POST"]),
    ]


def _named(path: str, call: Endpoint) -> Endpoint:
    """``call``, whose requests are counted under ``path``."""
    name = path.partition("/{")[0]

    async def endpoint(request: Request) -> ASGIApp:
        _record(request).endpoint = name
        return await call(request)

    return endpoint


def _record(request: Request) -> RequestRecord:
    record: RequestRecord = request.scope[RECORD]
    return record


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    _record(request).note = error.message
    shape = shape_of(request.url.path)
    return Lingering(error, shape) if error.status == 413 else error_response(error, shape)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, message), shape_of(request.url.path))


async def _failed(request: Request, error: Exception) -> Response:
    """A bug: its traceback is in the log."""
    failure = ApiError(500, f"internal error: {type(error).__name__}")
    return error_response(failure, shape_of(request.url.path))
