"""What is kept of prompts and replies, a little with every step of vllm-mlx's scheduler.

Caches that were handed over are copies still to be made, and are to be stored: done at once that
holds up the next token of everybody by as long as a whole cache takes.  Each step of the batch
carries a few of the arrays, and between two steps one thing is done; all that waits when the
last request has ended.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.spread import Spread
from pion_vllm_mlx.cache.vllm_mlx_backend_cache import UNEXPECTED, PionPrefixCache
from pion_vllm_mlx.cache.vllm_mlx_backend_seams import START_ENGINE, STEP, Replacements

log = logging.getLogger(__name__)

#: an engine that starts waits no longer for the store: large models take a while to read.
OPEN_SECONDS = 60.0
#: where mlx-lm has a sequence's own sampler among what it knows of one that waits.
_SAMPLER = 5


class Steps:
    """The steps of one BatchGenerator, and what they carry. For the thread that generates."""

    def __init__(self, generator: Any, spread: Spread) -> None:
        """The generator's samplers carry pieces from now on."""
        self._generator, self._spread = generator, spread
        self._next = generator.next
        self._busy = False
        sample = spread.sampling(generator.sampler)
        batches = generator._prompt_batch, generator._generation_batch
        generator.sampler = sample
        for batch in batches:
            batch.fallback_sampler = sample

    def next(self) -> Any:
        """One step of the generator, and before it one thing that waits."""
        spread = self._spread
        with mx.stream(self._generator.stream):  # as that which a step computes
            spread.work(begun=self._busy)
        self._busy = False
        waited = spread.waiting_bytes
        result = self._next()
        if waited and result[1] and spread.waiting_bytes == waited:
            spread.finish()  # sampled by somebody else: no step will carry it
        spread.stepped()
        return result

    def busy(self) -> None:
        """Something was done since the last step: nothing comes on top of it."""
        self._busy = True

    def samples_alone(self, uid: int) -> None:
        """Has a sequence that waits, with a sampler of its own, carry pieces, too."""
        waiting = self._generator._unprocessed_sequences
        for at, one in enumerate(waiting):
            if one[0] == uid and one[_SAMPLER] is not None:
                own = self._spread.sampling(one[_SAMPLER])
                waiting[at] = (*one[:_SAMPLER], own, *one[_SAMPLER + 1 :])


def patch_steps(replacements: Replacements) -> None:
    """Replace what ends a step; schedulers with another cache go on as before."""
    original = vars(STEP.owner())[STEP.name]

    @functools.wraps(original)
    def step(self: Any, max_retries: int = 1) -> Any:
        output = original(self, max_retries)
        cache = self.memory_aware_cache
        if isinstance(cache, PionPrefixCache) and not self.has_requests():
            try:
                cache.spread.finish()
            except UNEXPECTED:
                log.exception("what was kept could not be stored")
        return output

    replacements.replace(STEP, step)


def patch_start(replacements: Replacements) -> None:
    """Have the store opened when an engine starts, not by its first request."""
    original: Callable[[Any], Awaitable[None]] = vars(START_ENGINE.owner())[START_ENGINE.name]

    @functools.wraps(original)
    async def start(self: Any) -> None:
        await original(self)
        cache = self.scheduler.memory_aware_cache
        if not isinstance(cache, PionPrefixCache):
            return
        cache.bound(self.scheduler.config.max_kv_size)
        opening = _opening(self, cache)
        await asyncio.wait([opening], timeout=OPEN_SECONDS)  # requests wait behind it, too
        if opening.done() and opening.exception() is not None:
            log.error("the store could not be opened", exc_info=opening.exception())

    replacements.replace(START_ENGINE, start)


def _opening(core: Any, cache: PionPrefixCache) -> asyncio.Future[Any]:
    """The store being opened where the engine's model lives: its weights are read for the key."""
    if core._external_generation_worker is not None:
        return asyncio.wrap_future(core._external_generation_worker.submit(cache.store_or_none))
    opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    try:
        opened.set_result(cache.store_or_none())
    except UNEXPECTED as error:
        opened.set_exception(error)
    return opened
