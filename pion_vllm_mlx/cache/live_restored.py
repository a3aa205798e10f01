"""Keeping in this process what was read of the store.

A state and a full window can be cut nowhere, so that the end of the reply, which is kept, does
not give the prompt again: without what was restored the next exact repeat would read the store.
Nothing is copied: memory holds the arrays that the request gets, by handles of its own.
"""

from __future__ import annotations

import logging

from pion_vllm_mlx.cache.handles import owned
from pion_vllm_mlx.cache.lineage import Match, Restored
from pion_vllm_mlx.cache.live_tier import LiveTier, Tokens
from pion_vllm_mlx.cache.pace import between_pieces
from pion_vllm_mlx.errors import UnsupportedCache

log = logging.getLogger(__name__)


def keep_restored(tokens: Tokens, restored: Restored, match: Match, live: LiveTier) -> None:
    """Has ``live`` hold what was restored of ``match``, under its budget.

    It is of the kind of its checkpoint: what ends behind a system prompt is given up last.
    """
    kind = match.checkpoint.kind if match.checkpoint is not None else "final"
    between_pieces()
    try:
        live.put(tokens[: restored.length], owned(restored.caches), kind)
    except UnsupportedCache as reason:
        log.debug("not kept in memory: %s", reason)
