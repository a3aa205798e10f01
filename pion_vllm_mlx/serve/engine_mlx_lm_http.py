"""mlx-lm's HTTP handler with the engine protocol around it: key, receipt, ``/v1/pion``."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

from pion_vllm_mlx.cache.lineage.missed import Missed
from pion_vllm_mlx.errors import PionError
from pion_vllm_mlx.serve.engine_child import EngineLink, authorized
from pion_vllm_mlx.serve.engine_mlx_lm_generator import Generator
from pion_vllm_mlx.serve.engine_mlx_lm_prepare import REFUSALS
from pion_vllm_mlx.serve.engine_mlx_lm_sampling import fit_sampling, vocabulary_of
from pion_vllm_mlx.serve.explained import explained
from pion_vllm_mlx.serve.pieces import PROMPT, STOPPED_BY

log = logging.getLogger("pion_vllm_mlx.serve")

STATS, COUNT, EXPLAIN = "/v1/pion/stats", "/v1/pion/count_tokens", "/v1/pion/explain"
BACKLOG = 128
MAX_BODY_BYTES = 256 << 20
server: Any = importlib.import_module("mlx_lm.server")

Json = dict[str, Any]


class Listening(ThreadingHTTPServer):
    """A thread a connection; none of them keeps the process alive."""

    request_queue_size = BACKLOG
    daemon_threads = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        logging.getLogger().addFilter(_Once("Received tools but model does not support"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A traceback, but for a client that has left."""
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError):
            log.debug("the client has left: %s", error)
        else:
            super().handle_error(request, client_address)


class Refused(ValueError):
    """A request's settings are wrong."""


