"""The keys as one command sees them: at one moment, each as the kind it expects."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pion_vllm_mlx.server.keyspace.data import Data, Entry, V, of_kind
from pion_vllm_mlx.server.keyspace.values import Hash, List, Members, SortedSet


@dataclass(frozen=True)
class View:
    """Values must not be changed. Every look-up of another kind raises WrongType."""

    data: Data
    now: int

    def entry(self, key: bytes) -> Entry | None:
        """What a key holds, whatever its kind; None when it is not there."""
        return self.data.find(key, self.now)

    def string(self, key: bytes) -> bytes | None:
        return self._value(key, bytes)

    def hash(self, key: bytes) -> Hash:
        """The fields of a key, none when it is not there."""
        return self._value(key, dict) or {}

    def list(self, key: bytes) -> List:
        return self._value(key, deque) or deque()

    def members(self, key: bytes) -> Members:
        return self._value(key, set) or set()

    def sorted_set(self, key: bytes) -> SortedSet:
        return self._value(key, SortedSet) or SortedSet()

    def _value(self, key: bytes, kind: type[V]) -> V | None:
        entry = self.entry(key)
        return None if entry is None else of_kind(entry, kind)
