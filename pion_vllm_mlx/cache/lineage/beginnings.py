"""Beginnings that prompts are known to share: of one system prompt, or of the same tools."""

from __future__ import annotations

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.blocks import common_tokens


class Beginnings:
    """The latest ``most`` of them. Any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: tuple[TokenIds, ...] = ()

    def expect(self, ids: TokenIds) -> None:
        """Prompts will begin with ``ids``."""
        others = tuple(one for one in self._known if not _same(one, ids))
        self._known = (*others, ids)[-self._most :]

    def longest(self, ids: TokenIds) -> int:
        """The size of the longest of which a prompt is more; 0 for none."""
        fits = [
            one.size
            for one in self._known
            if one.size < ids.size and common_tokens(one, ids) == one.size
        ]
        return max(fits, default=0)


def _same(one: TokenIds, other: TokenIds) -> bool:
    return one.size == other.size == common_tokens(one, other)
