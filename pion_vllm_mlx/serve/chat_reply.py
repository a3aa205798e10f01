"""Chat and text completions for OpenAI's clients: the engine's own chunks, under one name.

A stream passes every chunk on as it is, but for the model's name.  The chunk that says why the
reply ended waits for the next one: where the client asked for no usage, the engine's receipt
moves from the usage chunk into it.
"""

from __future__ import annotations

import time
import uuid

from pion_vllm_mlx.serve.api_errors import ApiError
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.pieces import PROMPT, Piece, Reasoning, Text, ToolCall
from pion_vllm_mlx.serve.reply import Reply
from pion_vllm_mlx.serve.sse import DONE, Event


class _PassedOn(Reply):
    """The common part of both endpoints."""

    chunk_object = ""

    def __init__(self, model: str, include_usage: bool = False) -> None:
        super().__init__(model)
        self.include_usage = include_usage
        self.created = int(time.time())
        self.id = ""
        self.fingerprint: object = None
        self._held: Json | None = None

    def feed(self, chunk: Json) -> list[Event]:
        for piece in self.reader.feed(chunk):
            self.piece(piece)
        self.id = self.id or str(chunk.get("id") or "")
        self.fingerprint = self.fingerprint or chunk.get("system_fingerprint")
        named = {**chunk, "object": self.chunk_object, "model": self.model}
        named.pop(PROMPT, None)
        choices = chunk.get("choices") or []
        if not choices and not self.include_usage:
            if self._held is not None and "pion" in chunk:
                self._held["pion"] = chunk["pion"]
            return []
        passed = self._release()
        if choices and choices[0].get("finish_reason") is not None:
            self._held = named
            return passed
        return [*passed, Event(named)]

    def end(self) -> list[Event]:
        for call in self.reader.flush():
            self.piece(call)
        return self.finish()

    def finish(self) -> list[Event]:
        return [*self._release(), Event(DONE)]

    def failure(self, error: ApiError) -> list[Event]:
        return [*self._release(), Event(error.body(self.shape))]

    def _release(self) -> list[Event]:
        held, self._held = self._held, None
        return [] if held is None else [Event(held)]

    def _body(self, prefix: str, object_name: str, choice: Json) -> Json:
        outcome = self.outcome
        body = {
            "id": self.id or f"{prefix}-{uuid.uuid4().hex}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, "finish_reason": outcome.finish_reason, **choice}],
            "usage": outcome.chat_usage(),
        }
        if self.fingerprint is not None:
            body["system_fingerprint"] = self.fingerprint
        return body if outcome.receipt is None else {**body, "pion": outcome.receipt}


class ChatReply(_PassedOn):
    """``/v1/chat/completions``."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, include_usage: bool = False) -> None:
        super().__init__(model, include_usage)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []

    def piece(self, piece: Piece) -> list[Event]:
        if isinstance(piece, Text):
            self._texts.append(piece.text)
        elif isinstance(piece, Reasoning):
            self._thoughts.append(piece.text)
        else:
            self._calls.append(_tool_call(piece))
        return []

    def whole(self) -> Json:
        message: Json = {"role": "assistant", "content": "".join(self._texts)}
        if self._thoughts:
            message["reasoning"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        return self._body("chatcmpl", "chat.completion", {"message": message, "logprobs": None})


class CompletionReply(_PassedOn):
    """``/v1/completions``."""

    chunk_object = "text_completion"

    def __init__(self, model: str, include_usage: bool = False) -> None:
        super().__init__(model, include_usage)
        self._texts: list[str] = []

    def piece(self, piece: Piece) -> list[Event]:
        if isinstance(piece, Text):
            self._texts.append(piece.text)
        return []

    def whole(self) -> Json:
        choice = {"text": "".join(self._texts), "logprobs": None}
        return self._body("cmpl", "text_completion", choice)


def _tool_call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
