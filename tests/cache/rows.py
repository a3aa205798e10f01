"""Rows held as plain bytes by token position: what any store must be able to do."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from pion_vllm_mlx.cache.layers import Side, StoredCache, rebuild
from pion_vllm_mlx.cache.leaf import as_stored_bytes
from pion_vllm_mlx.cache.slots_state import decode_state, encode_state

_DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16, "fp32": mx.float32}


class RowBytes:
    """Every row and state of a stored cache as bytes; gaps are missing keys."""

    def __init__(self, stored: StoredCache, spare: int = 64) -> None:
        self.leaves = stored.leaves
        self.spare = spare
        self.rows: dict[tuple[int, str, int], np.ndarray[Any, Any]] = {}
        for run in stored.rows:
            heads = stored.leaves[run.layer].heads
            raw = np.frombuffer(as_stored_bytes(run.array), np.uint8)
            width = stored.leaves[run.layer].width(run.side)
            assert raw.size == run.count * width * self._item(run.layer), "width is not true"
            table = raw.reshape(heads, run.count, -1)
            for i in range(run.count):
                self.rows[run.layer, run.side, run.start + i] = table[:, i, :].copy()
        self.states = {
            slot: encode_state("ArraysCache", arrays) for slot, arrays in stored.states.items()
        }

    def fetch(self, layer: int, side: Side, start: int, end: int) -> mx.array:
        rows = np.stack([self.rows[layer, side, t] for t in range(start, end)], axis=1)
        padded = np.full((rows.shape[0], rows.shape[1] + self.spare, rows.shape[2]), 0xA5, np.uint8)
        padded[:, : rows.shape[1], :] = rows
        dtype = _DTYPES.get(self.leaves[layer].format)
        array = mx.array(padded)
        return array if dtype is None else array.view(dtype)

    def rebuild(self, slots: list[dict[str, Any]]) -> list[Any]:
        states = {slot: decode_state(blob) for slot, blob in self.states.items()}
        return rebuild(slots, self.fetch, states)

    def _item(self, layer: int) -> int:
        dtype = _DTYPES.get(self.leaves[layer].format)
        return 1 if dtype is None else dtype.size
