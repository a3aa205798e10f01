"""Truth in ``usage``: an ASGI layer around vllm-mlx's application.

vllm-mlx knows how many tokens of a request were cached and forwards the number nowhere.  The
engine's requests of one HTTP request are collected in a context variable, and the answer's
``usage`` is completed on its way out, in the terms of its own API; a receipt, ``pion``, stands
beside OpenAI's.  Everything else passes through untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pion_vllm_mlx.cache.beside import MOST_DEADLINES
from pion_vllm_mlx.cache.vllm_mlx_backend_cache import UNEXPECTED, PionPrefixCache
from pion_vllm_mlx.cache.vllm_mlx_backend_lookup import Lookup, Miss
from pion_vllm_mlx.cache.vllm_mlx_backend_prefill import NoTokens, lookup_of
from pion_vllm_mlx.cache.vllm_mlx_backend_seams import ADD_TO_ENGINE, ADD_TO_MLLM, Replacements
from pion_vllm_mlx.cache.vllm_mlx_backend_tally import (
    Asked,
    Tally,
    Told,
    Unstored,
    complete_usage,
)

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/responses"}
)


@dataclass(frozen=True)
class Rendered:
    """A prompt as the engine would have been given it; ``core`` None: that of an image model."""

    core: Any
    tokens: list[int]


#: what an image model may be asked about, in the order of vllm-mlx's arguments
#: why nothing is told of a text request to it
NOT_TOLD = "vllm-mlx does not tell what it reuses of an image model's text requests"
_MEDIA = ("images", "videos", "audio")
_ASKED: ContextVar[list[Told] | None] = ContextVar("pion_asked", default=None)
#: where it holds a list, prompts are rendered into it and refused instead of answered.
RENDER_ONLY: ContextVar[list[Rendered] | None] = ContextVar("pion_render_only", default=None)


def patch_engine(replacements: Replacements) -> None:
    """Have the requests of the engine collected for the HTTP request they belong to."""
    from fastapi import HTTPException

    original: Callable[..., Awaitable[str]] = vars(ADD_TO_ENGINE.owner())[ADD_TO_ENGINE.name]

    @functools.wraps(original)
    async def add_request(self: Any, prompt: Any, *args: Any, **options: Any) -> str:
        rendered = RENDER_ONLY.get()
        if rendered is not None:
            tokens = self.scheduler._actual_tokenizer.encode(prompt)
            rendered.append(Rendered(self, [int(token) for token in tokens]))
            raise HTTPException(503, "rendered only")
        cache = self.scheduler.memory_aware_cache
        ahead = await _look_up(self, prompt) if isinstance(cache, PionPrefixCache) else None
        try:
            request_id = await original(self, prompt, *args, **options)
        except NoTokens as error:
            raise HTTPException(400, str(error)) from error
        finally:
            if ahead is not None:
                cache.forget(ahead)
        asked = _ASKED.get()
        request = self.scheduler.requests.get(request_id)
        if asked is not None and request is not None and isinstance(cache, PionPrefixCache):
            asked.append(Asked(request, cache))
        if request is not None and isinstance(cache, PionPrefixCache):
            _note_miss(self, request, cache)
        return request_id

    replacements.replace(ADD_TO_ENGINE, add_request)


def patch_image_models(replacements: Replacements) -> None:
    """Have the text requests of image models rendered, too, where nothing else is wanted.

    Of others it is told why nothing of them is, and of those about images that they are not stored.
    """
    from fastapi import HTTPException

    original: Callable[..., Awaitable[str]] = vars(ADD_TO_MLLM.owner())[ADD_TO_MLLM.name]

    @functools.wraps(original)
    async def add_request(self: Any, prompt: str, *args: Any, **options: Any) -> str:
        rendered, given = RENDER_ONLY.get(), {**dict(zip(_MEDIA, args, strict=False)), **options}
        media = next((kind for kind in _MEDIA if given.get(kind)), None)
        if rendered is None:
            request_id = await original(self, prompt, *args, **options)
            request = self.requests.get(request_id)
            if media is not None:
                _note_unstored(request, f"{media} are not stored")
            elif request is not None:
                _note_untold(request)
            return request_id
        if media is not None:
            raise HTTPException(400, "what images and sounds become in tokens is not known ahead")
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        rendered.append(Rendered(None, [int(token) for token in tokenizer.encode(prompt)]))
        raise HTTPException(503, "rendered only")

    replacements.replace(ADD_TO_MLLM, add_request)


def _note_unstored(request: Any, why: str) -> None:
    """Have a request that nothing is kept of told as what it is."""
    if request is None:
        return
    log.info("request %s: %s", request.request_id[:12], why)
    asked = _ASKED.get()
    if asked is not None:
        asked.append(Unstored(request, why))


def _note_untold(request: Any) -> None:
    """A text request of an image model: vllm-mlx does not say what it reuses of it."""
    asked = _ASKED.get()
    if asked is not None:
        asked.append(Unstored(request, NOT_TOLD, known=False))


async def _look_up(core: Any, prompt: Any) -> Lookup | None:
    """Has the store asked while the thread that generates decodes for others.

    None where that did not come to an end in time: it is asked when the prompt is fetched.
    """
    cache: PionPrefixCache = core.scheduler.memory_aware_cache
    options = cache.settings.options
    if options is None:
        return None
    tokenizer = core.scheduler._actual_tokenizer

    def look_up() -> Lookup | None:
        if isinstance(prompt, str):
            cache.ahead(prompt, tokenizer)
            return cache.look_up(tokenizer.encode(prompt))
        return cache.look_up(prompt)

    looking, found = cache.beside(look_up), None
    waits = MOST_DEADLINES * options.deadline_seconds
    try:
        found = await asyncio.wait_for(asyncio.wrap_future(looking), waits)
    except (asyncio.TimeoutError, *UNEXPECTED):
        log.info("a prompt was not looked up in time", exc_info=True)
    finally:
        if found is None:
            looking.add_done_callback(functools.partial(_forget, cache))
    return found


def _forget(cache: PionPrefixCache, done: Future[Lookup | None]) -> None:
    """Gives up what came too late."""
    late = None if done.cancelled() or done.exception() is not None else done.result()
    if late is not None:
        cache.forget(late)


def _note_miss(core: Any, request: Any, cache: PionPrefixCache) -> None:
    """Remember a prompt of which more than the last token has to be computed."""
    lookup = lookup_of(request)
    if lookup.prompt_tokens - lookup.reused_tokens > 1:
        cache.last_miss = Miss(core, lookup.missed())


class UsageLayer:
    """The ASGI layer; it goes around the application as its outermost middleware."""

    def __init__(self, app: App) -> None:
        """``app``: what is inside."""
        self._app = app

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        asked: list[Told] = []
        token = _ASKED.set(asked)
        try:
            answer = Answer(lambda: Tally.of(asked) if asked else None)
            await self._app(scope, receive, _Sender(answer, send).send)
        finally:
            _ASKED.reset(token)


@dataclass
class Answer:
    """The bytes of an answer on their way out; ``tally`` is asked once there is a usage."""

    tally: Callable[[], Tally | None]
    held: bytes = b""
    prompt_told: bool = False

    def whole(self, body: bytes, more: bool) -> bytes | None:
        """A JSON body completed, once all of it has come."""
        self.held += body
        return None if more else self._completed(self.held)

    def events(self, body: bytes, more: bool) -> bytes:
        """The whole events of what has come so far, completed; the rest is held back.

        The first chunk of a chat says what its usage will say of the prompt.
        """
        self.held += body
        ready, separator, rest = self.held.rpartition(b"\n\n")
        ready, self.held = (ready + separator, rest) if more else (self.held, b"")
        if b'"usage"' not in ready and self.prompt_told:
            return ready
        return b"\n".join(self._line(line) for line in ready.split(b"\n"))

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data: {"):
            return line
        if not self.prompt_told:
            line = b"data: " + self._begun(line[6:])
        return b"data: " + self._completed(line[6:]) if b'"usage"' in line else line

    def _begun(self, body: bytes) -> bytes:
        """A chunk with what is known of the prompt, once the engine was given it."""
        tally = self.tally()
        if tally is None or not tally.begun:
            return body
        self.prompt_told = True
        with contextlib.suppress(ValueError):
            chunk = json.loads(body)
            if isinstance(chunk, dict) and "choices" in chunk:
                chunk["pion_prompt"] = tally.prompt_usage()
                return json.dumps(chunk, ensure_ascii=False).encode()
        return body

    def _completed(self, body: bytes) -> bytes:
        """A JSON object with its usage completed; what is none comes back as it is."""
        try:
            answer = json.loads(body)
        except ValueError:
            return body
        tally = self.tally()
        if tally is None or not isinstance(answer, dict):
            return body
        inner = answer.get("response")
        changed = complete_usage(answer.get("usage"), tally)
        if isinstance(inner, dict):
            changed = complete_usage(inner.get("usage"), tally) or changed
        if not changed:
            return body
        if "choices" in answer:
            answer["pion"] = tally.receipt()
        return json.dumps(answer, ensure_ascii=False).encode()


class _Sender:
    """Sends an answer on; the start of a JSON one is held back until its length is known."""

    def __init__(self, answer: Answer, forward: Send) -> None:
        self._answer = answer
        self._forward = forward
        self._start: Message = {}
        self._kind = ""

    async def send(self, message: Message) -> None:
        """What the application calls for each part of its answer."""
        if message["type"] == "http.response.start":
            headers = {key.lower(): value for key, value in message["headers"]}
            self._kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]
            self._start = message
            if self._kind == "application/json":
                return
        elif message["type"] == "http.response.body":
            body, more = bytes(message.get("body", b"")), message.get("more_body", False)
            if self._kind == "application/json":
                await self._send_whole(self._answer.whole(body, more))
                return
            if self._kind == "text/event-stream":
                message = {**message, "body": self._answer.events(body, more)}
        await self._forward(message)

    async def _send_whole(self, body: bytes | None) -> None:
        if body is None:
            return
        headers = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._forward({**self._start, "headers": headers})
        await self._forward({"type": "http.response.body", "body": body})
