"""The lineage store: trees of segments, found by the longest common prefix."""

from pion_vllm_mlx.cache.lineage.attended import AttendedConversations, AttendedPrefix
from pion_vllm_mlx.cache.lineage.store import LineageStore, anchor_length
from pion_vllm_mlx.cache.lineage.types import (
    Checkpoint,
    Conversation,
    Cut,
    Explanation,
    LineageOptions,
    Match,
    Piece,
    Restored,
)

__all__ = [
    "AttendedConversations",
    "AttendedPrefix",
    "Checkpoint",
    "Conversation",
    "Cut",
    "Explanation",
    "LineageOptions",
    "LineageStore",
    "Match",
    "Piece",
    "Restored",
    "anchor_length",
]
