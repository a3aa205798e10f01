"""What every request passes first, and what is noted of it last.

In this order: the host and the origin (a web page in the user's browser must not talk to a local
model unless it was allowed to, nor may one whose name was rebound to this machine), the API key,
and whether the server is shutting down.  Then the request runs;
at its end one line goes to the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pion_vllm_mlx.serve.api_errors import ApiError, Shape, unavailable
from pion_vllm_mlx.serve.exchange import error_response
from pion_vllm_mlx.serve.front_metrics import FrontMetrics, RequestRecord

log = logging.getLogger("pion_vllm_mlx.serve")

RECORD = "pion.record"
PROBES = ("/health", "/metrics")
_LOCAL_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
#: names of this machine that no page on the web can have; the latter are what containers call it.
_LOCAL_HOST = re.compile(r"(.+\.)?localhost|host\.(docker|containers)\.internal")
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")
_CORS = {"Access-Control-Allow-Methods": "*", "Access-Control-Allow-Headers": "*"}


def tenant_of(api_key: str | None) -> str:
    """A name for the owner of an API key, which does not tell the key; empty without one."""
    if not api_key:
        return ""
    return hashlib.sha256(b"pion tenant\0" + api_key.encode()).hexdigest()[:32]


def shape_of(path: str) -> Shape:
    """Whose errors a path's clients understand."""
    return Shape.ANTHROPIC if path.startswith("/v1/messages") else Shape.OPENAI


@dataclass(frozen=True)
class Door:
    """Who may come in: the API key, None for everybody, and the web origins beside local ones."""

    api_key: str | None = field(default=None, repr=False)
    allowed_origins: tuple[str, ...] = ()

    def admits_origin(self, origin: str) -> bool:
        """Whether a page of ``origin`` may ask."""
        allowed = self.allowed_origins
        return "*" in allowed or origin in allowed or bool(_LOCAL_ORIGIN.fullmatch(origin))

    def admits_host(self, host: str) -> bool:
        """Whether a request may call us ``host``; a page whose name is rebound to us has no key.

        An address is what it is: only names can be rebound.
        """
        if self.api_key is not None or "*" in self.allowed_origins:
            return True
        parted = _HOST.fullmatch(host.lower())
        name = parted[1].rstrip(".") if parted else ""
        named = {urlsplit(origin).hostname for origin in self.allowed_origins}
        return name in named or bool(_LOCAL_HOST.fullmatch(name)) or _is_address(name)

    def admits(self, headers: Headers) -> bool:
        """Whether a request brings the key, as a bearer token or as ``x-api-key``."""
        if self.api_key is None:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""]
        # Each is compared, whatever the other said: the time tells nothing.
        right = [_same(word.strip(), self.api_key) for word in given]
        return any(right)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _same(given: str, key: str) -> bool:
    """Whether a header's value is the key; headers are bytes, which starlette reads as latin-1."""
    return hmac.compare_digest(
        hashlib.sha256(given.encode("latin-1")).digest(), hashlib.sha256(key.encode()).digest()
    )


class Gate:
    """The ASGI application around the endpoints."""

    def __init__(self, app: ASGIApp, door: Door, metrics: FrontMetrics) -> None:
        self._app, self._door, self._metrics = app, door, metrics
        self._open: set[int] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def drain(self) -> None:
        """Refuse new requests from now on; returns when the open ones are over."""
        self.draining = True
        await self._idle.wait()

    @property
    def in_flight(self) -> int:
        """How many requests are open."""
        return len(self._open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _record(scope)
        scope[RECORD] = record
        self._open.add(id(record))
        self._idle.clear()
        # a scrape would find itself
        counted = scope["path"] not in PROBES
        if counted:
            self._metrics.in_flight.inc()
        try:
            await self._admit(scope, receive, self._noting(scope, send, record))
        finally:
            self._open.discard(id(record))
            if not self._open:
                self._idle.set()
            if counted:
                self._metrics.in_flight.dec()
            self._finish(record)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host")
        try:
            if host is not None and not self._door.admits_host(host):
                raise ApiError(403, f"host {host} is not allowed: see --allowed-origins")
            if origin is not None and not self._door.admits_origin(origin):
                raise ApiError(403, f"origin {origin} is not allowed: see --allowed-origins")
            if scope["method"] == "OPTIONS":
                await Response(status_code=204, headers=_CORS)(scope, receive, send)
                return
            if scope["path"] != "/health" and not self._door.admits(headers):
                raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")
            if self.draining:
                raise unavailable("the server is shutting down")
        except ApiError as error:
            scope[RECORD].note = error.message
            await error_response(error, shape_of(scope["path"]))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _noting(self, scope: Scope, send: Send, record: RequestRecord) -> Send:
        """``send``, which also notes the status and tells an admitted web page that it may read."""
        origin = Headers(scope=scope).get("origin")

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if origin is not None and self._door.admits_origin(origin):
                    headers = MutableHeaders(scope=message)
                    headers["Access-Control-Allow-Origin"] = origin
                    headers.add_vary_header("Origin")
            await send(message)

        return noting

    def _finish(self, record: RequestRecord) -> None:
        seconds = time.monotonic() - record.began
        self._metrics.count(record, seconds)
        # Probes and scrapes come by the minute and say nothing.
        level = logging.DEBUG if record.endpoint == "probe" else logging.INFO
        log.log(level, "%s", " ".join(_words(record, seconds)))


def _record(scope: Scope) -> RequestRecord:
    client = scope.get("client")
    path = scope["path"]
    return RequestRecord(
        method=scope["method"],
        # A path is the client's text: nothing in it may look like another line of the log.
        path=path[:200].encode("unicode_escape").decode("ascii"),
        client=str(client[0]) if client else "-",
        began=time.monotonic(),
    )


def _words(record: RequestRecord, seconds: float) -> Iterable[str]:
    yield f"{record.client} {record.method} {record.path} {record.status or 'aborted'}"
    outcome = record.outcome
    if outcome is not None:
        receipt = outcome.receipt or {}
        reused: int | str = outcome.cached_tokens
        computed: int | str = outcome.prompt_tokens - outcome.cached_tokens
        if receipt.get("reused_tokens", 0) is None:  # the engine does not know
            reused = computed = "?"
        yield f"reused={reused} computed={computed} generated={outcome.generated}"
        yield from _receipt_words(receipt)
    if record.first_token is not None:
        yield f"first_token_ms={(record.first_token - record.began) * 1e3:.0f}"
    yield f"ms={seconds * 1e3:.0f}"
    if record.note:
        yield f"({_one_line(record.note)})"


def _receipt_words(receipt: dict[str, Any]) -> Iterable[str]:
    """The receipt but for the token counts, which the line has, and for what was resumed."""
    if receipt.get("resumed_tokens"):
        yield f"resumed={receipt['resumed_tokens']}"
    for name, value in receipt.items():
        if isinstance(value, (str, int, float)) and value != "" and "tokens" not in name:
            # What rounds to nothing has no sign.
            shown = str(round(value, 1) or 0.0) if isinstance(value, float) else str(value)
            text = _one_line(shown)
            yield f'{name}="{text}"' if " " in text else f"{name}={text}"


def _one_line(text: str) -> str:
    return text[:300].encode("unicode_escape").decode("ascii")
