"""Each request of a batch of vllm-mlx is sampled as it asks.

vllm-mlx has one sampler a batch, that of the request which began it: who joins others is sampled
with their temperature.  mlx-lm's batches take a sampler a request, which is what it gets here
where it asks for another than the batch has.  And what looks at the tokens of one reply, a JSON
schema for example, ends that reply where it fails, not those of the whole batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.vllm_mlx_backend_cache import UNEXPECTED
from pion_vllm_mlx.cache.vllm_mlx_backend_seams import Replacements, Seam, check

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
    from mlx_lm.sample_utils import make_sampler

    check([ENSURE, INSERT, STOP_TOKENS])
    ensure, insert = (vars(seam.owner())[seam.name] for seam in (ENSURE, INSERT))

    @functools.wraps(ensure)
    def ensure_generator(self: Any, sampling_params: Any) -> None:
        if self.batch_generator is None or not self.running:  # else it would but warn
            ensure(self, sampling_params)
        one = sampling_params
        if self.batch_generator is not None:  # the same request is inserted next
            same = self._current_sampler_params == (one.temperature, one.top_p, one.min_p)
            own = None if same else make_sampler(one.temperature, one.top_p, one.min_p)
            self.batch_generator.pion_sampler = own
            self.batch_generator.pion_ends = sorted(self._get_stop_tokens())

    @functools.wraps(insert)
    def insert_with_sampler(self: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        own = vars(self).get("pion_sampler")
        if own is not None and not args:
            options.setdefault("samplers", [own] * len(prompts))
        ends, processors = vars(self).get("pion_ends"), options.get("logits_processors")
        if ends and processors:
            options["logits_processors"] = [
                [failing_alone(one, ends) for one in those or ()] for those in processors
            ]
        return insert(self, prompts, *args, **options)

    replacements = Replacements()
    replacements.replace(ENSURE, ensure_generator)
    replacements.replace(INSERT, insert_with_sampler)
    return replacements


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
