"""What the store has of a prompt, read, and kept in this process from then on."""

from __future__ import annotations

from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.lineage.missed import NOT_RESTORED
from pion_vllm_mlx.cache.live_restored import keep_restored
from pion_vllm_mlx.cache.live_unwritten import UnwrittenTier
from pion_vllm_mlx.cache.vllm_mlx_backend_lookup import Lookup


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
    keep_restored(lookup.ids, restored, match, live)
