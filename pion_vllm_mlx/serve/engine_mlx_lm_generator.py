"""mlx-lm's ResponseGenerator, whose prompts are planned against the lineage cache.

``generate`` prepares a request on the thread of its connection; what is said to run on the
generation thread finds that done.  Continuous batching is mlx-lm's own: a plan only says into
which segments a prompt is cut, so that its cache is handed over at the end of each.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from pion_vllm_mlx.cache.padding import pads_wrongly
from pion_vllm_mlx.serve.attended import Attending, Told, has_system_part, mark
from pion_vllm_mlx.serve.batch_processors import keep_processors
from pion_vllm_mlx.serve.engine_mlx_lm_anchor import Anchors
from pion_vllm_mlx.serve.engine_mlx_lm_left import Watched, connection_of, fasten
from pion_vllm_mlx.serve.engine_mlx_lm_prepare import (
    IMAGES,
    REFUSALS,
    Ends,
    Prepared,
    Unstored,
    has_images,
    settle_garbage,
    taken_from,
)
from pion_vllm_mlx.serve.engine_mlx_lm_quantized import not_quantized
from pion_vllm_mlx.serve.engine_mlx_lm_replies import FollowedReply, refuse_left
from pion_vllm_mlx.serve.lineage_cache import LineageCache, guarded
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, PlannedPrompt

log = logging.getLogger("pion_vllm_mlx.serve")

#: the exit code when the model cannot be loaded, or generation has come to an end.
FAILED = 1
#: how mlx-lm calls the model of its command line, and its draft model.
DEFAULT_MODEL = "default_model"

LookUp = Callable[[Plan, Callable[[], "int | None"]], "int | None"]
"""Has the store asked for a plan; gives what its second argument gives meanwhile."""

server: Any = importlib.import_module("mlx_lm.server")


class Generator(server.ResponseGenerator):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(
        self, model_provider: Any, cache: LineageCache, attending: Attending | None = None
    ) -> None:
        """With ``attending`` what it serves is served one at a time, as its caches want it."""
        self.cache = cache
        self._attending = attending
        self.ready = threading.Event()
        #: of the request that the calling HTTP thread asked for last.
        self.current = threading.local()
        self._anchors = Anchors()
        self._ends = Ends(cache.spread.stepped)
        #: what is asked for as the model that is loaded, and its tokenizer.
        self._served: tuple[Any, Any] | None = None
        self._model: Any = None
        self._alone = False
        cache.on_insert = self._ends.taken
        super().__init__(model_provider, cache)

    # -- from other threads -------------------------------------------------------

    def generate(
        self, request: Any, generation_args: Any, progress_callback: Any = None
    ) -> tuple[Any, Any]:
        """As mlx-lm's; prepares the request, and notes its context in ``current``."""
        self._prepare(request, generation_args)
        if self._attending is not None:
            mark(request, generation_args)
        connection = vars(self.current).get("connection")
        if not self._is_distributed:  # the others are sent the request, and nobody asks them
            fasten(request, connection)
        found: tuple[Any, Any] = super().generate(request, generation_args, progress_callback)
        self.current.context = found[0]
        self.current.reply = FollowedReply(generation_args.stop_words, connection)
        return found[0], self.current.reply.follow(found[1], self.model_provider.tokenizer)

    @property
    def lacks(self) -> str:
        """What there is nothing to explain of, where there is no store of conversations."""
        if self._attending is not None:
            return "store of conversations: --pion-attend"
        bypass = self.cache.bypass
        return f"store for this model: {bypass}" if bypass else "store"

    def receipt(self) -> dict[str, Any] | None:
        """What the calling thread's request reused; None where nothing was to be stored of it."""
        plan = self._plan_of_caller()
        if plan is not None:
            return plan.receipt(self.cache.prefilling)
        context = vars(self.current).get("context")
        if context is None or not isinstance(context.prompt, Unstored):
            return None
        return context.prompt.receipt(self.prompt()["cached_tokens"])

    def prompt(self) -> dict[str, int]:
        """How long the prompt of the calling thread's request is, and what of it was reused."""
        context = self.current.context
        reused = int(context.prompt_cache_count)
        return {"prompt_tokens": len(context.prompt), "cached_tokens": max(0, reused)}

    def stopped_by(self) -> str | None:
        """The stop sequence that ended the reply to the calling thread's request, if one did."""
        reply, tokenizer = self.reply(), self.model_provider.tokenizer
        return None if reply is None else reply.stopped_by(tokenizer)

    def reply(self) -> FollowedReply | None:
        """The one to the calling thread's request, once it has begun."""
        reply = vars(self.current).get("reply")
        return reply if isinstance(reply, FollowedReply) else None

    def ends(self) -> None:
        """The client of the calling thread is about to be told the end of its reply."""
        plan = self._plan_of_caller()
        if plan is not None and plan.noted is not None:
            plan.noted.end()

    def rendered(self, request: Any, template_settings: Any) -> list[int]:
        """The tokens of a request, without planning it. Raises what templates raise."""
        args = SimpleNamespace(chat_template_kwargs=template_settings)
        found = super()._tokenize(self.model_provider.tokenizer, request, args)
        return list(found[0])

    def _prepare(self, request: Any, args: Any) -> None:
        """Has a request of the model that is loaded tokenized, planned and looked up.

        Others reach a generation thread that serves nobody else: it does so itself.
        """
        served = self._served
        if served is None or served[0] != args.model or self._is_distributed:
            return
        if self.cache.store is None or has_images(request):
            return
        try:
            prepared = self._prepared(served[1], request, args, self.cache.look_up)
        except REFUSALS:
            return  # the generation thread says so, as it always does
        prepared.fasten(request)

    def _prepared(
        self, tokenizer: Any, request: Any, args: Any, look_up: LookUp | None = None
    ) -> Prepared:
        """A request's tokens, and its plan if it is to be stored. Raises what templates raise.

        The anchor is found while ``look_up`` has the store asked.
        """
        tokenized = self._some_tokens(tokenizer, request, args)
        prompt, _, _, *rest = tokenized
        if len(prompt) < 2:
            return Prepared(tokenizer, tokenized)
        if len(rest) > 1 and rest[1] is not None:
            log.info("prompt of %d tokens: %s", len(prompt), IMAGES)
            return Prepared(tokenizer, (Unstored(prompt, IMAGES), *tokenized[1:]))
        single = not self._is_batchable(args)
        journal = self._journal(args, list(prompt)) if single else ""
        plan = Plan(list(prompt), single=single, journal=journal)

        def anchor() -> int | None:
            return self._anchor(tokenizer, request, self._template_settings(args), prompt)

        found = anchor() if look_up is None else look_up(plan, anchor)
        return Prepared(tokenizer, tokenized, plan, found)

    def _anchor(
        self, tokenizer: Any, request: Any, settings: Mapping[str, Any], prompt: Sequence[int]
    ) -> int | None:
        """Where the system part of a prompt ends; agents with the same tools part before it."""
        store = self.cache.store
        if store is not None:
            shared = self._anchors.tools_length(tokenizer, request, settings, prompt)
            store.expect_beginning(list(prompt[:shared]))
        return self._anchors.length(tokenizer, request, settings, prompt)

    def _plan_of_caller(self) -> Plan | None:
        context = vars(self.current).get("context")
        prompt = None if context is None else context.prompt
        return prompt.plan if isinstance(prompt, PlannedPrompt) else None

    # -- the generation thread -------------------------------------------------------

    def _generate(self) -> None:
        try:
            self._load()
            self._attach()
            self._refuse_unattended()
            if self.model_provider.model is not None:
                default = server.ModelDescription(DEFAULT_MODEL, DEFAULT_MODEL, None)
                self._served = default, self.model_provider.tokenizer
            self.ready.set()
            mended = keep_processors()
            try:
                super()._generate()
            finally:
                mended.undo()
            self.cache.spread.finish()
        except BaseException:
            log.exception("generation has come to an end")
            self.cache.close(timeout=1.0)
            os._exit(FAILED)  # the front starts another engine; this one would hang

    def _load(self) -> None:
        try:
            self.model_provider.load_default()
        except (OSError, *REFUSALS) as error:
            name = self.cli_args.model
            log.error("the model %s cannot be loaded: %s", name, str(error) or repr(error))
            log.debug("where it failed", exc_info=True)
            os._exit(FAILED)
        for model in (self.model_provider.model, self.model_provider.draft_model):
            if model is None or self._is_distributed:
                continue
            wrong = not_quantized(model, vars(self.cli_args))
            if wrong is not None:
                log.error("%s", wrong)
                os._exit(FAILED)

    def _refuse_unattended(self) -> None:
        if self._attending is not None and self._attending.refusal:
            log.error("--pion-attend does not go with this model: %s", self._attending.refusal)
            os._exit(FAILED)

    def _attach(self) -> None:
        provider = self.model_provider
        if provider.model is None or provider.model is self._model:
            return
        self._model = provider.model
        if pads_wrongly(provider.model):
            self.cli_args.prompt_concurrency = 1
        guarded(lambda: self.cache.attach(provider.model, provider.draft_model), None)
        settle_garbage()

    def _next_request(self, timeout: float | None = None) -> Any:
        self._ends.tell()
        if timeout is not None:  # nobody is being served
            self.cache.spread.finish()
        found = super()._next_request(timeout)
        self.cache.spread.work(begun=found is not None)
        if found is None:
            return None
        queue, *rest = found
        watched = Watched(queue, connection_of(rest[0]), lambda: self._alone)
        queue = self._ends.behind(watched)
        return queue if self._attending is None else Told(queue, self._attending), *rest

    def _log_cache_stats(self) -> None:
        """Nothing: a request has one line, and that is its plan's."""

    def _serve_single(self, *request: Any) -> None:
        self._alone = True
        try:
            super()._serve_single(*request)
        finally:
            self._alone = False

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        refuse_left(connection_of(request))
        self._attach()
        self._served = args.model, tokenizer
        if self.cache.store is None:
            found = self._some_tokens(tokenizer, request, args)
            if self._attending is not None:
                settings, prompt = self._template_settings(args), found[0]
                anchor = self._anchors.length(tokenizer, request, settings, prompt)
                self._attending.begins(prompt, anchor or 0)
            return found
        prepared = taken_from(request, tokenizer) or self._prepared(tokenizer, request, args)
        plan = prepared.plan
        if plan is None or guarded(lambda: self.cache.plan(plan, prepared.anchor), None) is None:
            return prepared.tokenized
        segments, kinds = plan.segments()
        return (PlannedPrompt(plan), segments, kinds, *prepared.tokenized[3:])

    def _make_state_machine(
        self, model_key: Any, tokenizer: Any, stop_words: Sequence[str], *rest: Any, **more: Any
    ) -> Any:
        """As mlx-lm's; what it takes out of a reply's text are no stop words: those end it."""
        found = super()._make_state_machine(model_key, tokenizer, stop_words, *rest, **more)
        if not stop_words or not hasattr(server, "make_text_state_machine"):  # as in 0.31
            return found
        return found[0], super()._make_state_machine(model_key, tokenizer, [], *rest, **more)[1]

    def _is_batchable(self, args: Any) -> bool:
        attending = self._attending
        if attending is not None and attending.active and has_system_part(args):
            return False
        return bool(super()._is_batchable(args))

    def _some_tokens(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """mlx-lm's ``_tokenize``; generation for all would end over a prompt of no tokens.

        Raises ValueError for one.
        """
        tokenized = super()._tokenize(tokenizer, request, args)
        if not len(tokenized[0]):
            raise ValueError("the prompt has no tokens")
        return tokenized

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
