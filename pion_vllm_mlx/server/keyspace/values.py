"""What a key may hold: a string, a hash, a list, a set or a sorted set, all of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeAlias


class SortedSet:
    """Members with a score each, in the order of score, then member."""

    __slots__ = ("_order", "scores")

    def __init__(self, scores: Iterable[tuple[bytes, float]] = ()) -> None:
        self.scores: dict[bytes, float] = dict(scores)
        self._order: list[tuple[float, bytes]] | None = None

    def __len__(self) -> int:
        return len(self.scores)

    def __setitem__(self, member: bytes, score: float) -> None:
        self.scores[member] = score
        self._order = None

    def discard(self, member: bytes) -> None:
        """Remove a member if it is there."""
        self.scores.pop(member, None)
        self._order = None

    def in_order(self) -> list[tuple[float, bytes]]:
        """All ``(score, member)``; the list must not be changed."""
        order = self._order
        if order is None:
            order = self._order = sorted((score, m) for m, score in self.scores.items())
        return order


Hash: TypeAlias = dict[bytes, bytes]
List: TypeAlias = "deque[bytes]"
Members: TypeAlias = set[bytes]
Value: TypeAlias = "bytes | Hash | List | Members | SortedSet"

KINDS: dict[type, str] = {
    bytes: "string",
    dict: "hash",
    deque: "list",
    set: "set",
    SortedSet: "zset",
}


def kind_of(value: Value) -> str:
    """The word that TYPE answers."""
    return KINDS[type(value)]


def copy_of(value: Value) -> Value:
    """A value that can be changed without changing this one."""
    match value:
        case bytes():
            return value
        case SortedSet():
            return SortedSet(value.scores.items())
    return value.copy()
