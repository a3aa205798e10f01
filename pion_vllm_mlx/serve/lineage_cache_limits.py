"""mlx-lm's own prompt cache, and how much the live caches in its place may take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

#: mlx-lm's own.
PLAIN_ENTRIES = 10
MOST_ENTRIES = 1000
UNBOUNDED_BYTES = 1 << 62
LEAST_BYTES = 1 << 30


class PlainCache(LRUPromptCache):
    """mlx-lm's own cache, which leaves the last token of an exact repeat to compute."""

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, Any]:
        """As mlx-lm's, but the rest is never empty: that would end the generation thread."""
        caches, rest = super().fetch_nearest_cache(model, tokens)
        if caches is None or rest:
            return caches, rest
        if not can_trim_prompt_cache(caches):
            return None, tokens
        trim_prompt_cache(caches, 1)
        return caches, tokens[-1:]


@dataclass(frozen=True)
class CacheLimits:
    """mlx-lm's flags of its prompt cache: conversations, and bytes; None where not named.

    Where neither is, the live caches may take half of the memory that the weights leave.
    """

    entries: int | None = None
    num_bytes: int | None = None

    @property
    def plain_entries(self) -> int:
        """Of mlx-lm's own cache."""
        return PLAIN_ENTRIES if self.entries is None else self.entries

    def live_entries(self, states: int) -> int:
        """How many live caches; a conversation has up to ``states`` of them."""
        return MOST_ENTRIES if self.entries is None else max(1, self.entries) * states

    def live_bytes(self) -> int:
        """What the live caches may take; the model is loaded by now."""
        if self.num_bytes or self.entries is not None:
            return self.num_bytes or UNBOUNDED_BYTES
        return max(LEAST_BYTES, (_memory_bytes() - mx.get_active_memory()) // 2)


def _memory_bytes() -> int:
    """The memory of this machine; of a GPU as much of it as that may use."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
