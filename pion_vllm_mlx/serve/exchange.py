"""One request and its reply: the engine's stream, told to the client as it comes or as a whole.

The engine is always asked for a stream, so that it notices at its next write that nobody
listens any more: the client's disconnecting cancels the exchange, which closes the engine's
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from pion_vllm_mlx.serve.api_errors import ApiError, Shape
from pion_vllm_mlx.serve.chat_request import streamed
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.front_metrics import RequestRecord
from pion_vllm_mlx.serve.reply import Reply
from pion_vllm_mlx.serve.sse import Event
from pion_vllm_mlx.serve.supervisor import Supervisor

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_REFUSAL_HEADERS = {503: {"Retry-After": "5"}}


def error_response(error: ApiError, shape: Shape) -> Response:
    """A refusal as an answer."""
    return JSONResponse(error.body(shape), error.status, _REFUSAL_HEADERS.get(error.status))


@dataclass(frozen=True)
class Exchange:
    """An ASGI application for one request whose body has been read.

    ``path`` and ``body`` go to the engine, ``reply`` says what it answers; ``stream``: whether
    the client wants events.
    """

    supervisor: Supervisor
    path: str
    body: Json
    reply: Reply
    stream: bool
    record: RequestRecord

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.record.outcome = self.reply.outcome
        if not await unless_disconnected(receive, self._run(scope, receive, send)):
            self.record.note = "the client left"

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = _Client(send)
        try:
            body = streamed(self.body)
            async with self.supervisor.asking(lambda on: on.stream(self.path, body)) as chunks:
                await self._tell(chunks, client)
        except ApiError as error:
            self.record.note = error.message
            if client.started:
                await client.events(self.reply.failure(error))
                await client.close()
                return
            await error_response(error, self.reply.shape)(scope, receive, send)
            return
        if self.stream:
            await client.close()
        else:
            await JSONResponse(self.reply.whole())(scope, receive, send)

    async def _tell(self, chunks: AsyncIterator[Json | None], client: _Client) -> None:
        if self.stream:
            await client.events(self.reply.start())
        async for chunk in chunks:
            if chunk is None:
                if self.stream:
                    await client.write(self.reply.keepalive())
                continue
            events = self.reply.feed(chunk)
            if self.record.first_token is None and self.reply.outcome.begun:
                self.record.first_token = time.monotonic()
            if self.stream:
                await client.events(events)
        events = self.reply.end()
        if self.stream:
            await client.events(events)


class _Client:
    """The client's end of a stream; its headers go with the first bytes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def events(self, events: Iterable[Event]) -> None:
        """Send some events, in one piece."""
        await self.write(b"".join(event.encode() for event in events))

    async def write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            start: Message = {"type": "http.response.start", "status": 200}
            await self._send({**start, "headers": _STREAM_HEADERS})
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """End the stream, unless nothing was ever sent."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work``, cancelled when the client disconnects; whether it came to its end.

    What ``work`` raises is raised here.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
