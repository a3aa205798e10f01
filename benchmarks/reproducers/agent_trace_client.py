"""One request over HTTP, streamed, in the API that a server speaks; and lanes side by side."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.reproducers.agent_trace_script import Lane, Request
from pion_vllm_mlx.serve.anthropic_request import chat_body

Json = dict[str, Any]

TIMEOUT_SECONDS = 600.0


@dataclass
class Answer:
    """What came back, and when; times by ``time.perf_counter``.

    ``first`` is when the first visible piece of the reply came, or its end.  ``cached`` is None
    where the server does not say.  ``forwarded`` are tokens that the model saw for the prompt,
    None where other requests went on beside it.
    """

    name: str
    began: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    prompt: int = 0
    cached: int | None = None
    completion: int = 0
    text: str = ""
    receipt: Json = field(default_factory=dict)
    forwarded: int | None = None

    @property
    def first_token_seconds(self) -> float:
        """From the request to the first piece of its reply."""
        return self.first - self.began

    def saw_text(self, text: str | None) -> None:
        """Notes a piece of the reply."""
        if text:
            self.first = self.first or time.perf_counter()
            self.text += text


@dataclass(frozen=True)
class Api:
    """How one API is asked, and what its events say."""

    path: str
    body: Callable[[Json], Json]
    read: Callable[[Answer, Json], None]


def _read_anthropic(answer: Answer, event: Json) -> None:
    if event["type"] == "content_block_delta":
        delta = event["delta"]
        answer.saw_text(delta.get("text") or delta.get("thinking") or delta.get("partial_json"))
    elif event["type"] == "message_delta":
        used = event["usage"]
        answer.cached = int(used["cache_read_input_tokens"])
        answer.prompt = int(used["input_tokens"]) + answer.cached
        answer.completion = int(used["output_tokens"])
        answer.receipt = event.get("pion") or {}
    elif event["type"] == "error":
        raise RuntimeError(f"{answer.name}: {event}")


def _chat(body: Json) -> Json:
    """The same request as serve's front gives it to its engine."""
    return {**chat_body(body), "stream": True, "stream_options": {"include_usage": True}}


def _read_chat(answer: Answer, event: Json) -> None:
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        for field_name in ("content", "reasoning", "reasoning_content"):
            answer.saw_text(delta.get(field_name))
    if used := event.get("usage"):
        answer.prompt = int(used["prompt_tokens"])
        answer.completion = int(used["completion_tokens"])
        details = used.get("prompt_tokens_details") or {}
        answer.cached = details.get("cached_tokens")
    if "error" in event:
        raise RuntimeError(f"{answer.name}: {event}")


ANTHROPIC = Api("/v1/messages", lambda body: body, _read_anthropic)
CHAT = Api("/v1/chat/completions", _chat, _read_chat)


def ask(port: int, api: Api, request: Request) -> Answer:
    """The answer to one request. Raises ``RuntimeError`` for anything but a whole reply."""
    data = json.dumps(api.body(request.body)).encode()
    answer = Answer(request.name)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        answer.began = time.perf_counter()
        connection.request("POST", api.path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{request.name}: {response.status} {response.read()[:500]!r}")
        for event in _events(response):
            api.read(answer, event)
        answer.ended = time.perf_counter()
    finally:
        connection.close()
    answer.first = answer.first or answer.ended
    if not answer.prompt:
        raise RuntimeError(f"{request.name}: the reply ended without its usage")
    return answer


def _events(lines: Any) -> Iterator[Json]:
    for line in lines:
        data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data and data != b"[DONE]":
            yield json.loads(data)


def ask_lanes(lanes: Sequence[Lane], one: Callable[[Request], Answer]) -> list[Answer]:
    """Every lane by a thread of its own. Raises what a lane raised, once all have ended."""

    def run(lane: Lane) -> list[Answer]:
        return [one(request) for request in lane]

    with ThreadPoolExecutor(len(lanes)) as threads:
        return [answer for lane in threads.map(run, lanes) for answer in lane]
