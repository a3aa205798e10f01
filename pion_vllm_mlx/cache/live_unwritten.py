"""The in-process tier that gives nothing up before it is written.

Between the end of a reply and the moment when its rows are in the store they may have to go from
memory, where that is small: nobody would find them.  So they are set aside until then.  That
costs next to nothing where what waits to be written has hold of the same arrays.  It has copies
under CUDA, and of caches that somebody else may write to: what is set aside is held twice then.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.lineage.lending import can_be_lent
from pion_vllm_mlx.cache.live_tier import (
    TOKEN_BYTES,
    Entry,
    LiveHit,
    LiveTier,
    Tokens,
    common_tokens,
    encode,
)

Schedule = Callable[[list[mx.array]], object]


class _Aside(LiveTier):
    """What another tier gives up, however many states of one conversation."""

    def adopt(self, key: bytes, entry: Entry) -> None:
        """Keeps an entry, where there is room; the arrays are the same ones."""
        own = replace(entry)  # a list of its arrays of its own: the other one is emptied
        with self._lock:
            if self._covered(key) or sum(one.nbytes for one in own.arrays) > self.budget_bytes:
                return
            self._drop_superseded(key, own)
            self._insert(key, own)
            self._shrink(keep=key)

    def forget(self, key: bytes, waiting: Collection[bytes]) -> None:
        """Gives up what was here for ``key`` alone, and for none of those that are ``waiting``."""
        with self._lock:
            at = bisect_left(self._all, key)
            those = takewhile(lambda name: name.startswith(key), islice(self._all, at, None))
            for name in list(those):
                if not any(gives(name, self._entries[name], other) for other in waiting):
                    self._delete(name)

    def has(self, key: bytes) -> bool:
        return key in self._entries


@dataclass
class UnwrittenTier(LiveTier):
    """A tier with a second one behind it, for what is given up while it waits to be written.

    That one holds ``aside_bytes`` at most, the least recently used given up first, and counts by
    itself: what is kept in ``budget_bytes`` is not less for it. They are to be as many as may
    wait. Without a budget nothing is kept here, either.
    """

    aside_bytes: int = 0
    _held: Counter[bytes] = field(default_factory=Counter)
    _aside: _Aside = field(init=False)

    def __post_init__(self) -> None:
        room = self.aside_bytes if self.budget_bytes else 0
        self._aside = _Aside(
            room, discard=self.discard, whole_only=self.whole_only, most_states=sys.maxsize
        )

    def hold(
        self,
        tokens: Tokens,
        caches: Sequence[Any],
        kind: str,
        schedule: Schedule,
        *,
        given: bool = True,
    ) -> Callable[[], None]:
        """Keeps what was ``put`` until it is written, or will not be, in whichever tier has room.

        What comes back is to be called then, on any thread; again it does nothing. ``given`` is
        what is told to those who write: whether they may take these arrays, which are computed
        with theirs then. ``schedule`` has them computed where they take copies.
        """
        key = encode(tokens)
        if given and can_be_lent():
            schedule = _with_theirs
        with self._lock:
            self._held[key] += 1
            if not self._covered(key):  # there was no room for it, or there is none any more
                self._aside.put(tokens, caches, kind, schedule=schedule)
        held = [key]

        def release() -> None:
            with self._lock:
                if held:
                    self._release(held.pop())

        return release

    def lost(self, tokens: Tokens) -> int:
        """The longest common prefix with what waits to be written and is here no more."""
        if not self._held:
            return 0
        key = encode(tokens)
        with self._lock:
            gone = [name for name in self._held if not self._has(name)]
        return max((common_tokens(name, key) for name in gone), default=0)

    def told(self) -> dict[str, int]:
        """What the statistics say of it."""
        return {"live_evictions": self.evictions, "unwritten_bytes": self._aside.nbytes}

    # -- what a tier does, of both ---------------------------------------------------------

    def find(self, tokens: Tokens) -> LiveHit | None:
        """As a tier does; what it is giving up meanwhile is found behind it."""
        hit = super().find(tokens)
        other = self._aside.find(tokens)
        if hit is None or (other is not None and other.length > hit.length):
            return other
        return hit

    def take(self, hit: LiveHit) -> list[Any] | None:
        """As a tier does."""
        caches = super().take(hit)
        return self._aside.take(hit) if caches is None else caches

    def common(self, tokens: Tokens) -> int:
        """As a tier does."""
        return max(super().common(tokens), self._aside.common(tokens))

    def nearest(self, tokens: Tokens) -> tuple[int, Any]:
        """As a tier does."""
        mine, other = super().nearest(tokens), self._aside.nearest(tokens)
        return other if other[0] > mine[0] else mine

    def remove(self, tokens: Tokens) -> bool:
        """As a tier does."""
        aside = self._aside.remove(tokens)
        return super().remove(tokens) or aside

    def clear(self) -> None:
        """As a tier does."""
        super().clear()
        self._aside.clear()

    # -- inside ----------------------------------------------------------------------------

    def _has(self, key: bytes) -> bool:
        return key in self._entries or self._aside.has(key)

    def _give_up(self, key: bytes) -> None:
        entry = self._entries[key]
        if any(gives(key, entry, other) for other in self._held):
            self._aside.adopt(key, entry)
        self._delete(key)

    def _release(self, key: bytes) -> None:
        self._held[key] -= 1
        if self._held[key] <= 0:
            del self._held[key]
            self._aside.forget(key, self._held)


def gives(name: bytes, entry: Entry, key: bytes) -> bool:
    """Whether the entry ``name`` can be cut to ``key``."""
    return name == key or (name.startswith(key) and entry.floor * TOKEN_BYTES <= len(key))


def _with_theirs(arrays: list[mx.array]) -> None:
    """They are computed with what is to be written."""
