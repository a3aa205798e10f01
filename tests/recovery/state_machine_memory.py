"""Small models of what is kept in memory only: slots, blobs, indices of keys, resident K/V."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.recovery.state_machine_keys import OK, Refused

DIMENSIONS = 768


def embedding(direction: int) -> bytes:
    """A unit vector along one axis: cosines of two are 0 or 1."""
    vector = np.zeros(DIMENSIONS, "<f4")
    vector[direction] = 2.0
    return vector.tobytes()


@dataclass
class Slot:
    data: bytearray
    ring: bool

    def place(self, offset: int, length: int) -> list[int]:
        """The positions of so many bytes."""
        size = len(self.data)
        if length > size or (not self.ring and offset + length > size):
            raise Refused("out of range")
        return [(offset + n) % size for n in range(length)]


@dataclass
class Index:
    """Keys and values by layer."""

    widths: tuple[int, int]
    layers: dict[int, list[tuple[np.ndarray, bytes]]] = field(default_factory=dict)

    def nearest(self, layer: int, k: int, query: np.ndarray) -> bytes:
        """The values of the nearest keys; of equal ones the first stored."""
        rows = self.layers[layer]
        order = sorted(range(len(rows)), key=lambda n: float(((rows[n][0] - query) ** 2).sum()))
        return b"".join(rows[n][1] for n in order[:k])


@dataclass
class Memory:
    """All four; ``restarted`` forgets everything. ``resident``: H, N, D and V by session."""

    slots: dict[bytes, Slot] = field(default_factory=dict)
    blobs: dict[bytes, tuple[int, bytes, bytes]] = field(default_factory=dict)
    indices: dict[bytes, Index] = field(default_factory=dict)
    resident: dict[bytes, tuple[list[int], bytes]] = field(default_factory=dict)

    def copy(self) -> Memory:
        return copy.deepcopy(self)

    def restarted(self) -> None:
        self.slots.clear()
        self.blobs.clear()
        self.indices.clear()
        self.resident.clear()

    # -- slots -------------------------------------------------------------------

    def alloc(self, name: bytes, size: int, ring: bool) -> Any:
        if name in self.slots:
            raise Refused("already allocated")
        self.slots[name] = Slot(bytearray(size), ring)
        return OK

    def _slot(self, name: bytes) -> Slot:
        if name not in self.slots:
            raise Refused("not allocated")
        return self.slots[name]

    def write(self, name: bytes, offset: int, data: bytes) -> int:
        slot = self._slot(name)
        for place, byte in zip(slot.place(offset, len(data)), data, strict=True):
            slot.data[place] = byte
        return len(data)

    def read(self, name: bytes, offset: int, length: int) -> bytes:
        slot = self._slot(name)
        return bytes(slot.data[place] for place in slot.place(offset, length))

    def free(self, name: bytes) -> int:
        return int(self.slots.pop(name, None) is not None)

    # -- blobs -------------------------------------------------------------------

    def keep(self, name: bytes, direction: int, blob: bytes, model: bytes) -> Any:
        self.blobs.pop(name, None)
        self.blobs[name] = direction, blob, model
        return OK

    def find(self, direction: int, model: bytes | None) -> bytes | None:
        """The latest of the entries in that direction."""
        found = [
            blob
            for where, blob, tag in self.blobs.values()
            if where == direction and model in (None, tag)
        ]
        return found[-1] if found else None

    # -- indices -----------------------------------------------------------------

    def open_index(self, sid: bytes, widths: tuple[int, int]) -> None:
        index = self.indices.get(sid)
        if index is None or (index.widths != widths and not index.layers):
            self.indices[sid] = Index(widths)
        elif index.widths != widths:
            raise Refused("other parameters")

    def index(self, sid: bytes) -> Index:
        if sid not in self.indices:
            raise Refused("session not found")
        return self.indices[sid]