class _Once(logging.Filter):
    """Lets pass the first of those records that begin like ``beginning``; all others, too."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning, self._seen = beginning, False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        if not str(record.msg).startswith(self._beginning):
            return True
        seen, self._seen = self._seen, True
        return not seen


class Handler(server.APIHandler):  # type: ignore[misc]
    """Serves one connection for the front that ``link`` names."""

    link = EngineLink()
    response_generator: Generator
    _prompt_told = False

    def do_GET(self) -> None:
        """The statistics; everything else is mlx-lm's."""
        if not self._authorized():
            return
        if self.path == STATS:
            self._answer(200, self.response_generator.cache.stats())
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Count and explain; everything else is mlx-lm's."""
        if not self._authorized():
            return
        self._prompt_told = False
        self.response_generator.current.connection = self.connection
        if self.path == COUNT:
            self._answer_chat(lambda tokens: {"input_tokens": len(tokens)})
        elif self.path == EXPLAIN:
            self._explain()
        else:
            try:
                super().do_POST()
            except Refused as error:  # mlx-lm 0.31 leaves it to nobody
                self._answer(400, {"error": str(error)})

    def handle_health_check(self) -> None:
        """Healthy once the model is loaded."""
        generator = self.response_generator
        alive = generator.ready.is_set() and generator._generation_thread.is_alive()
        self._answer(200 if alive else 503, {"status": "ok" if alive else "unavailable"})

    def handle_models_request(self) -> None:
        """The model that is served."""
        model = {"id": self.response_generator.cli_args.model, "object": "model"}
        self._answer(200, {"object": "list", "data": [{**model, "created": int(time.time())}]})

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """mlx-lm's; a reply that cannot go on ends with the reason, where it breaks off there."""
        try:
            super().handle_completion(request, stop_words)
        except (PionError, *REFUSALS) as error:
            self._break_off(str(error) or type(error).__name__)

    def generate_response(self, *args: Any, **options: Any) -> Json:
        """mlx-lm's body or chunk; the whole body and the last chunk have the receipt.

        The first chunk of a stream says what its usage will say of the prompt.
        """
        reply = self.response_generator.reply()
        text, finish_reason, *counts = args
        if reply is not None:
            finish_reason = reply.reason(finish_reason)
        response: Json = super().generate_response(text, finish_reason, *counts, **options)
        if reply is not None:
            reply.thoughts.sends(thought=bool(options.get("reasoning_text")))
        if self.stream and not self._prompt_told:
            self._prompt_told = True
            response[PROMPT] = self.response_generator.prompt()
        if "usage" in response or response["choices"][0].get("finish_reason"):
            self.response_generator.ends()
            stopped = self.response_generator.stopped_by()
            if stopped is not None:
                response["choices"][0][STOPPED_BY] = stopped
            self._add_receipt(response)
        return response

    def completion_usage_response(self, *args: Any, **options: Any) -> Json:
        """mlx-lm's chunk of usage, with the receipt; thoughts are counted in it."""
        response: Json = super().completion_usage_response(*args, **options)
        reply = self.response_generator.reply()
        if reply is not None and (count := reply.thoughts.count):
            response["usage"]["completion_tokens_details"] = {"reasoning_tokens": count}
        self._add_receipt(response)
        return response

    def validate_model_parameters(self) -> None:
        """mlx-lm's checks, and those that spare the other requests. Raises Refused."""
        try:
            super().validate_model_parameters()
            self._fit_sampling()
        except ValueError as error:
            raise Refused(str(error)) from error

    def _fit_sampling(self) -> None:
        provider = self.response_generator.model_provider
        if provider.model is not None:
            fitted = fit_sampling(
                self.__dict__, lambda: vocabulary_of(provider.model, provider.tokenizer)
            )
            self.__dict__.update(fitted)

    def log_message(self, format: str, *args: Any) -> None:
        """The front has a line a request already."""
        log.debug(format, *args)

    # -- inside -----------------------------------------------------------------

    def _authorized(self) -> bool:
        if authorized(self.link, self.headers.get("Authorization")):
            return True
        self._answer(401, {"error": "this engine serves its front only"})
        return False

    def _add_receipt(self, response: Json) -> None:
        receipt = self.response_generator.receipt()
        if receipt is not None:
            response["pion"] = receipt

    def _break_off(self, reason: str) -> None:
        log.error("a reply cannot go on: %s", reason)
        error = {"error": {"message": f"the reply cannot go on: {reason}", "code": 503}}
        if self.stream:
            self.wfile.write(f"data: {json.dumps(error)}\n\n".encode())
            self.wfile.flush()
        else:  # the status is not sent yet
            self._headers_buffer: list[bytes] = []
            self._answer(503, error)

    def _answer(self, status: int, value: Any) -> None:
        body = json.dumps(value, ensure_ascii=False, default=str).encode()
        self._set_completion_headers(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _answer_chat(self, told: Callable[[list[int]], Json]) -> None:
        """Answers with what ``told`` says of a chat body's tokens."""
        try:
            body = self._body()
            tokens = self._rendered(body)
        except REFUSALS as error:
            self._answer(400, {"error": str(error) or type(error).__name__})
            return
        self._answer(200, told(tokens))

    def _explain(self) -> None:
        cache = self.response_generator.cache
        if cache.store is None:
            self._answer(200, {"sentence": f"there is no {self.response_generator.lacks}"})
            return
        length = int(self.headers.get("Content-Length") or 0)
        if length <= len("{}"):
            self.rfile.read(length)
            if cache.last_miss is None:
                self._answer(200, {"sentence": "no request has missed so far"})
            else:
                self._answer(200, self._explained_miss(cache.last_miss))
            return
        self._answer_chat(self._explained)

    def _explained(self, tokens: list[int]) -> Json:
        generator = self.response_generator
        store, decode = generator.cache.store, generator.model_provider.tokenizer.decode
        assert store is not None
        return generator.cache.beside(lambda: explained(store.explain(tokens), decode, tokens))

    def _explained_miss(self, missed: Missed) -> Json:
        generator = self.response_generator
        store, decode = generator.cache.store, generator.model_provider.tokenizer.decode
        assert store is not None
        told = generator.cache.beside(lambda: missed.explained(store))
        return explained(told, decode, missed.ids.tolist())

    def _body(self) -> Json:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= MAX_BODY_BYTES:
            raise ValueError("the body is too large")
        body = json.loads(self.rfile.read(length))
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        return body

    def _rendered(self, body: Json) -> list[int]:
        """The tokens of a body, as the generation thread would make them."""
        if "messages" not in body:
            text = server.CompletionRequest("text", body["prompt"], [], None, None)
            return self.response_generator.rendered(text, None)
        request = server.CompletionRequest(
            "chat", "", body["messages"], body.get("tools") or None, body.get("role_mapping")
        )
        return self.response_generator.rendered(request, body.get("chat_template_kwargs"))
