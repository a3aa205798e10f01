"""Stop sequences with vllm-mlx, whose batching engine takes them and stops at none.

The words of an HTTP request are in a context variable while its reply is generated.  Between
the scheduler and the server the text of the reply passes through them: what could become
a stop word waits; at the first whole one the reply ends before it, and the scheduler is told to
give the request up.  The last chunk says which one it was, as mlx-lm's engine does.  Its usage says
how many tokens were thoughts: those that came since the chunk before one with a thought.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from pion_vllm_mlx.cache.vllm_mlx_backend_seams import Replacements, Seam, check, has_mllm
from pion_vllm_mlx.cache.vllm_mlx_backend_usage import App, Message, Receive, Send
from pion_vllm_mlx.serve.engine_vllm_mlx_app import (
    CHAT,
    COMPLETIONS,
    body_of,
    replayed,
)
from pion_vllm_mlx.serve.pieces import STOPPED_BY, Thoughts
from pion_vllm_mlx.serve.stops import Stops

STREAM_OUTPUTS = Seam(
    "vllm_mlx.engine_core", "EngineCore.stream_outputs", ("self", "request_id", "timeout")
)
#: models that read images have a scheduler of their own
MLLM_STREAM_OUTPUTS = Seam(
    "vllm_mlx.mllm_scheduler", "MLLMScheduler.stream_outputs", ("self", "request_id")
)


class _Reply(Stops):
    """The text of one reply, and how much of it was thought."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        self.thoughts = Thoughts()


_STOPS: ContextVar[_Reply | None] = ContextVar("pion_stops", default=None)


def patch_stops() -> Replacements:
    """Has replies end at the words of ``StopLayer``. Raises PionMlxCompatError."""
    seams = [STREAM_OUTPUTS, *([MLLM_STREAM_OUTPUTS] if has_mllm() else [])]
    check(seams)
    replacements = Replacements()
    for seam in seams:
        replacements.replace(seam, _ending(vars(seam.owner())[seam.name]))
    return replacements


def _ending(original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    @functools.wraps(original)
    async def stream_outputs(self: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        outputs: Any = original(self, *args, **options)
        stops = _STOPS.get()
        async with contextlib.aclosing(outputs):  # a request that goes on is given up
            async for output in outputs:
                yield output if stops is None else _stopped(output, stops)
                if stops is not None and stops.word is not None:
                    return

    return stream_outputs


def _stopped(output: Any, stops: _Reply) -> Any:
    """An output with the text that is certain; the last one where a stop word has come."""
    stops.thoughts.generated = output.completion_tokens
    text = stops.feed(output.new_text, last=output.finished)
    if stops.word is None:
        return dataclasses.replace(output, new_text=text)
    end = {"finished": True, "finish_reason": "stop", "output_text": stops.said}
    return dataclasses.replace(output, new_text=text, **end)


class StopLayer:
    """An ASGI layer around vllm-mlx's application that knows the stop words of a request."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] not in (CHAT, COMPLETIONS):
            await self._app(scope, receive, send)
            return
        body = await body_of(receive)
        stops = _Reply(stop_words(body))
        token = _STOPS.set(stops)

        async def told(message: Message) -> None:
            await send(_completed(message, stops))

        try:
            await self._app(scope, replayed(body, receive), told)
        finally:
            _STOPS.reset(token)


def stop_words(body: bytes) -> list[str]:
    """The stop sequences of a request's body; none where vllm-mlx refuses it itself."""
    try:
        words = json.loads(body).get("stop") if b'"stop"' in body else None
    except (ValueError, AttributeError):
        return []
    words = [words] if isinstance(words, str) else words
    return [one for one in words if isinstance(one, str)] if isinstance(words, list) else []


def _completed(message: Message, stops: _Reply) -> Message:
    """A part of a stream; the chunk that ends the reply says why, usage what was thought."""
    body = bytes(message.get("body", b""))
    if not body.startswith(b"data: {"):
        return message
    stops.thoughts.sends(thought=b'"reasoning_content"' in body)
    ends = stops.word is not None and b'"finish_reason"' in body
    if not ends and not (stops.thoughts.count and b'"completion_tokens"' in body):
        return message
    lines = [_line(line, stops) for line in body.split(b"\n")]
    return {**message, "body": b"\n".join(lines)}


def _line(line: bytes, stops: _Reply) -> bytes:
    if not line.startswith(b"data: {"):
        return line
    with contextlib.suppress(ValueError):
        chunk = json.loads(line[6:])
        for choice in chunk.get("choices") or ():
            if stops.word is not None and choice.get("finish_reason") == "stop":
                choice[STOPPED_BY] = stops.word
        if stops.thoughts.count and chunk.get("usage"):
            chunk["usage"]["completion_tokens_details"] = {"reasoning_tokens": stops.thoughts.count}
        return b"data: " + json.dumps(chunk, ensure_ascii=False).encode()
    return line
