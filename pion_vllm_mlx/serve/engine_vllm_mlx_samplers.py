"""Each request of a batch of vllm-mlx is sampled as it asks.

vllm-mlx has one sampler a batch, that of the request which began it: who joins others is sampled
with their temperature.  mlx-lm's batches take a sampler a request, which is what it gets here
where it asks for another than the batch has.  ``top_k`` and ``presence_penalty``, which vllm-mlx
itself heeds for image models alone, are heeded that way, too.  And what looks at the tokens of
one reply, a JSON schema for example, ends that reply where it fails, not those of the whole batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.vllm_mlx_backend_cache import UNEXPECTED
from pion_vllm_mlx.cache.vllm_mlx_backend_seams import Replacements, Seam, check
from pion_vllm_mlx.serve.engine_mlx_lm_sampling import vocabulary_of

log = logging.getLogger(__name__)

ENSURE = Seam(
    "vllm_mlx.scheduler", "Scheduler._ensure_batch_generator", ("self", "sampling_params")
)
INSERT = Seam(
    "mlx_lm.generate",
    "BatchGenerator.insert",
    (
        "self",
        "prompts",
        "max_tokens",
        "caches",
        "all_tokens",
        "samplers",
        "logits_processors",
        "state_machines",
    ),
)

STOP_TOKENS = Seam("vllm_mlx.scheduler", "Scheduler._get_stop_tokens", ("self",))


def patch_samplers() -> Replacements:
    """Has requests that join a batch keep their own settings. Raises PionMlxCompatError."""
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    check([ENSURE, INSERT, STOP_TOKENS])
    ensure, insert = (vars(seam.owner())[seam.name] for seam in (ENSURE, INSERT))

    @functools.wraps(ensure)
    def ensure_generator(self: Any, sampling_params: Any) -> None:
        if self.batch_generator is None or not self.running:  # else it would but warn
            ensure(self, sampling_params)
        one = sampling_params
        if self.batch_generator is not None:  # the same request is inserted next
            like, likeliest = (one.temperature, one.top_p, one.min_p), top_k(self.model, one.top_k)
            same = self._current_sampler_params == like and not likeliest
            own = None if same else make_sampler(*like, top_k=likeliest)
            self.batch_generator.pion_sampler = own
            penalty = make_logits_processors(presence_penalty=one.presence_penalty)
            self.batch_generator.pion_penalty = penalty
            self.batch_generator.pion_ends = sorted(self._get_stop_tokens())

    @functools.wraps(insert)
    def insert_with_sampler(self: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        own = vars(self).get("pion_sampler")
        if own is not None and not args:
            options.setdefault("samplers", [own] * len(prompts))
        ends, processors = vars(self).get("pion_ends"), options.get("logits_processors")
        penalty = vars(self).get("pion_penalty")
        if penalty:
            asked = processors or [[]] * len(prompts)
            processors = [[*(those or ()), *penalty] for those in asked]
            options["logits_processors"] = processors
        if ends and processors:
            options["logits_processors"] = [
                [failing_alone(one, ends) for one in those or ()] for those in processors
            ]
        return insert(self, prompts, *args, **options)

    replacements = Replacements()
    replacements.replace(ENSURE, ensure_generator)
    replacements.replace(INSERT, insert_with_sampler)
    return replacements


def top_k(model: Any, asked: int) -> int:
    """How many of the likeliest tokens are drawn from; 0, as mlx-lm has it, for all there are.

    The step of all requests fails on a number that is not below that of the tokens.
    """
    return asked if 0 < asked < vocabulary_of(model) else 0


def failing_alone(processor: Callable[..., Any], ends: Collection[int]) -> Callable[..., Any]:
    """A logits processor that ends its own reply, with one of the tokens ``ends``, if it fails.

    Raised from it, what it fails with would end every reply of the batch.
    """
    failed: list[BaseException] = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if not failed:
            try:
                processed: mx.array = processor(tokens, logits)
                return processed
            except UNEXPECTED as error:
                failed.append(error)
                log.warning("a reply ends: %s failed", type(processor).__name__, exc_info=True)
        ended = mx.full(logits.shape, -mx.inf, dtype=logits.dtype)
        ended[..., mx.array(list(ends))] = 0
        return ended

    return process
