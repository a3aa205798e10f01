"""``serve --pion-attend``: system prompts are attended at the store, no row of them stays here.

The system part of a chat (system messages and tools) is prefilled once and stored under a name
made of its tokens; every request that begins with it, of any process, attends to it there. What
follows it, the conversation, lives in this process: in mlx-lm's own prompt cache, whose keys are
then the tokens behind the prefix. Such caches cannot be merged: requests are served one at a time.

What has no system part is served as without a store, and so is another model that a request
names and that cannot be attended; the one that serve is started with is refused then. Where the
store fails in the middle of a request, its prompt is computed here, and the reply goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.errors import PionError, PionMlxCompatError
from pion_vllm_mlx.patch import (
    PionPrefixCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
)
from pion_vllm_mlx.patch.build import refuse_elsewhere
from pion_vllm_mlx.patch.model_check import flattened
from pion_vllm_mlx.serve.engine_child import EngineLink
from pion_vllm_mlx.serve.engine_mlx_lm_single import advanced, going_on, with_history
from pion_vllm_mlx.serve.lineage_cache import REPLY, LineageCache
from pion_vllm_mlx.serve.lineage_cache_limits import CacheLimits
from pion_vllm_mlx.serve.pion_flags import PionFlags

log = logging.getLogger("pion_vllm_mlx.serve")

Caches = list[Any]
_FAILURES = (PionError, ValueError, NotImplementedError)
"""What a prefix that cannot be attended ends in, when its cache is made or used."""


@dataclass
class _Request:
    """The request that is served now: its tokens, where its system part ends, its context.

    ``computed``: tokens of what its caches stand on that were computed for it nevertheless.
    """

    tokens: Sequence[int] = ()
    anchor: int = 0
    context: Any = None
    computed: int = 0


class AttendingCache(LineageCache):
    """See the module's docstring. All of it but ``stats`` runs on the generation thread."""

    def __init__(
        self,
        limits: CacheLimits,
        flags: PionFlags,
        link: EngineLink,
        stream_generate: Callable[..., Iterator[Any]],
        step_tokens: int | None = None,
    ) -> None:
        """Puts the attention patch in place; a prefix is prefilled ``step_tokens`` at once.

        Raises PionMlxCompatError for an unknown mlx-lm.
        """
        super().__init__(None, limits)
        self._flags, self._link = flags, link
        self._original, self._step_tokens = stream_generate, step_tokens
        self._pc: PionPromptCache | None = None
        self._key = ""
        self._now = _Request()
        #: why no prefix of the model can be attended at a store, "" where they can.
        self.refusal = ""
        self._counts["not_attended"] = 0
        install_pion_attention_patch()

    def attach(self, model: Any, draft_model: Any) -> None:
        """Serves ``model`` from now on: reads the weights for its key."""
        if model is self._model:
            return
        self._model, self.refusal = model, ""
        self._let_go()
        if draft_model is not None:
            self._tell("not attended at the store: a draft model has caches of its own")
            return
        self._pc = PionPromptCache(
            model,
            vquant=self._flags.vquant,
            url=self._flags.url,
            key_parts={"tenant": self._link.tenant} if self._link.tenant else {},
            prefill_chunk_size=self._step_tokens,
            inproc_bytes=0,  # no copy of a prefix: that is what this is for
        )
        assert self._pc.source is not None
        self._key = self._pc.source.digest
        try:
            refuse_elsewhere(model, self._pc)
        except (PionMlxCompatError, NotImplementedError) as error:
            self.refusal = str(error)
            self._tell(f"not attended at the store: {error}")
            self._let_go()

    @property
    def active(self) -> bool:
        """Whether prefixes of the model that is served are attended at the store."""
        return self._pc is not None

    def begins(self, tokens: Sequence[int], anchor: int) -> None:
        """A request of these tokens is served next; its system part ends at ``anchor``."""
        self._now = _Request(tokens, anchor)

    def answers(self, context: Any) -> None:
        """mlx-lm's context of the request, which says how many tokens were not computed."""
        self._now.context = context

    def fetch_nearest_cache(
        self, model: Any, tokens: Sequence[int]
    ) -> tuple[Caches | None, Sequence[int]]:
        """A cache over the system part at the store, or what is live; and the rest, never empty."""
        self._counts["requests"] += 1
        self._counts["tokens_prompt"] += len(tokens)
        caches, rest = self._fetched(model, list(tokens))
        self._counts["tokens_reused"] += len(tokens) - len(rest)
        return caches, rest

    def insert_cache(
        self, model: Any, tokens: list[int], caches: Caches, *, cache_type: str = REPLY
    ) -> None:
        """Keeps a conversation in this process, that behind a prefix under the prefix's name."""
        told, one = self.on_insert(), _attending(caches)
        if one is None:
            self._plain.insert_cache(model, tokens, caches, cache_type=cache_type)
        elif one.group.broken is None:
            key = model, one.namespace
            self._plain.insert_cache(key, tokens[one.prefix_len :], caches)
        told()

    def stream_generate(self, **options: Any) -> Iterator[Any]:
        """As mlx-lm's; where the store fails it goes on with caches that are computed here."""
        self._not_reused(self._now.computed)
        if _attending(options["prompt_cache"]) is None:
            yield from self._original(**options)
            return
        tokens, random, said = list(self._now.tokens), _random_state(), list[int]()
        attended = {**options, "logits_processors": with_history(tokens, options)}
        try:
            for response in self._original(**attended):
                said.append(response.token)
                yield response
            return
        except _FAILURES as error:
            self._plain.trim_to(n_sequences=0)  # others behind that prefix would fail, too
            self._failed(error)
        if self._now.context is not None:
            self._not_reused(self._now.context.prompt_cache_count)
        mx.random.seed(random)
        yield from self._from_here(tokens, said, options)

    def stats(self) -> dict[str, Any]:
        """What was attended where, by the layer, and what lives here. Any thread."""
        pc = self._pc
        told: dict[str, Any] = {"attended_binary": 0, "attended_resp": 0, "cold_misses": 0}
        if pc is not None:
            lanes = pc.attention.attended().items()
            told |= {f"attended_{lane.replace('-', '_')}": count for lane, count in lanes}
            told["cold_misses"] = pc.cold_rehydrates_observed
        return {**told, **self._counts, "live_bytes": self.nbytes, "live_entries": len(self)}

    def close(self, timeout: float = 10.0) -> None:
        """Lets the store go."""
        self._let_go()
        super().close(timeout)

    # -- inside -----------------------------------------------------------------

    def _fetched(self, model: Any, tokens: list[int]) -> tuple[Caches | None, Sequence[int]]:
        cut, pc = self._now.anchor, self._pc
        if not self._flags.min_gain <= cut < len(tokens):
            return self._plain.fetch_nearest_cache(model, tokens)
        if pc is None:
            self._counts["not_attended"] += 1
            return self._plain.fetch_nearest_cache(model, tokens)
        if list(self._now.tokens) != tokens:  # images have other ids
            return self._plain.fetch_nearest_cache(model, tokens)
        name = self._namespace(tokens[:cut])
        live, rest = self._plain.fetch_nearest_cache((model, name), tokens[cut:])
        if live is not None:
            return live, rest
        try:
            caches = self._at_store(pc, name, tokens[:cut])
        except _FAILURES as error:
            self._failed(error)
            return self._plain.fetch_nearest_cache(model, tokens)
        return caches, tokens[cut:]

    def _from_here(
        self, tokens: list[int], said: list[int], options: dict[str, Any]
    ) -> Iterator[Any]:
        """The rest of a reply of which so much was said."""
        detokenizer = options["tokenizer"].detokenizer
        for token in said:
            detokenizer.add_token(token)
        _ = detokenizer.last_segment  # was written
        options["prompt"] = [*tokens, *said]
        options["logits_processors"] = with_history(options["prompt"], options)
        options["prompt_cache"] = make_prompt_cache(options["model"])
        options["max_tokens"] -= len(said)
        options["sampler"] = advanced(options["sampler"], len(said))
        yield from going_on(self._original, options, detokenizer)

    def _at_store(self, pc: PionPromptCache, name: str, ids: list[int]) -> Caches:
        """A cache over a prefix at the store; the prefix itself where it cannot be stored there."""
        assert pc.source is not None
        pc.source.note(name, np.asarray(ids, np.uint32))
        try:
            return make_pion_prompt_cache(self._model, name, pc, len(ids))
        except ValueError as error:
            log.info("a system prompt of %d tokens is stored: %s", len(ids), error)
        misses = pc.misses
        own = pc.get_or_prefill(ids, name)
        self._now.computed = len(ids) if pc.misses > misses else 0
        try:
            return make_pion_prompt_cache(self._model, name, pc, len(ids))
        except _FAILURES as error:
            self._failed(error)
            return own

    def _namespace(self, ids: list[int]) -> str:
        """A name of these tokens and the whole key, which are compared besides."""
        told = np.asarray(ids, "<u4").tobytes().hex()
        return f"attend-{PionPromptCache.make_namespace(self._key, told)}"

    def _not_reused(self, count: int) -> None:
        """What mlx-lm took for reused was computed: usage is to say so."""
        if self._now.context is not None:
            self._now.context.prompt_cache_count -= count
            self._counts["tokens_reused"] -= count

    def _failed(self, error: Exception) -> None:
        self._counts["not_attended"] += 1
        self._tell(f"not attended at the store: {error}")
        if isinstance(error, PionMlxCompatError | NotImplementedError):
            self._let_go()  # no other request will fare better with this model

    def _let_go(self) -> None:
        pc, self._pc = self._pc, None
        if pc is not None:
            pc.close()
        self._plain.trim_to(n_sequences=0)


def _random_state() -> int:
    """The seed that gives the random state that there is now."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    return int(high) << 32 | int(low)


def _attending(caches: Sequence[Any]) -> PionPrefixCache | None:
    """The first of a model's caches, if its prefix is at the store."""
    found = next(iter(flattened(list(caches))), None)
    return found if isinstance(found, PionPrefixCache) else None
