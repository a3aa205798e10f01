"""The in-process lane: prefixes that already live in this process, shared, under a byte cap.

One table for the whole process, so that any prompt cache object finds what another one
prefilled. Arrays are shared read-only. MLX's slice assignment changes the Python object
it is applied to, so the very object that is kept is never handed out: a borrower gets
new ones, and its first append copies.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.layers import Side, StoredCache, rebuild
from pion_vllm_mlx.cache.slots_state import StateArrays
from pion_vllm_mlx.errors import DamagedData

DEFAULT_CAP_BYTES = 2 << 30

Key = tuple[str, str, bytes]
"""Namespace, digest of the identity, token ids: compared byte for byte."""


@dataclass(frozen=True)
class _Entry:
    slots: list[dict[str, Any]]
    rows: dict[tuple[int, Side], list[tuple[int, mx.array]]]
    states: dict[int, StateArrays]
    nbytes: int


class InProcessPrefixes:
    """Least recently used prefixes leave first. Thread-safe."""

    def __init__(self, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        self.cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._owed: dict[Key, float] = {}
        self.nbytes = 0

    def get(self, key: Key) -> list[Any] | None:
        """A fresh cache over the kept arrays, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
        return _borrowed(entry)

    def size_of(self, key: Key) -> int:
        """Bytes of an entry, 0 for one that is not here."""
        with self._lock:
            entry = self._entries.get(key)
            return entry.nbytes if entry else 0

    def put(self, key: Key, stored: StoredCache) -> bool:
        """Keeps compact copies of a cache's rows and states; False if it is over the cap."""
        size = sum(run.array.nbytes for run in stored.rows) + sum(
            array.nbytes
            for arrays in stored.states.values()
            for array in arrays
            if array is not None
        )
        if size > self.cap_bytes:
            return False
        entry = _kept(stored, size)
        with self._lock:
            self._remove(key)
            self._entries[key] = entry
            self.nbytes += size
            while self.nbytes > self.cap_bytes:
                self._remove(next(iter(self._entries)))
        return True

    def owe(self, key: Key, prefill_ms: float) -> None:
        """Notes that a prefix that is here was not stored, and how long its prefill took."""
        with self._lock:
            if key in self._entries:
                self._owed[key] = prefill_ms

    def owed(self, key: Key) -> float | None:
        """The time of the prefill of a prefix that no store has yet; None for any other."""
        with self._lock:
            return self._owed.get(key)

    def settle(self, key: Key) -> None:
        """A store has it."""
        with self._lock:
            self._owed.pop(key, None)

    def seen_before(self, key: Key) -> bool:
        """Whether this was already asked; remembers the hashes of the last 1,024 keys."""
        mark = hash(key)  # long prompts are not kept for this; a collision only keeps too early
        with self._lock:
            known = mark in self._seen
            self._seen[mark] = None
            self._seen.move_to_end(mark)
            if len(self._seen) > 1024:
                self._seen.popitem(last=False)
            return known

    def forget(self, namespace: str | None = None) -> None:
        """Lets go of a namespace, or of everything."""
        with self._lock:
            for key in [k for k in self._entries if namespace is None or k[0] == namespace]:
                self._remove(key)

    def set_cap(self, cap_bytes: int) -> None:
        """Another cap, for the whole process; the oldest prefixes leave at once."""
        with self._lock:
            self.cap_bytes = cap_bytes
            while self.nbytes > self.cap_bytes:
                self._remove(next(iter(self._entries)))

    def _remove(self, key: Key) -> None:
        self._owed.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes


PROCESS = InProcessPrefixes()


def _kept(stored: StoredCache, nbytes: int) -> _Entry:
    rows: dict[tuple[int, Side], list[tuple[int, mx.array]]] = {}
    for run in stored.rows:
        rows.setdefault((run.layer, run.side), []).append((run.start, _own(run.array)))
    states: dict[int, StateArrays] = {
        slot: [None if array is None else _own(array) for array in arrays]
        for slot, arrays in stored.states.items()
    }
    mx.eval([array for runs in rows.values() for _, array in runs], list(states.values()))
    return _Entry(stored.slots, rows, states, nbytes)


def _own(array: mx.array) -> mx.array:
    """A compact copy: a view would keep the borrower's whole buffer alive, uncounted."""
    return mx.array(array)


def _borrowed(entry: _Entry) -> list[Any]:
    def fetch(layer: int, side: Side, start: int, end: int) -> mx.array:
        for first, array in entry.rows[layer, side]:
            if first == start and array.shape[2] == end - start:
                return array[0]
        raise DamagedData(f"leaf {layer} {side}: rows {start} to {end} are not kept")

    states = {
        slot: [None if array is None else array[...] for array in arrays]
        for slot, arrays in entry.states.items()
    }
    return rebuild(entry.slots, fetch, states)
