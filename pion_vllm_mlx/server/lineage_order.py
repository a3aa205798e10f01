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
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

from pion_vllm_mlx.server.keyspace.keyspace import Keyspace
from pion_vllm_mlx.server.keyspace.values import SortedSet
from pion_vllm_mlx.server.lineage import number_of
from pion_vllm_mlx.server.store.eviction import LeastRecentlyUsed, PinLimits, protected
from pion_vllm_mlx.server.store.index import Session, group_of

MOST_ANCHORS = 16
"""As many anchors leave after all else that is not pinned, those that were used last."""

_ROWS, _LRU = b"pps", b"pps:lru"


class _Segment(NamedTuple):
    """What a session's name says: where the index has the last use of its segment.

    That is the score of ``member`` in ``pps:lru``, of ``namespace`` in ``loose`` before.
    """

    namespace: bytes
    member: bytes
    loose: bytes
    number: int


def _segment_of(sid: bytes) -> _Segment | None:
    """The segment whose rows a session holds; None where it is none of a lineage."""
    namespace = group_of(sid)
    head, _, digits = namespace.rpartition(b"s")
    number = number_of(digits)
    if number is None or not head.startswith(_ROWS):
        return None
    mid = head[len(_ROWS) :]
    return _Segment(namespace, b"%s:%s" % (mid, digits), b"pps:%s:loose" % mid, number)


class LineageOrder(LeastRecentlyUsed):
    """The least recently used session first, then anchors, then those that pins protect.

    Segments of lineages take each other's places so that they are in the order of ``pps:lru``;
    everybody else stays where the server's own order has them. A third of the disk budget is
    kept for anchors, and for what these stand on, at most.
    """

    def __init__(self, pins: PinLimits, keyspace: Keyspace) -> None:
        super().__init__(pins)
        self._keyspace = keyspace
        #: what was read from the names of the sessions that there were last time
        self._names: dict[bytes, _Segment | None] = {}

    def order(self, sessions: Iterable[Session]) -> Iterator[Session]:
        order = self._by_use(sessions)
        kept = protected(self.pins, reversed(order))
        anchors = self._anchors()
        yield from (
            one for one in order if one.sid not in kept and group_of(one.sid) not in anchors
        )
        yield from (one for one in order if one.sid not in kept and group_of(one.sid) in anchors)
        yield from (one for one in order if one.sid in kept)

    def used(self, session: Session) -> object:
        """When it was accessed here, and the last use that its index tells."""
        segment = _segment_of(session.sid) if session.sid.startswith(_ROWS) else None
        return session.accessed, segment and self._last_use(segment)

    # -- inside ----------------------------------------------------------------

    def _last_use(self, segment: _Segment) -> float:
        score = self._scores(_LRU).get(segment.member)
        if score is None:
            score = self._scores(segment.loose).get(segment.namespace, -math.inf)
        return score

    def _by_use(self, sessions: Iterable[Session]) -> list[Session]:
        """Sessions by their use, those of lineages by the last use that their index tells.

        One that is not shown yet was used when it got its number; what no index names, never.
        """
        order = sorted(sessions, key=lambda session: session.accessed)
        used = self._scores(_LRU)
        loose: dict[bytes, Mapping[bytes, float]] = {}
        names: dict[bytes, _Segment | None] = {}
        mine: list[tuple[float, int, int]] = []
        for place, session in enumerate(order):
            sid = session.sid
            if not sid.startswith(_ROWS):
                continue
            known = sid in self._names
            segment = names[sid] = self._names[sid] if known else _segment_of(sid)
            if segment is None:
                continue
            score = used.get(segment.member)
            if score is None:
                if segment.loose not in loose:
                    loose[segment.loose] = self._scores(segment.loose)
                score = loose[segment.loose].get(segment.namespace, -math.inf)
            mine.append((score, -segment.number, place))
        if names:  # a tenant's sessions are none of lineages
            self._names = names
        places = [place for _, _, place in mine]
        # one after the other: a sort of tuples holds all threads up five times as long
        mine.sort(key=itemgetter(1))
        mine.sort(key=itemgetter(0))
        sorted_sessions = [order[place] for _, _, place in mine]
        for place, session in zip(places, sorted_sessions, strict=True):
            order[place] = session
        return order

    def _anchors(self) -> set[bytes]:
        """The namespaces of the anchors that were used last, and of what they stand on."""
        most_bytes = self.pins.bytes * 2 // 3
        sizes = self._fields(b"pps:sizes")
        scores = dict(self._scores(b"pps:anchors"))  # a copy: keys may change on another thread
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
