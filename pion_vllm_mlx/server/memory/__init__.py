"""Stores that live in memory and end with the process: data halves that know no client.

::

    state_slots.py     STATE.*            fixed-size slots, overwritten in place
    semantic_cache.py  KV.STORE/FETCH     blobs found by the cosine of an embedding
    attend_index.py    ATTEND.*           value rows found by the distance of their keys
    nearest.py                            the exact search under it
    layer_store.py     LAYER.*            opaque tensors by session and layer
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pion_vllm_mlx.server.memory.attend_index import AttendIndex
from pion_vllm_mlx.server.memory.layer_store import LayerStore
from pion_vllm_mlx.server.memory.semantic_cache import SemanticCache
from pion_vllm_mlx.server.memory.state_slots import StateSlots


@dataclass
class MemoryStores:
    """One of each; they belong to the event loop."""

    states: StateSlots = field(default_factory=StateSlots)
    semantic: SemanticCache = field(default_factory=SemanticCache)
    index: AttendIndex = field(default_factory=AttendIndex)
    layers: LayerStore = field(default_factory=LayerStore)

    @property
    def stored_bytes(self) -> int:
        """Bytes of payload that all of them hold."""
        return (
            self.states.stored_bytes
            + self.semantic.stored_bytes
            + self.index.stored_bytes
            + self.layers.stored_bytes
        )


__all__ = ["AttendIndex", "LayerStore", "MemoryStores", "SemanticCache", "StateSlots"]
