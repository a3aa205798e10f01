"""The patches of vllm-mlx's scheduler: prompts are cut, and kept where they are cut.

mlx-lm's BatchGenerator prefills a prompt segment by segment and says after each step which
segment ended; several prompts go on at once.  A prompt that was scheduled is cut into more
segments before its prefill begins, and ``PrefillWatch`` takes its cache out of the batch at
each cut and at its last token but one.  That works for every family, also where vllm-mlx's own
callbacks are off (mlx-lm >= 0.31) and where a cache cannot be shortened afterwards.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from pion_vllm_mlx.cache.common_prefix import copied_ids
from pion_vllm_mlx.cache.completion import token_ids
from pion_vllm_mlx.cache.lineage.types import KeepKind
from pion_vllm_mlx.cache.padding import pads_wrongly
from pion_vllm_mlx.cache.vllm_mlx_backend_anchor import AnchorTexts
from pion_vllm_mlx.cache.vllm_mlx_backend_cache import UNEXPECTED, PionPrefixCache
from pion_vllm_mlx.cache.vllm_mlx_backend_lookup import Lookup
from pion_vllm_mlx.cache.vllm_mlx_backend_seams import (
    ADD_TO_SCHEDULER,
    CREATE_GENERATOR,
    SCHEDULE_WAITING,
    STORE_PROMPT,
    Replacements,
    Seam,
)
from pion_vllm_mlx.cache.vllm_mlx_backend_steps import Steps

log = logging.getLogger(__name__)


class NoTokens(ValueError):
    """A prompt of no tokens: the step that it is scheduled in would fail for every request."""


class PrefillWatch:
    """One BatchGenerator's prompts: where each is cut, and what is kept of it."""

    def __init__(self, scheduler: Any, generator: Any) -> None:
        """Takes the place of ``generator.next``."""
        self._scheduler = weakref.proxy(scheduler)
        self._generator = generator
        cache: PionPrefixCache = scheduler.memory_aware_cache
        cache.in_steps = True
        self._steps = Steps(generator, cache.spread)
        self._cuts: dict[int, dict[int, KeepKind]] = {}
        self._last_kept: dict[int, int] = {}
        if pads_wrongly(scheduler.model):
            # Prompts of different lengths would be padded, and the padding would be computed
            # into the recurrent state: one prompt at a time is right.
            generator.prefill_batch_size = 1

    def next(self) -> Any:
        """One step of the generator; what ended a segment in it is kept."""
        tokens, seconds = self._prefilled()
        result = self._steps.next()
        self._measure(tokens, seconds)
        prompts, generated = result
        try:
            with mx.stream(self._generator.stream):
                for response in prompts:
                    self._after_prompt(response)
                for response in generated:
                    self._after_token(response)
        except UNEXPECTED:
            # Raised from here it would end every request of the batch.
            log.exception("a prompt could not be kept")
        return result

    def cut(self, request: Any) -> None:
        """Cut a prompt that was just scheduled and whose prefill has not begun."""
        cache: PionPrefixCache = self._scheduler.memory_aware_cache
        uid, reused = request.batch_uid, int(request.cached_tokens)
        self._steps.busy()
        self._steps.samples_alone(uid)
        lookup = lookup_of(request)
        if lookup.reused_tokens != reused:  # what was found was refused, or the request runs again
            lookup = Lookup(lookup.ids, reused)
        self._forget_ended()
        self._last_kept[uid] = reused
        cuts = cache.cuts(lookup, anchor_of(request))
        sequence = self._sequence(uid)
        if sequence is None:
            return
        if sequence[6]:  # penalties and the like look back at the whole prompt
            sequence[4][:] = request.prompt_token_ids[:reused]
        if not cuts:
            return
        segments: list[list[int]] = sequence[1]
        rest = [token for segment in segments for token in segment]
        if len(rest) == len(request.prompt_token_ids) - reused:
            self._cuts[uid] = {cut.position: cut.kind for cut in cuts}
            segments[:] = split(rest, [cut.position - reused for cut in cuts])

    def _forget_ended(self) -> None:
        """Forget prompts whose requests were aborted."""
        for uid in [uid for uid in self._last_kept if self._request(uid) is None]:
            self._cuts.pop(uid, None)
            del self._last_kept[uid]

    def _sequence(self, uid: int) -> Any:
        """What mlx-lm has of a prompt that waits: 1 its segments, 4 what precedes them, 6 the
        processors of its logits.
        """
        waiting = self._generator._unprocessed_sequences
        return next((one for one in waiting if one[0] == uid), None)

    def _request(self, uid: int) -> Any:
        scheduler = self._scheduler
        return scheduler.requests.get(scheduler.uid_to_request_id.get(uid))

    def _after_prompt(self, response: Any) -> None:
        """Keep a prompt where a segment of it has ended, and now and then in a long one."""
        uid, request = response.uid, self._request(response.uid)
        if request is None or response.end_of_prompt:
            self._cuts.pop(uid, None)
            self._last_kept.pop(uid, None)
            return
        done, total = response.progress
        ids = lookup_of(request).ids
        position = int(ids.size) - total + done
        kind = self._kind_at(uid, position, int(ids.size))
        if kind is None or self._scheduler.memory_aware_cache.settings.keeps_nothing:
            return
        self._last_kept[uid] = position
        self._steps.busy()
        cache: PionPrefixCache = self._scheduler.memory_aware_cache
        with cache.blocking.measured("extract"):
            held = self._generator.extract_cache([uid]).get(uid)
        if held is not None:
            cache.keep(ids[:position], held[0], kind)

    def _kind_at(self, uid: int, position: int, count: int) -> KeepKind | None:
        kind = self._cuts.get(uid, {}).get(position)
        if kind is not None:
            return kind
        if position == count - 1:
            return "final"
        interval = self._scheduler.config.mid_prefill_save_interval
        begun = self._last_kept.get(uid, position)
        return "guard" if interval > 0 and position - begun >= interval else None

    def _after_token(self, response: Any) -> None:
        """Keep a finished reply: its cache holds the prompt and all that was generated."""
        if response.finish_reason is None or response.prompt_cache is None:
            return
        request, cache = self._request(response.uid), self._scheduler.memory_aware_cache
        if request is None or not cache.settings.keep_replies or self._scheduler.config.enable_mtp:
            return
        self._steps.busy()
        replied = np.array([*request.output_token_ids, response.token], np.uint32)
        ids = copied_ids(lookup_of(request).ids, replied)
        cache.keep(ids, response.prompt_cache, reply=True)

    def _prefilled(self) -> tuple[int, float]:
        generator = self._generator
        return generator._prompt_tokens_counter, generator._prompt_time_counter

    def _measure(self, tokens: int, seconds: float) -> None:
        """Keep a running mean of the prefill rate, of steps big enough to tell."""
        now_tokens, now_seconds = self._prefilled()
        if now_tokens - tokens < 32 or now_seconds <= seconds:
            return
        rate = (now_tokens - tokens) / (now_seconds - seconds)
        cache: PionPrefixCache = self._scheduler.memory_aware_cache
        known = cache.prefill_tokens_per_second
        cache.prefill_tokens_per_second = rate if known == 0 else 0.7 * known + 0.3 * rate
        store = cache.store_or_none()
        if store is not None:
            store.note_prefill_rate(cache.prefill_tokens_per_second)


