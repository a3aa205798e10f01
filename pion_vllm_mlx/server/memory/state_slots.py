"""Fixed-size slots of opaque bytes, overwritten in place.

A *fixed* slot refuses what reaches past its end. In a *ring* an offset counts modulo
the size, and reads and writes wrap.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError

MAX_SLOTS = 64
#: a slot is written and read by one bulk string.
MAX_SLOT_BYTES = 512 << 20


@dataclass
class Slot:
    """One slot. ``lock`` is held while a thread copies, so that nobody sees half a write."""

    memory: NDArray[np.uint8]
    ring: bool
    bytes_written: int = 0
    bytes_read: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def size(self) -> int:
        return len(self.memory)

    def place(self, offset: int, length: int) -> int:
        """Where ``length`` bytes at ``offset`` begin. Raises CommandError when out of range."""
        if offset < 0:
            raise CommandError("offset must be non-negative")
        if self.ring:
            if length > self.size:
                raise CommandError(f"out of range: the ring has {self.size} bytes")
            return offset % self.size
        if offset + length > self.size:
            raise CommandError(f"out of range: the slot has {self.size} bytes")
        return offset

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Copy ``data`` to ``at``, which ``place`` gave; a ring wraps."""
        source = np.frombuffer(data, np.uint8)
        first = min(len(source), self.size - at)
        self.memory[at : at + first] = source[:first]
        self.memory[: len(source) - first] = source[first:]
        self.bytes_written += len(source)

    def read(self, at: int, length: int) -> memoryview:
        """A copy of ``length`` bytes from ``at``, which ``place`` gave; a ring wraps."""
        out = np.empty(length, np.uint8)
        first = min(length, self.size - at)
        out[:first] = self.memory[at : at + first]
        out[first:] = self.memory[: length - first]
        self.bytes_read += length
        return out.data


class StateSlots:
    """The table of slots, by id."""

    def __init__(self) -> None:
        self.slots: dict[bytes, Slot] = {}
        self.stored_bytes = 0

    def alloc(self, slot_id: bytes, size: int, ring: bool) -> None:
        """A new slot full of zeros. Raises CommandError: already allocated, no free slot."""
        if slot_id in self.slots:
            raise CommandError("state slot is already allocated")
        if len(self.slots) >= MAX_SLOTS:
            raise CommandError("no free state slot")
        self.slots[slot_id] = Slot(np.zeros(size, np.uint8), ring)
        self.stored_bytes += size

    def get(self, slot_id: bytes) -> Slot:
        """The slot of that id. Raises CommandError: not allocated."""
        slot = self.slots.get(slot_id)
        if slot is None:
            raise CommandError("state slot is not allocated")
        return slot

    def free(self, slot_id: bytes) -> bool:
        """Whether there was such a slot; it is gone now."""
        slot = self.slots.pop(slot_id, None)
        if slot is not None:
            self.stored_bytes -= slot.size
        return slot is not None
