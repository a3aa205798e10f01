"""The body of a request, read up to a limit, as a JSON object."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from pion_vllm_mlx.serve.api_errors import ApiError, Shape
from pion_vllm_mlx.serve.checks import Json, parse_object

MAX_BODY_BYTES = 64 << 20
#: longer bodies are parsed beside the event loop, which has other streams to serve.
_LONG_BYTES = 256 << 10
#: of a body that was refused so much is read and dropped, for so long, and while it comes.
DROPPED_BYTES = 2 * MAX_BODY_BYTES
_DROPPING_SECONDS = 30.0
_SILENT_SECONDS = 2.0


async def read_object(request: Request) -> Json:
    """The request's JSON object.

    Raises ``ApiError``: 413 over the limit, 400 for what is no JSON object or was not sent to
    its end.
    """
    raw = await _read(request)
    if len(raw) > _LONG_BYTES:
        return await asyncio.to_thread(parse_object, raw)
    return parse_object(raw)


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_long()
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise _too_long()
            parts.append(part)
    except ClientDisconnect as error:
        raise ApiError(400, "the client closed the connection before its request was whole") from (
            error
        )
    return b"".join(parts)


def _too_long() -> ApiError:
    return ApiError(413, f"the body is longer than {MAX_BODY_BYTES >> 20} MB")


class Lingering(JSONResponse):
    """A refusal of a body that is still being sent; the connection ends with it.

    Most clients send all of a body before they read anything, and a connection that is closed
    over bytes that nobody has read is reset: the answer would be lost. So the rest is dropped
    first, up to a bound.
    """

    def __init__(self, error: ApiError, shape: Shape) -> None:
        super().__init__(error.body(shape), error.status, {"Connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole answer, but not yet its end."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_drop(receive), _DROPPING_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive) -> None:
    left = DROPPED_BYTES
    while left > 0:
        message = await asyncio.wait_for(receive(), _SILENT_SECONDS)
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        left -= len(message.get("body", b""))
