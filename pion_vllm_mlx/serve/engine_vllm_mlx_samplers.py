"""Each request of a batch of vllm-mlx is sampled as it asks.

vllm-mlx has one sampler a batch, that of the request which began it: who joins others is sampled
with their temperature.  mlx-lm's batches take a sampler a request, which is what it gets here
where it asks for another than the batch has.
"""

from __future__ import annotations

import functools
from typing import Any

from pion_vllm_mlx.cache.vllm_mlx_backend_seams import Replacements, Seam, check

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


def patch_samplers() -> Replacements:
    """Has requests that join a batch keep their own settings. Raises PionMlxCompatError."""
    from mlx_lm.sample_utils import make_sampler

    check([ENSURE, INSERT])
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

    @functools.wraps(insert)
    def insert_with_sampler(self: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        own = vars(self).get("pion_sampler")
        if own is not None and not args:
            options.setdefault("samplers", [own] * len(prompts))
        return insert(self, prompts, *args, **options)

    replacements = Replacements()
    replacements.replace(ENSURE, ensure_generator)
    replacements.replace(INSERT, insert_with_sampler)
    return replacements