def split(tokens: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
    """``tokens`` cut at ``positions``, the last token a segment of its own."""
    last = len(tokens) - 1
    bounds = [0, *sorted({at for at in positions if 0 < at < last}), last, last + 1]
    pairs = zip(bounds, bounds[1:], strict=False)
    return [list(tokens[start:end]) for start, end in pairs if end > start]


def lookup_of(request: Any) -> Lookup:
    """What the fetch for this request found."""
    found: Lookup | None = vars(request).get("pion_lookup")
    return found if found is not None else Lookup(token_ids(request.prompt_token_ids))


def anchor_of(request: Any) -> int | None:
    """Where the system prompt of this request ends."""
    found: int | None = vars(request).get("pion_anchor")
    return found


def _count_replies_alone(request: Any) -> None:
    """Have budgets of thinking count the reply; vllm-mlx has them count the prompt, too."""
    from vllm_mlx.constrained.thinking_processor import ThinkingAwareLogitsProcessor

    def of_reply(processor: Any) -> Any:
        if not isinstance(processor, ThinkingAwareLogitsProcessor):
            return processor
        prompt = len(request.prompt_token_ids)
        return lambda tokens, logits: processor(tokens[prompt:], logits)

    params = request.sampling_params
    params.logits_processors = [of_reply(one) for one in params.logits_processors or ()] or None


def _find_anchors(
    request: Any, anchors: AnchorTexts, tokenizer: Any, cache: PionPrefixCache
) -> None:
    """Note where the system prompt of a request ends, and what its tools share with others."""
    asked = (request.prompt, request.prompt_token_ids, tokenizer)
    request.pion_anchor = anchors.length(*asked)
    store = cache.store_or_none()
    if store is not None:
        store.expect_beginning(request.prompt_token_ids[: anchors.tools_length(*asked)])


def patch_scheduler(replacements: Replacements, anchors: AnchorTexts) -> None:
    """Replace the scheduler's methods; schedulers with another cache go on as before."""

    def with_ours(seam: Seam, ours: Callable[..., Any]) -> None:
        original = vars(seam.owner())[seam.name]

        @functools.wraps(original)
        def method(self: Any, *args: Any) -> Any:
            if not isinstance(self.memory_aware_cache, PionPrefixCache):
                return original(self, *args)
            return ours(original, self, *args)

        replacements.replace(seam, method)

    def add_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
        cache: PionPrefixCache = self.memory_aware_cache
        cache.bound(self.config.max_kv_size)
        result = original(self, request)
        if not request.prompt_token_ids:
            self.waiting.remove(request)
            del self.requests[request.request_id]
            raise NoTokens("the prompt has no tokens")
        request.pion_lookup = cache.last_lookup
        _count_replies_alone(request)
        if cache.wants_anchors and isinstance(request.prompt, str):
            try:
                _find_anchors(request, anchors, self._actual_tokenizer, cache)
            except UNEXPECTED:
                log.exception("the end of the system prompt could not be found")
        return result

    def schedule(original: Callable[..., Any], self: Any) -> Any:
        scheduled = original(self)
        for request in scheduled:
            try:
                self.batch_generator.pion_watch.cut(request)
                _log_request(request)
            except UNEXPECTED:
                log.exception("a prompt could not be cut")
        return scheduled

    def create(original: Callable[..., Any], self: Any, sampling_params: Any) -> Any:
        stock_log = logging.getLogger("vllm_mlx.scheduler")
        stock_log.addFilter(_not_disabled)
        try:
            generator = original(self, sampling_params)
        finally:
            stock_log.removeFilter(_not_disabled)
        generator.pion_watch = PrefillWatch(self, generator)
        generator.next = generator.pion_watch.next
        return generator

    def store_prompt(original: Callable[..., Any], self: Any, request: Any, response: Any) -> None:
        """The watch has kept the prompt already, one token shorter."""

    with_ours(ADD_TO_SCHEDULER, add_request)
    with_ours(SCHEDULE_WAITING, schedule)
    with_ours(CREATE_GENERATOR, create)
    with_ours(STORE_PROMPT, store_prompt)


def _not_disabled(record: logging.LogRecord) -> bool:
    """Leaves out that prompts are not saved: the watch saves them."""
    return not record.getMessage().startswith("Prompt cache save disabled")


def _log_request(request: Any) -> None:
    lookup = lookup_of(request)
    count, reused = len(request.prompt_token_ids), int(request.cached_tokens)
    log.info(
        "request %s: %d of %d prompt tokens reused (%s), %d to compute%s",
        request.request_id[:12],
        reused,
        count,
        lookup.tier if reused else "none",
        count - reused,
        f"; {lookup.why}" if lookup.why else "",
    )
