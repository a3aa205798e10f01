"""The table of block hashes that a namespace may carry: which blocks of tokens it holds."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 8
_HEAD = struct.Struct("<II")

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class BlockTable:
    """Hashes of blocks of ``block_size`` tokens, u64 little endian in token order."""

    block_size: int
    blob: bytes

    @property
    def count(self) -> int:
        return len(self.blob) // HASH_BYTES

    @cached_property
    def _sorted(self) -> Hashes:
        return np.sort(np.frombuffer(self.blob, "<u8").astype(np.uint64, copy=False))

    def encode(self) -> bytes:
        """``[u32 block_size][u32 count][count × u64]``."""
        return _HEAD.pack(self.block_size, self.count) + self.blob

    def membership(self, blob: bytes | memoryview) -> bytes:
        """Which of the probes (u64 little endian) are in the table.

        ``ceil(probes / 8)`` bytes; probe ``i`` is bit ``i & 7`` of byte ``i >> 3``.
        """
        probes = np.frombuffer(blob, "<u8")
        table = self._sorted
        if not len(table):
            return bytes(-(-len(probes) // 8))
        # a hash past the last one is compared with the last one: not equal
        at = np.minimum(np.searchsorted(table, probes), len(table) - 1)
        return np.packbits(table[at] == probes, bitorder="little").tobytes()
