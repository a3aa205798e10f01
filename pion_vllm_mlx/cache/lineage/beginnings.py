"""Beginnings that prompts are known to share: of one system prompt, or of the same tools."""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.cache.completion import TokenIds


class Beginnings:
    """The latest ``most`` of them. Any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: tuple[TokenIds, ...] = ()

    def expect(self, ids: TokenIds) -> None:
        """Prompts will begin with ``ids``."""
        others = tuple(one for one in self._known if not np.array_equal(one, ids))
        self._known = (*others, ids)[-self._most :]

    def longest(self, ids: TokenIds) -> int:
        """The size of the longest of which a prompt is more; 0 for none."""
        fits = [
            one.size
            for one in self._known
            if one.size < ids.size and np.array_equal(ids[: one.size], one)
        ]
        return max(fits, default=0)
