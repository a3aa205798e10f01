"""Whose rows leave first where lineages are stored: as their own index tells.

A conversation stands on segments that others share. Whoever stores, restores or continues one
marks its whole chain as used in ``pps:lru``, so that nothing there is older than what stands on
it; among equals the newest segment leaves first: a leaf before what it stands on. The order in
which the server itself saw its sessions accessed knows none of that: memory serves a shared
root for days, and only its leaves are written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pion_vllm_mlx.server.keyspace.keyspace import Keyspace
from pion_vllm_mlx.server.keyspace.values import SortedSet
from pion_vllm_mlx.server.lineage import number_of
from pion_vllm_mlx.server.store.eviction import (
    LeastRecentlyUsed,
    PinLimits,
    Shortage,
    protected,
)
from pion_vllm_mlx.server.store.index import Session, group_of
from pion_vllm_mlx.server.store.state import State

MOST_ANCHORS = 16
"""As many anchors leave after all else that is not pinned, those that were used last."""

_ROWS, _LRU = b"pps", b"pps:lru"


class LineageOrder(LeastRecentlyUsed):
    """The least recently used session first, then anchors, then those that pins protect.

    Segments of lineages take each other's places so that they are in the order of ``pps:lru``;
    everybody else stays where the server's own order has them. A third of the disk budget is
    kept for anchors, and for what these stand on, at most.
    """

    def __init__(self, pins: PinLimits, keyspace: Keyspace) -> None:
        super().__init__(pins)
        self._keyspace = keyspace

    def victims(
        self, state: State, shortage: Shortage, arriving: Sequence[bytes] = ()
    ) -> Iterator[Session]:
        order = self._by_use(state)
        kept = protected(self.pins, reversed(order))
        anchors = self._anchors()
        later = [one for one in order if one.sid not in kept and group_of(one.sid) in anchors]
        yield from (
            one for one in order if one.sid not in kept and group_of(one.sid) not in anchors
        )
        yield from later
        yield from (one for one in order if one.sid in kept)

    # -- inside ----------------------------------------------------------------

    def _by_use(self, state: State) -> list[Session]:
        """All sessions, those of lineages by the last use that their index tells."""
        order = state.by_access()
        places: list[int] = []
        mine: list[tuple[tuple[float, int], int]] = []
        uses: dict[bytes, tuple[float, int] | None] = {}
        scores: dict[bytes, Mapping[bytes, float]] = {}
        for place, session in enumerate(order):
            if not session.sid.startswith(_ROWS):
                continue
            group = group_of(session.sid)
            if group in uses:
                use = uses[group]
            else:
                use = uses[group] = self._last_use(group, scores)
            if use is not None:
                places.append(place)
                mine.append((use, place))
        mine.sort()
        sorted_sessions = [order[place] for _, place in mine]
        for place, session in zip(places, sorted_sessions, strict=True):
            order[place] = session
        return order

    def _last_use(
        self, namespace: bytes, scores: dict[bytes, Mapping[bytes, float]]
    ) -> tuple[float, int] | None:
        """When a segment was last used, and its number, negative; None for none of a lineage.

        One that is not shown yet was used when it got its number; what no index names, never.
        """
        head, _, number = namespace.rpartition(b"s")
        segment = number_of(number)
        if segment is None or len(head) < len(_ROWS):
            return None
        mid = head[len(_ROWS) :]
        if _LRU not in scores:
            scores[_LRU] = self._scores(_LRU)
        score = scores[_LRU].get(b"%s:%s" % (mid, number))
        if score is None:
            loose = b"pps:%s:loose" % mid
            if loose not in scores:
                scores[loose] = self._scores(loose)
            score = scores[loose].get(namespace, -math.inf)
        return score, -segment

    def _anchors(self) -> set[bytes]:
        """The namespaces of the anchors that were used last, and of what they stand on."""
        most_bytes = self.pins.bytes * 2 // 3
        sizes = self._fields(b"pps:sizes")
        scores = self._scores(b"pps:anchors")
        chosen: set[bytes] = set()
        for member in _in_turn(scores)[:MOST_ANCHORS]:
            chain = chosen | {member, *self._above(member)}
            if not most_bytes or sum(number_of(sizes.get(one)) or 0 for one in chain) <= most_bytes:
                chosen = chain
        return {_ROWS + b"s".join(member.rsplit(b":", 1)) for member in chosen}

    def _above(self, member: bytes) -> Iterator[bytes]:
        """The segments that one stands on, as the keys over all models name them."""
        mid, _, number = member.rpartition(b":")
        for item in self._fields(b"pps:%s:seg:%s" % (mid, number)).get(b"up", b"").split(b","):
            if item:
                yield b"%s:%s" % (mid, item.partition(b":")[0])

    def _fields(self, key: bytes) -> Mapping[bytes, bytes]:
        value = self._found(key)
        return value if isinstance(value, dict) else {}

    def _scores(self, key: bytes) -> Mapping[bytes, float]:
        value = self._found(key)
        return value.scores if isinstance(value, SortedSet) else {}

    def _found(self, key: bytes) -> object:
        entry = self._keyspace.data.find(key, self._keyspace.now)
        return None if entry is None else entry.value


def _in_turn(scores: Mapping[bytes, float]) -> list[bytes]:
    """The member of each model and user that was used last, then the second one, and so on."""
    turns: Counter[bytes] = Counter()
    ranked: list[tuple[int, bytes]] = []
    for member in sorted(scores, key=lambda one: scores[one], reverse=True):
        mid = member.rpartition(b":")[0]
        ranked.append((turns[mid], member))
        turns[mid] += 1
    return [member for _, member in sorted(ranked, key=lambda one: one[0])]
