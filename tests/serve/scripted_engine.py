"""An engine process without a model: it speaks the engine protocol and says what it is told to.

``python -m tests.serve.scripted_engine --ready-fd … --lifeline-fd …`` answers a chat request by
the text of its last user message:

- ``say WORDS``: the words, one a chunk; ``think A / WORDS``: A as reasoning first;
- ``call NAME JSON [NAME JSON…]``: tool calls, separated by `` && ``;
- ``parts NAME JSON``: one tool call whose arguments come in parts;
- ``cut WORDS``: as say, ended by the token limit;
- ``slow N``: N chunks, one every 20 ms; ``prefill N``: N keepalives, then a word;
- ``refuse STATUS TEXT``: an error before the first byte; ``fail TEXT``: one after it;
- ``die``: SIGKILL of itself in the middle; ``echo``: the request's body as JSON;
- ``sick``: from now on ``/health`` says 503, and this request fails;
- anything else is repeated.

Prompt tokens are the words of all messages; a request that was seen before was cached but for
one token.  ``/v1/pion/stats`` tells how many replies are running and how many were cut off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pion_vllm_mlx.serve import engine_child
from pion_vllm_mlx.serve.pion_flags import add_pion_flags, add_serve_flags

Json = dict[str, Any]


class State:
    """What the engine's threads share."""

    def __init__(self, options: argparse.Namespace, link: engine_child.EngineLink) -> None:
        self.options, self.link = options, link
        self.lock = threading.Lock()
        self.seen: set[str] = set()
        self.sick = False
        self.stats = {"running": 0, "cut_off": 0, "requests": 0}

    def count(self, name: str, by: int = 1) -> None:
        with self.lock:
            self.stats[name] += by


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._authorized():
            return
        if self.path == "/health":
            self._json(503 if self.state.sick else 200, {"status": "scripted"})
        elif self.path.startswith("/v1/models"):
            self._json(200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        elif self.path == "/v1/pion/stats":
            stats = {"pion": "disabled"} if self.state.options.no_pion else dict(self.state.stats)
            self._json(200, stats)
        else:
            self._json(404, {"error": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._authorized():
            return
        if self.path == "/v1/pion/count_tokens":
            self._json(200, {"input_tokens": _words(body)})
        elif self.path == "/v1/pion/explain":
            self._json(200, {"asked": body})
        else:
            self.state.count("requests")
            self._reply(body, chat=self.path == "/v1/chat/completions")

    def _authorized(self) -> bool:
        if engine_child.authorized(self.state.link, self.headers.get("Authorization")):
            return True
        self._json(401, {"error": "wrong key"})
        return False

    def _json(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _reply(self, body: Json, chat: bool) -> None:
        said = _last_user(body) if chat else body["prompt"]
        verb, _, rest = said.partition(" ")
        if verb == "refuse":
            status, _, text = rest.partition(" ")
            self._json(int(status), {"error": text})
            return
        if verb == "sick":
            self.state.sick = True
            self._json(500, {"error": {"message": "generation thread died"}})
            return
        if not body.get("stream"):
            self._json(200, _whole(self.state, body, said, chat))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.state.count("running")
        try:
            for chunk in _chunks(self.state, body, said, chat):
                self.wfile.write(chunk)
                self.wfile.flush()
        except OSError:
            self.state.count("cut_off")
        finally:
            self.state.count("running", -1)


def _chunks(state: State, body: Json, said: str, chat: bool) -> Iterator[bytes]:
    number, reason = 0, "stop"
    for part in _parts(body, said):
        if isinstance(part, bytes):
            yield part
            continue
        if "finish_reason" in part:
            reason = part["finish_reason"]
            continue
        number += 1
        yield _data(_chunk(part, None, chat))
    yield _data(_chunk({}, reason, chat))
    last = {"id": "chatcmpl-1", "choices": [], **_ending(state, body, number)}
    yield _data(last) + b"data: [DONE]\n\n"


def _whole(state: State, body: Json, said: str, chat: bool) -> Json:
    """The words of a reply that does not stream."""
    deltas = [part for part in _parts(body, said) if isinstance(part, dict)]
    words = [part["content"] for part in deltas if "content" in part]
    whole = _chunk({"content": "".join(words)}, "stop", chat)
    if chat:
        whole["choices"][0]["message"] = whole["choices"][0].pop("delta")
    return {**whole, **_ending(state, body, len(words)), "logprobs_asked": body.get("logprobs")}


def _ending(state: State, body: Json, number: int) -> Json:
    """Usage and receipt of a reply of ``number`` tokens."""
    prompt = _words(body)
    key = json.dumps(body.get("messages") or body.get("prompt"))
    with state.lock:
        cached = prompt - 1 if key in state.seen else 0
        state.seen.add(key)
    usage = {"prompt_tokens": prompt, "completion_tokens": number}
    usage["total_tokens"] = prompt + number
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    receipt = {"tier": "memory", "tokens_reused": 1, "ms_saved": 12.5}
    return {"usage": {**usage, **details}, "pion": receipt}


def _parts(body: Json, said: str) -> Iterator[Json | bytes]:
    """Deltas, or bytes to be sent as they are."""
    verb, _, rest = said.partition(" ")
    if verb == "think":
        thought, _, rest = rest.partition(" / ")
        yield from ({"reasoning": word} for word in _spaced(thought))
        yield from ({"content": word} for word in _spaced(rest))
    elif verb == "call":
        for index, call in enumerate(rest.split(" && ")):
            yield {"tool_calls": [_call(index, call)]}
        yield {"finish_reason": "tool_calls"}
    elif verb == "parts":
        whole = _call(0, rest)
        arguments = whole["function"].pop("arguments")
        yield {"tool_calls": [whole]}
        for letter in arguments:
            yield {"tool_calls": [{"index": 0, "function": {"arguments": letter}}]}
        yield {"finish_reason": "tool_calls"}
    elif verb == "slow":
        for number in range(int(rest)):
            time.sleep(0.02)
            yield {"content": f"{number} "}
    elif verb == "prefill":
        yield from (f": keepalive {n}/{rest}\n\n".encode() for n in range(int(rest)))
        yield {"content": "done"}
    elif verb == "fail":
        yield {"content": "so far"}
        yield _data({"error": {"message": rest}})
    elif verb == "die":
        yield {"content": "so far"}
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "echo":
        yield {"content": json.dumps(body)}
    else:
        yield from ({"content": word} for word in _spaced(rest if verb in ("say", "cut") else said))
        yield {"finish_reason": "length" if verb == "cut" else "stop"}


def _call(index: int, text: str) -> Json:
    name, _, arguments = text.partition(" ")
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call-{index}", "type": "function", "function": function}


def _chunk(delta: Json, reason: str | None, chat: bool) -> Json:
    choice: Json = {"index": 0, "finish_reason": reason}
    if chat:
        choice["delta"] = {"role": "assistant", **delta}
    else:
        choice["text"] = delta.get("content", "")
    return {"id": "chatcmpl-1", "model": "default_model", "created": 1, "choices": [choice]}


def _data(body: Json) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _spaced(text: str) -> Iterator[str]:
    for number, word in zip(itertools.count(), text.split(" "), strict=False):
        yield f" {word}" if number else word


def _last_user(body: Json) -> str:
    for message in reversed(body["messages"]):
        if message["role"] == "user":
            content = message["content"]
            return content if isinstance(content, str) else content[-1].get("text", "")
    return "nothing"


def _words(body: Json) -> int:
    if "prompt" in body:
        return len(body["prompt"].split())
    return sum(len(str(message.get("content")).split()) for message in body["messages"])


def main() -> None:
    parser = argparse.ArgumentParser()
    engine_child.add_link_flags(parser)
    add_pion_flags(parser)
    add_serve_flags(parser)
    parser.add_argument("--log-level")
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--fail-to-start", type=int, default=None)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    options = parser.parse_args()
    link = engine_child.engine_link(options)
    engine_child.watch_lifeline(link)
    print(f"engine loading: pid {os.getpid()}", flush=True)
    time.sleep(options.load_seconds)
    if options.fail_to_start is not None:
        sys.exit(options.fail_to_start)
    Handler.state = State(options, link)
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    engine_child.report_ready(link, server.server_address[1], options.model)
    server.serve_forever()


if __name__ == "__main__":
    main()
