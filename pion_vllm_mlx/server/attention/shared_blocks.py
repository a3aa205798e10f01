"""Blocks of K/V that several slots share, and how many use each of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """The blocks of one allocation. Belongs to the event loop.

    Slots enter with the table of their blocks when they become WARM, and leave with it.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.slots = 0
        self._uses = np.zeros(num_blocks, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are in use, each once."""
        return int(np.count_nonzero(self._uses)) * self.block_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are held as long as any slot uses a block of it."""
        return len(self._uses) * self.block_bytes

    @property
    def is_loose(self) -> bool:
        """Whether it should be laid out again: a block is nobody's, or nothing is shared."""
        return self.slots > 0 and (self.slots == 1 or not self._uses.all())

    def enter(self, table: NDArray[np.int32]) -> None:
        """One slot more uses the blocks of a table, each of which is named once."""
        self.slots += 1
        self._uses[table] += 1

    def leave(self, table: NDArray[np.int32]) -> int:
        """One less; the bytes of blocks that are nobody's any more."""
        self.slots -= 1
        self._uses[table] -= 1
        return int(np.count_nonzero(self._uses[table] == 0)) * self.block_bytes


@dataclass(frozen=True)
class Share:
    """The blocks of a slot in a pool."""

    pool: BlockPool
    table: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks, whoever else uses them."""
        return len(self.table) * self.pool.block_bytes
