"""OpenAI Responses: a chat reply as output items; pure.

The sequence is created, in_progress, for each item output_item.added, what it says and
output_item.done, then completed; sequence numbers start at 1.  A reply cut by the token limit is
``completed`` as an event, since clients wait for that, and ``incomplete`` in its status.
"""

from __future__ import annotations

import time
import uuid

from pion_vllm_mlx.serve.api_errors import ApiError
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.pieces import Piece, Reasoning, Text, ToolCall
from pion_vllm_mlx.serve.reply import Reply
from pion_vllm_mlx.serve.sse import Event, typed

#: settings of a request that its response repeats, with their defaults.
_ECHOED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}


class ResponsesReply(Reply):
    """``/v1/responses``; ``request`` is the client's body."""

    def __init__(self, model: str, request: Json) -> None:
        super().__init__(model)
        self.id = f"resp_{uuid.uuid4().hex}"
        self.created_at = int(time.time())
        given = {name: request[name] for name in _ECHOED if request.get(name) is not None}
        self._echoed = {**_ECHOED, **given}
        self._items: list[Json] = []
        self._said: list[str] = []  # of the open item
        self._open = False
        self._sequence = 0

    def start(self) -> list[Event]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def piece(self, piece: Piece) -> list[Event]:
        if isinstance(piece, Text):
            return self._say(piece.text)
        if isinstance(piece, Reasoning):
            return self._think(piece.text)
        return self._call(piece)

    def finish(self) -> list[Event]:
        closing = self._close()
        return [*closing, self._event("response.completed", response=self.whole())]

    def whole(self) -> Json:
        cut = self.outcome.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = self._usage()
        receipt = self.outcome.receipt
        return response if receipt is None else {**response, "pion": receipt}

    def failure(self, error: ApiError) -> list[Event]:
        code = error.code or error.kind(self.shape)
        failed = self._response("failed")
        failed["error"] = {"code": code, "message": error.message}
        # Clients of different ages look at one or the other.
        return [
            self._event("response.failed", response=failed),
            self._event(
                "error",
                code=code,
                message=error.message,
                param=None,
                error=error.body(self.shape)["error"],
            ),
        ]

    def _say(self, said: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_open("message"):
            events = self._close()
            item = {"type": "message", "role": "assistant", "content": []}
            events.append(self._begin("msg", item))
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append(self._part_event("content_part.added", part=part))
        self._said.append(said)
        return [*events, self._part_event("output_text.delta", delta=said, logprobs=[])]

    def _think(self, said: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_open("reasoning"):
            events = self._close()
            events.append(self._begin("rs", {"type": "reasoning", "summary": [], "content": []}))
        self._said.append(said)
        return [*events, self._part_event("reasoning_text.delta", delta=said)]

    def _call(self, call: ToolCall) -> list[Event]:
        events = self._close()
        item = {"type": "function_call", "call_id": call.call_id, "name": call.name}
        events.append(self._begin("fc", {**item, "arguments": ""}))
        arguments = call.arguments
        events.append(self._item_event("function_call_arguments.delta", delta=arguments))
        events.append(
            self._item_event("function_call_arguments.done", name=call.name, arguments=arguments)
        )
        self._items[-1]["arguments"] = arguments
        return events + self._close()

    def _is_open(self, kind: str) -> bool:
        return self._open and self._items[-1]["type"] == kind

    def _begin(self, prefix: str, item: Json) -> Event:
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self._items.append(item)
        self._said, self._open = [], True
        return self._event("response.output_item.added", output_index=self._index, item=dict(item))

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        events = self._close_parts(item, "".join(self._said))
        cut = self.outcome.finish_reason == "length" and item["type"] != "function_call"
        item["status"] = "incomplete" if cut else "completed"
        done = self._event("response.output_item.done", output_index=self._index, item=dict(item))
        return [*events, done]

    def _close_parts(self, item: Json, said: str) -> list[Event]:
        if item["type"] == "message":
            part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
            item["content"] = [part]
            return [
                self._part_event("output_text.done", text=said, logprobs=[]),
                self._part_event("content_part.done", part=part),
            ]
        if item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": said}]
            return [self._part_event("reasoning_text.done", text=said)]
        return []

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _part_event(self, kind: str, **fields: object) -> Event:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: object) -> Event:
        place = {"item_id": self._items[-1]["id"], "output_index": self._index}
        return self._event(f"response.{kind}", **place, **fields)

    def _event(self, kind: str, **fields: object) -> Event:
        self._sequence += 1
        return typed({"type": kind, "sequence_number": self._sequence, **fields})

    def _response(self, status: str) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [dict(item) for item in self._items],
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **self._echoed,
        }

    def _usage(self) -> Json:
        outcome = self.outcome
        return {
            "input_tokens": outcome.prompt_tokens,
            "input_tokens_details": {"cached_tokens": outcome.cached_tokens},
            "output_tokens": outcome.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": outcome.reasoned},
            "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        }
