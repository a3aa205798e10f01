"""``stream_generate`` as mlx-lm's server calls it for a request that is not batched.

Such a request (a seed, a draft model, quantized KV, caches that cannot be merged) is not cut
into segments by mlx-lm.  Here its prompt is prefilled to each cut of its plan first, and its
reply is stored and noted while it grows, so that one of a process that was killed can be continued.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, maybe_quantize_kv_cache

from pion_vllm_mlx.cache.layers import cache_arrays
from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.serve.engine_mlx_lm_noted import Noted, Reply
from pion_vllm_mlx.serve.lineage_cache import LineageCache
from pion_vllm_mlx.serve.lineage_cache_plan import Plan

log = logging.getLogger("pion_vllm_mlx.serve")

DEFAULT_STEP_TOKENS = 2048
#: random states that depend on each other, at most, when they are computed.
STATES_A_GRAPH = 256

Sampler = Callable[[mx.array], mx.array]


class SingleRequests:
    """Stands for ``stream_generate``; called with keywords, as mlx-lm's server does.

    ``durable_tokens``: of a reply so many are stored at a time, at most; 0: as the journal likes.
    """

    def __init__(
        self, original: Callable[..., Iterator[Any]], cache: LineageCache, durable_tokens: int = 0
    ) -> None:
        self._original = original
        self._cache = cache
        self._durable_tokens = durable_tokens

    def __call__(self, **options: Any) -> Iterator[Any]:
        """The responses of ``stream_generate``."""
        plan, store = self._cache.single(options["prompt"]), self._cache.store
        if plan is None or store is None or options.get("input_embeddings") is not None:
            return self._original(**options)
        return self._served(plan, store, options)

    def _served(self, plan: Plan, store: LineageStore, options: dict[str, Any]) -> Iterator[Any]:
        options["logits_processors"] = with_history([*plan.tokens, *plan.resume], options)
        # what a draft model proposes is in the caches before it is accepted
        durable_tokens = 0 if options.get("draft_model") is not None else self._durable_tokens
        reply = Reply(plan, options["prompt_cache"], durable_tokens)
        noted = Noted(reply, store, self._cache.blocking)
        if plan.resume:
            self._cache.count("resumes")
            return noted.followed(_resumed(self._original, plan, options, noted))
        self._prefill(plan, options)
        options["sampler"] = noted.sampling(options["sampler"])
        return noted.followed(self._original(**options))

    def _prefill(self, plan: Plan, options: dict[str, Any]) -> None:
        """Brings the cache to the last token of the prompt, handing it over at each cut."""
        run = Prefill(options, len(plan.tokens) - plan.reused)
        began, at = time.perf_counter(), plan.reused
        ends = [(cut.position, str(cut.kind)) for cut in plan.cuts]
        for end, kind in [*ends, (len(plan.tokens) - 1, "final")]:
            if end <= at:
                continue
            run.extend(list(plan.tokens[at:end]))
            at = end
            # deep: mlx-lm writes into the arrays of a cache in place
            caches = copy.deepcopy(options["prompt_cache"])
            self._cache.insert_cache(None, list(plan.tokens[:end]), caches, cache_type=kind)
        self._cache.prefilling.measured(at - plan.reused, time.perf_counter() - began)
        options["prompt"] = list(plan.tokens[at:])
        if options.get("prompt_progress_callback") is not None:
            options["prompt_progress_callback"] = run.progress


class Prefill:
    """mlx-lm's own steps of a prefill, over the model and its draft model."""

    def __init__(self, options: dict[str, Any], total: int) -> None:
        self._options = options
        self._total = total
        self._step = int(options.get("prefill_step_size") or DEFAULT_STEP_TOKENS)
        self._callback = options.get("prompt_progress_callback")
        self._done = 0
        model, draft = options["model"], options.get("draft_model")
        layers = len(model.layers) if draft is not None else len(options["prompt_cache"])
        self._parts = [(model, 0, layers)]
        if draft is not None:
            self._parts.append((draft, layers, len(options["prompt_cache"])))

    def extend(self, tokens: list[int]) -> None:
        """Runs ``tokens`` through the models."""
        for start in range(0, len(tokens), self._step):
            chunk = mx.array(tokens[start : start + self._step])[None]
            caches = self._options["prompt_cache"]
            for model, first, last in self._parts:
                model(chunk, cache=caches[first:last])
            self._quantize(caches)
            mx.eval(cache_arrays(caches))
            mx.clear_cache()
            self._done += chunk.size
            if self._callback is not None:
                self._callback(self._done, self._total)

    def progress(self, done: int, total: int) -> None:
        """What is left of the prompt, told as a part of all of it."""
        if self._callback is not None:
            self._callback(self._total - total + done, self._total)

    def _quantize(self, caches: list[Any]) -> None:
        """As ``generate_step`` does it; of an engine without the flags, nothing."""
        if self._options.get("kv_bits") is not None and len(self._parts) == 1:
            maybe_quantize_kv_cache(  # type: ignore[no-untyped-call]
                caches,
                quantized_kv_start=self._options["quantized_kv_start"],
                kv_group_size=self._options["kv_group_size"],
                kv_bits=self._options["kv_bits"],
            )


