"""mlx-lm 0.31's batches lose whose logits processors are whose; here each stays with its request.

A batch in which no request has any keeps the entries of those that have left, so that the biases
and penalties of a later request are another's, or nobody's; so it is with samplers.  And a prompt
without any that waits beside one with some has None for its list, which ends all replies of the
batch.  Both engines give such batches the settings of every request.  mlx-lm 0.32 does neither.
"""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any

from pion_vllm_mlx.cache.vllm_mlx_backend_seams import Replacements, Seam
from pion_vllm_mlx.errors import PionMlxCompatError

_CONCERNED = "0.31."
PROMPTS = Seam("mlx_lm.generate", "PromptProcessingBatch.extend", ("self", "batch"))
REPLIES = Seam("mlx_lm.generate", "GenerationBatch.filter", ("self", "keep"))


def keep_processors() -> Replacements:
    """Mends both, where mlx-lm needs it. Raises PionMlxCompatError."""
    replacements = Replacements()
    if not metadata.version("mlx-lm").startswith(_CONCERNED):
        return replacements
    for seam in (PROMPTS, REPLIES):
        if (told := seam.difference()) is not None:
            raise PionMlxCompatError(f"this mlx-lm is not one known here: {seam.label} {told}")
    join, leave = (vars(seam.owner())[seam.name] for seam in (PROMPTS, REPLIES))

    @functools.wraps(join)
    def extend(self: Any, batch: Any) -> None:
        join(self, batch)
        self.logits_processors = [one or [] for one in self.logits_processors]

    @functools.wraps(leave)
    def filter_(self: Any, keep: list[int]) -> None:
        none, no_sampler = not any(self.logits_processors), not any(self.samplers)
        leave(self, keep)
        if no_sampler:
            self.samplers = [None for _ in keep]
        if none:
            self.logits_processors = [[] for _ in keep]

    replacements.replace(PROMPTS, extend)
    replacements.replace(REPLIES, filter_)
    return replacements
