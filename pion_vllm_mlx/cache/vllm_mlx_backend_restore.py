"""What the store has of a prompt, read, and kept in this process from then on.

A state and a full window can be cut nowhere, so that the end of the reply, which is kept, does
not give the prompt again: without what was restored the next exact repeat would read the store.
Nothing is copied: memory holds the arrays that the request gets, by handles of its own.
"""

from __future__ import annotations

import logging

from pion_vllm_mlx.cache.handles import owned
from pion_vllm_mlx.cache.lineage import LineageStore, Restored
from pion_vllm_mlx.cache.lineage.missed import NOT_RESTORED
from pion_vllm_mlx.cache.live_unwritten import UnwrittenTier
from pion_vllm_mlx.cache.pace import between_pieces
from pion_vllm_mlx.cache.vllm_mlx_backend_lookup import Lookup
from pion_vllm_mlx.errors import UnsupportedCache

log = logging.getLogger(__name__)


def restore(lookup: Lookup, held: int, store: LineageStore, live: UnwrittenTier) -> None:
    """Reads what ``store`` has of a prompt, where that is at least ``min_gain`` tokens more.

    Memory holds ``held`` of them, and what was read when this is over, where it has room.
    ``lookup`` has what was read, which is the request's own, and why it is not more.
    """
    least = lookup.min_gain = store.options.min_gain
    if lookup.prompt_tokens - 1 - held < least:
        store.recheck(lookup.ids)
        return
    lookup.match = match = store.match(lookup.ids)
    if match.withheld > held:
        lookup.why = match.why
    unwritten = live.lost(lookup.ids)
    if unwritten >= max(held, match.length) + least:
        lookup.why = store.not_yet(unwritten)
    if match.length < held + least:
        return
    restored = store.restore(match)
    if restored is None or restored.length <= held:
        lookup.why = NOT_RESTORED
        return
    lookup.restored = restored
    kind = match.checkpoint.kind if match.checkpoint is not None else "final"
    _keep(lookup, restored, kind, live)


def _keep(lookup: Lookup, restored: Restored, kind: str, live: UnwrittenTier) -> None:
    """Has memory hold what was restored, under its budget; ``kind`` is that of its checkpoint."""
    between_pieces()
    try:
        live.put(lookup.ids[: restored.length], owned(restored.caches), kind)
    except UnsupportedCache as reason:
        log.debug("not kept in memory: %s", reason)
