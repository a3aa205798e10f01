"""mlx-lm's ResponseGenerator, whose prompts are planned against the lineage cache.

Everything here but ``generate`` and ``on_mlx_thread`` runs on the generation thread, which
owns MLX.  Continuous batching is mlx-lm's own: a plan only says into which segments a prompt
is cut, so that its cache is handed over at the end of each.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any, TypeVar

from pion_vllm_mlx.serve.engine_mlx_lm_anchor import Anchors
from pion_vllm_mlx.serve.lineage_cache import LineageCache, guarded
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, PlannedPrompt

log = logging.getLogger("pion_vllm_mlx.serve")

#: the exit code when the model cannot be loaded, or generation has come to an end.
FAILED = 1

server: Any = importlib.import_module("mlx_lm.server")

T = TypeVar("T")


class Generator(server.ResponseGenerator):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(self, model_provider: Any, cache: LineageCache) -> None:
        self.cache = cache
        self.ready = threading.Event()
        #: of the request that the calling HTTP thread asked for last.
        self.current = threading.local()
        self._anchors = Anchors()
        self._errands: Queue[tuple[Callable[[], Any], Future[Any]]] = Queue()
        super().__init__(model_provider, cache)

    # -- from other threads -------------------------------------------------------

    def generate(
        self, request: Any, generation_args: Any, progress_callback: Any = None
    ) -> tuple[Any, Any]:
        """As mlx-lm's; notes the request's context for ``current``."""
        found: tuple[Any, Any] = super().generate(request, generation_args, progress_callback)
        self.current.plan = vars(found[0]).get("prompt")
        return found

    def receipt(self) -> dict[str, Any] | None:
        """What the calling thread's request reused; None where it was not planned."""
        prompt = vars(self.current).get("plan")
        if not isinstance(prompt, PlannedPrompt):
            return None
        return prompt.plan.receipt(self.cache.prefilling)

    def on_mlx_thread(self, call: Callable[[], T], timeout: float = 60.0) -> T:
        """What ``call`` gives on the generation thread, between two steps of it."""
        future: Future[T] = Future()
        self._errands.put((call, future))
        return future.result(timeout)

    def rendered(self, request: Any, template_settings: Any) -> list[int]:
        """The tokens of a request, without planning it. Raises what templates raise."""
        args = SimpleNamespace(chat_template_kwargs=template_settings)
        found = super()._tokenize(self.model_provider.tokenizer, request, args)
        return list(found[0])

    # -- the generation thread -------------------------------------------------------

    def _generate(self) -> None:
        try:
            self.model_provider.load_default()
            self._attach()
            self.ready.set()
            super()._generate()
        except BaseException:
            log.exception("generation has come to an end")
            self.cache.close(timeout=1.0)
            os._exit(FAILED)  # the front starts another engine; this one would hang

    def _attach(self) -> None:
        provider = self.model_provider
        if provider.model is not None:
            guarded(lambda: self.cache.attach(provider.model, provider.draft_model), None)

    def _next_request(self, timeout: float | None = None) -> Any:
        while True:
            try:
                call, future = self._errands.get_nowait()
            except Empty:
                return super()._next_request(timeout)
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001  (it is raised where it was asked)
                future.set_exception(error)

    def _log_cache_stats(self) -> None:
        """Nothing: a request has one line, and that is its plan's."""

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        found = super()._tokenize(tokenizer, request, args)
        prompt, segments, kinds, *rest = found
        self._attach()
        if self.cache.store is None or len(prompt) < 2:
            return found
        if len(rest) > 1 and rest[1] is not None:
            log.info("prompt of %d tokens: images are not stored", len(prompt))
            return found
        plan = guarded(lambda: self._plan(tokenizer, request, args, list(prompt)), None)
        if plan is None:
            return found
        segments, kinds = plan.segments()
        return (PlannedPrompt(plan), segments, kinds, *rest)

    def _plan(self, tokenizer: Any, request: Any, args: Any, prompt: list[int]) -> Plan:
        settings = self._template_settings(args)
        anchor = self._anchors.length(tokenizer, request, settings, prompt)
        single = not self._is_batchable(args)
        plan = Plan(prompt, single=single, journal=self._journal(args, prompt) if single else "")
        return self.cache.plan(plan, anchor)

    def _template_settings(self, args: Any) -> Mapping[str, Any]:
        return {**self.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}

    def _journal(self, args: Any, prompt: list[int]) -> str:
        """The key of a reply's journal, "" where it could not be continued as it began.

        A draft model's own cache is not where its tokens are; log probabilities are not noted.
        """
        if self.model_provider.draft_model is not None or args.logprobs or args.top_logprobs > 0:
            return ""
        sampling = (args.sampling, args.logits, args.seed, args.stop_words, args.max_tokens)
        told = repr((self.model_provider.model_key, prompt, sampling))
        return hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
