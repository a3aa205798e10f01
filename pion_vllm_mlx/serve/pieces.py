"""What a stream of chat chunks says, piece by piece: text, reasoning, whole tool calls, the end.

The two engines say it differently (``reasoning`` or ``reasoning_content``; tool calls whole or
in parts; usage in a chunk of its own or in the last one).  ``ChatReader`` knows that, so that
the translators of the APIs need not.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

#: in the first chunk that an engine of ours sends, for the front: ``prompt_tokens``,
#: ``cached_tokens``; usage itself comes with the last one.
PROMPT = "pion_prompt"
#: in the last choice of a reply: the stop sequence that ended it.
STOPPED_BY = "stop_reason"


@dataclass(frozen=True)
class Text:
    """A part of the reply."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A part of the model's thinking."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call; ``arguments`` is the JSON of an object."""

    call_id: str
    name: str
    arguments: str


Piece = Text | Reasoning | ToolCall


@dataclass
class Thoughts:
    """How many tokens of a reply were its model's thinking: each belongs to what is sent next.

    ``generated``: all of the reply so far.
    """

    generated: int = 0
    count: int = 0
    _sent: int = 0

    def sends(self, *, thought: bool) -> None:
        """A part of the reply is sent now, with all tokens since the one before."""
        self.count += thought * (self.generated - self._sent)
        self._sent = self.generated


@dataclass
class Outcome:
    """How a reply ended and what it took; token counts are the engine's.

    ``begun``: something of the reply itself has come; ``parts``: in so many chunks, ``thoughts`` of
    them with thinking, whose tokens are ``reasoning_tokens`` where the engine counts them.
    ``stop_sequence``: which of the request's own ended it, where the engine says so.
    """

    finish_reason: str | None = None
    stop_sequence: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    receipt: Json | None = None
    begun: bool = False
    parts: int = 0
    thoughts: int = 0
    reasoning_tokens: int | None = None

    @property
    def reasoned(self) -> int:
        """The tokens of the model's thinking; at least so many where nobody has counted them."""
        return self.thoughts if self.reasoning_tokens is None else self.reasoning_tokens

    @property
    def generated(self) -> int:
        """The tokens of the reply; at least so many of one that ended before it was counted."""
        return self.completion_tokens or self.parts

    def chat_usage(self) -> Json:
        """As chat completions report it; what has not been thought is not counted."""
        usage: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoned:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoned}
        return usage


@dataclass
class _PartialCall:
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> ToolCall:
        call_id = self.call_id or f"call_{uuid.uuid4().hex[:24]}"
        return ToolCall(call_id, self.name, object_json("".join(self.arguments)))


class ChatReader:
    """Reads the chunks of one choice; ``outcome`` fills as they come."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._calls: dict[int, _PartialCall] = {}

    def feed(self, chunk: Json) -> Iterator[Piece]:
        """The pieces of one chunk, in order; a tool call comes once something follows it."""
        self._count(chunk)
        for choice in (chunk.get("choices") or [])[:1]:
            delta = choice.get("delta") or choice.get("message") or {}
            thought = delta.get("reasoning") or delta.get("reasoning_content")
            said = delta.get("content") or choice.get("text")
            if thought or said or delta.get("tool_calls"):
                self.outcome.begun, self.outcome.parts = True, self.outcome.parts + 1
                self.outcome.thoughts += bool(thought)
            if thought or said:
                yield from self.flush()
            if thought:
                yield Reasoning(thought)
            if said:
                yield Text(said)
            yield from self._tool_parts(delta.get("tool_calls") or [])
            if choice.get("finish_reason") is not None:
                self.outcome.finish_reason = choice["finish_reason"]
                stopped = choice.get(STOPPED_BY)
                self.outcome.stop_sequence = stopped if isinstance(stopped, str) else None

    def flush(self) -> Iterator[ToolCall]:
        """The tool calls that were being put together; to be called at the end, too."""
        calls, self._calls = self._calls, {}
        yield from (call.whole() for call in calls.values() if call.name)

    def _tool_parts(self, parts: list[Json]) -> Iterator[ToolCall]:
        for part in parts:
            index = part.get("index")
            known = self._calls.get(index) if index is not None else None
            if known is None:
                # A new index: what came before is complete.
                yield from self.flush()
                key = index if index is not None else len(self._calls)
                known = self._calls[key] = _PartialCall()
            function = part.get("function") or {}
            known.call_id = known.call_id or part.get("id") or ""
            known.name = known.name or function.get("name") or ""
            arguments = function.get("arguments")
            if arguments is not None:
                known.arguments.append(
                    arguments if isinstance(arguments, str) else json.dumps(arguments)
                )

    def _count(self, chunk: Json) -> None:
        prompt = chunk.get(PROMPT)
        if isinstance(prompt, dict):
            self.outcome.prompt_tokens = prompt.get("prompt_tokens") or 0
            self.outcome.cached_tokens = prompt.get("cached_tokens") or 0
        usage = chunk.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            self.outcome.prompt_tokens = usage.get("prompt_tokens") or 0
            self.outcome.completion_tokens = usage.get("completion_tokens") or 0
            self.outcome.cached_tokens = details.get("cached_tokens") or 0
            counted = usage.get("completion_tokens_details") or {}
            self.outcome.reasoning_tokens = counted.get("reasoning_tokens")
        if isinstance(chunk.get("pion"), dict):
            self.outcome.receipt = chunk["pion"]


def object_json(arguments: str) -> str:
    """``arguments`` as the JSON of an object.

    A model may write anything; an API's client parses it as an object, so what is none is put
    into one, under ``input``.
    """
    if not arguments.strip():
        return "{}"
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return arguments if isinstance(value, dict) else json.dumps({"input": value})