def with_history(prompt: Sequence[int], options: dict[str, Any]) -> list[Any]:
    """Logits processors that see the whole prompt, as they do where nothing is reused.

    mlx-lm shows them the end of what it prefills itself, of any length.  Speculative decoding
    shows them the last token of a prompt only, and that is what they still see there.
    """
    processors = list(options.get("logits_processors") or [])
    if not processors or options.get("draft_model") is not None:
        return processors
    return [_Remembering(processor, prompt) for processor in processors]


class _Remembering:
    """A logits processor, and the tokens before those that it is shown first."""

    def __init__(self, processor: Callable[[mx.array, mx.array], mx.array], prompt: Any) -> None:
        self._processor, self._prompt = processor, list(prompt)
        self._before: mx.array | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._before is None:
            hidden = len(self._prompt) - tokens.size
            self._before = mx.array(self._prompt[: max(0, hidden)], dtype=mx.uint32)
        return self._processor(mx.concatenate([self._before, tokens]), logits)


def advanced(sampler: Sampler, count: int) -> Sampler:
    """A sampler that has the random state behind ``count`` tokens when it is called first.

    Each call takes as many keys as every other, whatever the logits; of those here nothing but
    the state is ever computed.
    """
    left = count

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal left
        while left:
            sampler(mx.zeros_like(logprobs))
            left -= 1
            if left % STATES_A_GRAPH == 0:
                mx.eval(mx.random.state)
        return sampler(logprobs)

    return sample


def _resumed(
    original: Callable[..., Iterator[Any]], plan: Plan, options: dict[str, Any], noted: Noted
) -> Iterator[Any]:
    """A reply from its first token on: what was noted, and what follows it."""
    detokenizer = options["tokenizer"].detokenizer
    nothing = mx.zeros((max(plan.resume) + 1,))
    for count, token in enumerate(plan.resume, 1):
        detokenizer.add_token(token)
        yield GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=nothing,
            from_draft=False,
            prompt_tokens=len(plan.tokens),
            prompt_tps=0.0,
            generation_tokens=count,
            generation_tps=0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
        )
    options["sampler"] = noted.sampling(advanced(options["sampler"], len(plan.resume)))
    options["prompt"] = plan.resume[-1:]
    options["max_tokens"] -= len(plan.resume)
    yield from going_on(original, options, detokenizer)


def going_on(
    original: Callable[..., Iterator[Any]], options: dict[str, Any], detokenizer: Any
) -> Iterator[Any]:
    """The rest of a reply, whose first tokens ``detokenizer`` has had.

    The text goes through one, since characters and spaces span tokens.
    """
    for response in original(**options):
        if response.finish_reason != "stop":
            detokenizer.add_token(response.token)
        if response.finish_reason is not None:
            detokenizer.finalize()
        yield replace(response, text=detokenizer.last_segment)
