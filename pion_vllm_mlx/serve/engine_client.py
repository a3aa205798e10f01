"""HTTP to the engine: one connection a request, closed when its caller loses interest.

A closed connection is how the engine learns that nobody waits for a reply any more, so nothing
here outlives the ``async with`` that opened it.  h11 speaks the protocol; there are no
deadlines but those that callers set, since the first token of a long prompt takes what it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import h11

from pion_vllm_mlx.serve.api_errors import ApiError, engine_gone, from_engine
from pion_vllm_mlx.serve.chat_request import MODEL
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.sse import DONE, Decoder

log = logging.getLogger("pion_vllm_mlx.serve")

READ_BYTES = 64 << 10
#: of an answer that does not stream.
MAX_ANSWER_BYTES = 64 << 20


class Unanswered(ApiError):
    """The engine was gone before it had answered anything: 502, unless another can be asked."""

    def __init__(self, message: str) -> None:
        super().__init__(502, message, "engine_gone")


@dataclass(frozen=True)
class Answer:
    """A whole answer of the engine's."""

    status: int
    body: bytes

    def json(self) -> Json:
        """The object it carries. Raises ``ApiError`` for a refusal, or for anything else."""
        if self.status >= 400:
            raise from_engine(self.status, error_text(self.body))
        try:
            value = json.loads(self.body)
        except ValueError as error:
            raise engine_gone(f"the engine's answer is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise engine_gone("the engine's answer is no JSON object")
        return value


@dataclass(frozen=True)
class EngineClient:
    """Where an engine listens, and the key that it wants.

    ``model`` is what it calls its model, ``asked_for`` what requests call it.
    """

    port: int
    key: str = field(repr=False)
    model: str = ""
    asked_for: str = MODEL

    async def get(self, path: str) -> Answer:
        """GET ``path``. Raises ``ApiError`` 502 when the engine does not answer."""
        return await self._exchange("GET", path, b"")

    async def post(self, path: str, body: Json) -> Answer:
        """POST ``body`` as JSON, and read the whole answer."""
        return await self._exchange("POST", path, self._encode(body))

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Json) -> AsyncIterator[AsyncIterator[Json | None]]:
        """POST ``body`` and give the chunks of its stream; None is a sign of life.

        Entering raises ``ApiError`` for a refusal; iterating does when the stream breaks off
        before its end, or tells of an error.
        """
        async with self._connect() as link:
            status = await link.status("POST", path, self._encode(body))
            if status >= 400:
                raise from_engine(status, error_text(await link.read_all()))
            yield _chunks(link)

    def _encode(self, body: Json) -> bytes:
        named = {**body, "model": self.asked_for} if "model" in body else body
        return json.dumps(named).encode()

    async def _exchange(self, method: str, path: str, body: bytes) -> Answer:
        async with self._connect() as link:
            status = await link.status(method, path, body)
            return Answer(status, await link.read_all())

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[_Link]:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError as error:
            log.debug("no connection to the engine: %s", error)
            raise Unanswered("the engine takes no connections") from error
        try:
            yield _Link(reader, writer, self.key)
        finally:
            # At once, unread bytes and all: the engine shall notice.
            writer.transport.abort()


@contextlib.contextmanager
def _broken_off() -> Iterator[None]:
    """Whatever goes wrong between the engine and us is one ``ApiError`` 502, without its jargon."""
    try:
        yield
    except OSError as error:
        log.debug("the engine's connection: %s", error)
        raise engine_gone("the engine broke off its connection") from error
    except (h11.ProtocolError, ValueError) as error:
        log.debug("the engine's answer: %s", error)
        raise engine_gone("the engine broke off in the middle of its answer") from error


class _Link:
    """One request and its answer."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str
    ) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._state = h11.Connection(h11.CLIENT)
        self._heard = False

    async def status(self, method: str, path: str, body: bytes) -> int:
        """Send a request; the status of its answer. Raises ``Unanswered``."""
        try:
            return await self._request(method, path, body)
        except ApiError as error:
            if self._heard:
                raise
            raise Unanswered("the engine closed the connection without an answer") from error

    async def _request(self, method: str, path: str, body: bytes) -> int:
        headers = [
            ("Host", "127.0.0.1"),
            ("Authorization", f"Bearer {self._key}"),
            ("Connection", "close"),
            ("Accept", "application/json, text/event-stream"),
        ]
        if method == "POST":
            headers.append(("Content-Type", "application/json"))
            headers.append(("Content-Length", str(len(body))))
        request = h11.Request(method=method, target=path, headers=headers)
        with _broken_off():
            self._writer.write(self._state.send(request) or b"")
            if body:
                self._writer.write(self._state.send(h11.Data(data=body)) or b"")
            self._writer.write(self._state.send(h11.EndOfMessage()) or b"")
            await self._writer.drain()
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        if not isinstance(event, h11.Response):
            raise engine_gone("the engine closed the connection without an answer")
        return event.status_code

    async def data(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                return

    async def read_all(self) -> bytes:
        """The whole body."""
        parts, size = [], 0
        async for part in self.data():
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise engine_gone("the engine's answer is too long")
        return b"".join(parts)

    async def _next(self) -> h11.Event:
        while True:
            with _broken_off():
                event = self._state.next_event()
                if event is h11.NEED_DATA:
                    data = await self._reader.read(READ_BYTES)
                    self._heard = self._heard or bool(data)
                    self._state.receive_data(data)
                    continue
            if isinstance(event, h11.Event):
                return event
            else:
                raise engine_gone("the engine's answer has more than one end")


async def _chunks(link: _Link) -> AsyncIterator[Json | None]:
    decoder = Decoder()
    async for data in link.data():
        with _broken_off():
            payloads = list(decoder.feed(data))
        for payload in payloads:
            if payload == DONE:
                return
            yield None if payload is None else _chunk(payload)
    raise engine_gone("the engine ended in the middle of its reply")


def _chunk(payload: str) -> Json:
    with _broken_off():
        chunk = json.loads(payload)
    if not isinstance(chunk, dict):
        raise engine_gone("the engine sent a chunk that is no JSON object")
    if chunk.get("error"):
        raise from_engine(_status_of(chunk["error"]), error_text(payload.encode()))
    return chunk


def _status_of(error: object) -> int:
    """The status that an error in a stream would have had before its headers: its code."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and not isinstance(code, bool) else 500


def error_text(body: bytes) -> str:
    """What an engine's error says, in any of the shapes that engines use."""
    try:
        value = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()[:2000] or "the engine gave no reason"
    error = value.get("error", value.get("detail", value)) if isinstance(value, dict) else value
    if isinstance(error, list):
        return "; ".join(map(_field_error, error))
    if isinstance(error, dict):
        error = error.get("message", error)
    return error if isinstance(error, str) else json.dumps(error)


def _field_error(one: object) -> str:
    """One of the errors that pydantic lists: the field, and what is wrong with it."""
    if not isinstance(one, dict) or "msg" not in one:
        return one if isinstance(one, str) else json.dumps(one)
    path = [str(step) for step in one.get("loc") or () if step != "body"]
    return f"{'.'.join(path)}: {one['msg']}" if path else str(one["msg"])
