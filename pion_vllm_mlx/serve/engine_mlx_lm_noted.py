"""A reply that is not batched, stored while it grows and noted in its journal.

Its caches go on being written to, so what is new has to be copied out of them before the next
token is.  That is computed with a step of the model, by the same call: the tokens that the step
samples depend on the copies.  The thread that generates waits for nothing on our account, and
which token it was is told when it is known, one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from pion_vllm_mlx.cache.beside import Blocking
from pion_vllm_mlx.cache.common_prefix import copied_ids
from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.lineage.growing import Grown
from pion_vllm_mlx.serve.lineage_cache import guarded
from pion_vllm_mlx.serve.lineage_cache_plan import Plan

JOURNAL_TOKENS = 16
#: where each note costs a recurrent state.
STATEFUL_JOURNAL_TOKENS = 64

Sampler = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Reply:
    """What is to be stored of one: every ``durable_tokens`` tokens at most, 0 as its journal likes.

    ``caches`` hold the plan's prompt and the tokens that are resumed of it, but the last of all.
    """

    plan: Plan
    caches: Sequence[Any]
    durable_tokens: int = 0


class Noted:
    """See the module's docstring. For one reply, on the thread that generates."""

    def __init__(self, reply: Reply, store: LineageStore, blocking: Blocking) -> None:
        plan = reply.plan
        self._plan, self._caches = plan, reply.caches
        self._store, self._blocking = store, blocking
        self._journal = store.journal(plan.journal) if plan.journal else None
        plan.noted = self._journal
        every = STATEFUL_JOURNAL_TOKENS if store.stateful else JOURNAL_TOKENS
        if reply.durable_tokens:
            every = min(every, reply.durable_tokens) if self._journal else reply.durable_tokens
        self._every = every
        self._stores = self._journal is not None or reply.durable_tokens > 0
        self._generated: list[int] = []
        self._held = len(plan.resume) - 1  # of the reply's tokens, by the caches
        self._grown: Grown | None = None

    def sampling(self, sample: Sampler) -> Sampler:
        """``sample``, whose tokens carry what is to be stored; called once a step."""
        if not self._stores:
            return sample

        def sampled(logits: mx.array) -> mx.array:
            tokens = sample(logits)
            self._held += 1
            if self._is_time(self._held):
                with self._blocking.measured("grow"):
                    self._grown = guarded(self._new, None)
            arrays = self._grown.taken.arrays if self._grown is not None else []
            return mx.depends(tokens, arrays) if arrays else tokens

        return sampled

    def followed(self, responses: Iterator[Any]) -> Iterator[Any]:
        """The same responses, from the first token of the reply on, the tokens noted."""
        journal, kept = self._journal, 0
        try:
            for response in responses:
                self._generated.append(response.token)
                if journal and kept and kept == len(self._generated) - 1:
                    journal.note(self._generated)
                if self._grown is not None:
                    with self._blocking.measured("grew"):
                        kept = guarded(partial(self._keep, self._grown), kept)
                    self._grown = None
                yield response
        finally:
            if journal:  # who is told the end has seen to it, unless nobody is there any more
                journal.leave()

    def _is_time(self, held: int) -> bool:
        return held > len(self._plan.resume) and (held - 1) % self._every == 0

    def _new(self) -> Grown | None:
        length = self._plan.size + self._held
        return self._store.growing(self._ids(), self._caches, length)

    def _keep(self, grown: Grown) -> int:
        """Has it stored; how many tokens of the reply are."""
        # guards: the newest one is enough, and the end of the prompt stays kept
        self._store.grew(self._ids(), grown, self._journal or self)
        return len(self._generated)

    def _ids(self) -> TokenIds:
        return copied_ids(self._plan.ids, np.array(self._generated, np.uint32))
