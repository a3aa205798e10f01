"""What warming a system prompt comes to, whichever engine it is for."""

from __future__ import annotations

from dataclasses import dataclass

from pion_vllm_mlx.cache.lineage import LineageStore, Match
from pion_vllm_mlx.cache.lineage.blocks import FIRST_TOKENS
from pion_vllm_mlx.errors import PionError

_LOST = ("over_budget", "contended", "lost", "failed", "refused", "queue_full", "unavailable")


class NotWarmed(PionError):
    """A system prompt was not stored; the text says why."""


@dataclass(frozen=True)
class Warmed:
    """What became of one file: ``tokens`` are stored, of which ``computed`` were not before."""

    file: str
    conversation: str
    tokens: int
    computed: int
    seconds: float
    pinned: bool


def refuse_short(anchor: int, min_gain: int) -> None:
    """Raises NotWarmed for a system part that nobody would ever restore."""
    if anchor < max(min_gain, FIRST_TOKENS):
        raise NotWarmed(
            f"the system part is not stored: {anchor} tokens, fewer than are ever restored"
        )


def stored_as(match: Match) -> str:
    """The conversation in which a match ends."""
    piece = match.chain[-1]
    mid = piece.namespace.removeprefix("pps").rpartition("s")[0]
    return f"{mid}:{piece.segment}"


def why_not_stored(store: LineageStore) -> str:
    """What the store has counted of things that it did not store."""
    reasons = store.stats().get("reasons", {})
    return "; ".join(str(reasons[name]) for name in _LOST if name in reasons)
