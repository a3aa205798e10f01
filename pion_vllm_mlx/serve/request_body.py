"""The body of a request, read up to a limit, as a JSON object."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from pion_vllm_mlx.serve.api_errors import ApiError
from pion_vllm_mlx.serve.checks import Json, parse_object

MAX_BODY_BYTES = 64 << 20
#: longer bodies are parsed beside the event loop, which has other streams to serve.
_LONG_BYTES = 256 << 10


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
