"""Anthropic Messages: a chat reply as content blocks; pure.

The sequence is message_start, for each block content_block_start, its deltas (one for a tool's
whole input, a signature after thinking) and content_block_stop, then message_delta with the stop
reason and the usage, and message_stop. message_start says how long the prompt is and what of it
was reused: it waits until the engine has said so, and pings come before it.
"""

from __future__ import annotations

import json
import uuid

from pion_vllm_mlx.serve.api_errors import ApiError, Shape
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.pieces import Outcome, Piece, Reasoning, Text, ToolCall
from pion_vllm_mlx.serve.reply import Reply
from pion_vllm_mlx.serve.sse import Event, typed

#: clients send a thinking block back only with a signature; it is dropped here, so none is checked.
SIGNATURE = "cGlvbg=="
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class AnthropicReply(Reply):
    """``/v1/messages``."""

    shape = Shape.ANTHROPIC

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.id = f"msg_{uuid.uuid4().hex[:24]}"
        self._blocks: list[Json] = []
        self._said: list[str] = []  # of the open block: text or thinking, put together at its end
        self._open = False
        self._started = False

    def feed(self, chunk: Json) -> list[Event]:
        events = super().feed(chunk)
        return self._begun(events) if events or self.outcome.prompt_tokens else []

    def end(self) -> list[Event]:
        return self._begun(super().end())

    def keepalive(self) -> bytes:
        return typed({"type": "ping"}).encode()

    def piece(self, piece: Piece) -> list[Event]:
        if isinstance(piece, Text):
            return self._speak("text", piece.text)
        if isinstance(piece, Reasoning):
            return self._speak("thinking", piece.text)
        return self._call(piece)

    def finish(self) -> list[Event]:
        closing = self._close()
        delta: Json = {
            "type": "message_delta",
            "delta": {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence},
            "usage": usage(self.outcome),
        }
        if self.outcome.receipt is not None:
            delta["pion"] = self.outcome.receipt
        return [*closing, typed(delta), typed({"type": "message_stop"})]

    def whole(self) -> Json:
        message = self._message(self._blocks, self.stop_reason, usage(self.outcome))
        message["stop_sequence"] = self.stop_sequence
        receipt = self.outcome.receipt
        return message if receipt is None else {**message, "pion": receipt}

    def failure(self, error: ApiError) -> list[Event]:
        return [typed(error.body(self.shape))]

    @property
    def stop_reason(self) -> str:
        """Why the reply ended; a tool to run outweighs what the engine calls it."""
        reason = self.outcome.finish_reason or ""
        if reason != "length" and any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use"
        if reason == "stop" and self.outcome.stop_sequence is not None:
            return "stop_sequence"
        return _STOP_REASONS.get(reason, "end_turn")

    @property
    def stop_sequence(self) -> str | None:
        """The stop sequence, where one is the stop reason."""
        return self.outcome.stop_sequence if self.stop_reason == "stop_sequence" else None

    def _message(self, content: list[Json], stop_reason: str | None, used: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": used,
        }

    def _begun(self, events: list[Event]) -> list[Event]:
        """``events``, after message_start where it has not been said yet."""
        if self._started:
            return events
        self._started = True
        message = self._message([], None, {**usage(self.outcome), "output_tokens": 0})
        return [typed({"type": "message_start", "message": message}), *events]

    def _speak(self, kind: str, said: str) -> list[Event]:
        """``kind`` names the block's type, its field and its delta alike."""
        events: list[Event] = []
        if not self._open or self._blocks[-1]["type"] != kind:
            events = self._close()
            block = {"type": kind, kind: ""}
            if kind == "thinking":
                block["signature"] = ""
            events.append(self._begin(block))
        self._said.append(said)
        return [*events, self._delta({"type": f"{kind}_delta", kind: said})]

    def _call(self, call: ToolCall) -> list[Event]:
        events = self._close()
        block = {"type": "tool_use", "id": call.call_id, "name": call.name}
        events.append(self._begin({**block, "input": {}}))
        events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        self._blocks[-1] = {**block, "input": json.loads(call.arguments)}
        return events + self._close()

    def _begin(self, block: Json) -> Event:
        self._blocks.append(dict(block))
        self._open = True
        self._said = []
        index = len(self._blocks) - 1
        return typed({"type": "content_block_start", "index": index, "content_block": block})

    def _delta(self, delta: Json) -> Event:
        index = len(self._blocks) - 1
        return typed({"type": "content_block_delta", "index": index, "delta": delta})

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        block, events = self._blocks[-1], []
        if block["type"] != "tool_use":
            block[block["type"]] = "".join(self._said)
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        index = len(self._blocks) - 1
        return [*events, typed({"type": "content_block_stop", "index": index})]


def usage(outcome: Outcome) -> Json:
    """Tokens as Anthropic counts them: what was read from the cache is no input."""
    return {
        "input_tokens": outcome.prompt_tokens - outcome.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": outcome.cached_tokens,
        "output_tokens": outcome.completion_tokens,
    }
