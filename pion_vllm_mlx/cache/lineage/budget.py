"""The budget: what lineages hold in all, and who goes when that is too much.

The least recently used segments go first, among equals the newest: a leaf before what it
stands on. Never a segment with children, an anchor within its caps, one that is pinned, or
one of the chain being written.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from pion_vllm_mlx.cache.connection import info_fields
from pion_vllm_mlx.cache.lineage.client import LineageClient, as_int, as_text, pairs_of
from pion_vllm_mlx.cache.lineage.index import (
    ANCHORS_KEY,
    LRU_KEY,
    SIZES_KEY,
    Index,
    Names,
    Segment,
)
from pion_vllm_mlx.cache.lineage.policy import MOST_ANCHOR_BYTES, MOST_ANCHORS
from pion_vllm_mlx.cache.lineage.publish import Publisher
from pion_vllm_mlx.errors import DamagedData, PionError

SPARE_SESSIONS = 16
ANCHOR_SHARE = 3
"""Anchors hold at most this part of the budget."""

FRESH_SECONDS = 5.0
ROOMY_SHARE = 0.9

_MOST_ROUNDS = 64
_READ_AT_ONCE = 32


class OverBudget(PionError):
    """There is no room for what was to be stored, and nothing that may go."""


@dataclass(frozen=True)
class Member:
    """A segment of any model, as the keys over all models name it."""

    mid: str
    number: int
    size: int
    used: float
    anchor: bool


_Victim = tuple[Member, Segment | None]


@dataclass
class Gauge:
    """How much was held when it was last counted, and what was stored since by this process.

    Counting reads every segment of every model: it is not done for each store while there is
    plenty of room. Others may go past the budget by what they store in a few seconds.
    """

    counted_at: float = -math.inf
    held_bytes: int = 0
    free_sessions: int = 0

    def plenty(self, num_bytes: int, budget_bytes: int) -> bool:
        """Whether ``num_bytes`` surely fit; then they count as stored."""
        fresh = time.monotonic() - self.counted_at < FRESH_SECONDS
        fits = not budget_bytes or self.held_bytes + num_bytes <= ROOMY_SHARE * budget_bytes
        if not fresh or not fits or self.free_sessions < 2 * SPARE_SESSIONS:
            return False
        self.held_bytes += num_bytes
        self.free_sessions -= 2
        return True


class Budget:
    """Makes room. For the thread that writes."""

    def __init__(
        self, client: LineageClient, names: Names, budget_bytes: int, gauge: Gauge | None = None
    ) -> None:
        self._client = client
        self._names = names
        self._budget = budget_bytes
        self._gauge = gauge or Gauge()
        self.evicted = 0

    def held(self) -> int:
        """Bytes of all lineages: rows, states, records, tokens."""
        return sum(member.size for member in self._members())

    def make_room(
        self, num_bytes: int, chain: Collection[int], *, only_try: bool = False
    ) -> None:
        """Evicts until ``num_bytes`` more fit; nothing where they cannot.

        ``only_try``: evicts nothing in any case. Raises OverBudget, StoreUnavailable.
        """
        if not only_try and self._gauge.plenty(num_bytes, self._budget):
            return
        for _ in range(_MOST_ROUNDS):
            members, held = self._members(), 0
            if self._budget:
                held = sum(one.size for one in members)
            over, free = held + num_bytes - self._budget, self._free_sessions()
            if (over <= 0 or not self._budget) and free >= 2 + SPARE_SESSIONS:
                if only_try:
                    return
                self._gauge.counted_at = time.monotonic()
                self._gauge.held_bytes = held + num_bytes
                self._gauge.free_sessions = free - 2
                return
            need = max(over, 1) if self._budget else 1
            victims, lacking = self._victims(members, need, chain)
            if lacking:
                raise OverBudget(self._no_room(num_bytes, over, lacking))
            if only_try:
                return
            for member, segment in victims:
                self.evicted += self.evict(Names(member.mid), member.number, segment)
        raise OverBudget("others store faster than room is made")

    def evict(self, names: Names, number: int, segment: Segment | None) -> bool:
        """Takes a segment away; None for one whose fields are gone. False if it may not go."""
        tokens = None
        if segment is not None:
            with contextlib.suppress(DamagedData):  # of a broken chain the blocks lead nowhere
                tokens = Index(self._client, names).tokens_up_to(segment)
        gone = segment or Segment(number, -1, 0, 0)
        return Publisher(self._client, names).remove(gone, tokens)

    def take_out(self, names: Names, segment: Segment) -> None:
        """Takes away a segment, and all that stands on it, the leaves first."""
        index, whole = Index(self._client, names), [segment]
        for one in whole:
            kids = index.segments([kid.number for kid in one.kids])
            whole += [kid for kid in kids if kid is not None]
        for one in reversed(whole):
            self.evict(names, one.number, one)

    # -- inside ---------------------------------------------------------------

    def _members(self) -> list[Member]:
        """All segments, the least recently used first, among equals the newest."""
        ranked, sizes, anchors = self._client.demand(
            self._names.route,
            [
                ("ZRANGE", LRU_KEY, 0, -1, "WITHSCORES"),
                ("HGETALL", SIZES_KEY),
                ("ZRANGE", ANCHORS_KEY, 0, -1),
            ],
        )
        by_name, pinned = dict(pairs_of(sizes)), set(anchors or ())
        found = []
        for name, score in pairs_of(ranked):
            mid, _, number = as_text(name).rpartition(":")
            size = as_int(as_text(by_name.get(name)), 0)
            used = float(as_text(score))
            found.append(Member(mid, as_int(number), size, used, name in pinned))
        return sorted(found, key=lambda one: (one.used, -one.number))

    def _free_sessions(self) -> int:
        """How many more sessions the server takes; a segment is two."""
        (reply,) = self._client.demand(self._names.route, [("KV.PREFIX.INFO",)])
        fields = info_fields(reply)
        most = as_int(fields.get("vstore_max_sessions"), 0)
        return most - as_int(fields.get("vstore_sessions"), 0) if most else 1 << 30

    def _victims(
        self, members: list[Member], need: int, chain: Collection[int]
    ) -> tuple[list[_Victim], int]:
        """The least recently used leaves of ``need`` bytes, and how many of those are lacking.

        A segment that is a leaf once others have gone comes behind them.
        """
        protected = self._protected(members)
        left = self._read(
            one
            for one in members
            if one not in protected and not (one.mid == self._names.mid and one.number in chain)
        )
        victims: list[_Victim] = []
        gone: set[tuple[str, int]] = set()
        went = True
        while went and need > 0:
            went, stay = False, []
            for member, segment in left:
                kids = segment.kids if segment is not None else ()
                if need <= 0 or any((member.mid, kid.number) not in gone for kid in kids):
                    stay.append((member, segment))
                elif segment is None or not segment.pinned:
                    victims.append((member, segment))
                    gone.add((member.mid, member.number))
                    need, went = need - member.size, True
                if need <= 0:
                    break
            left = iter(stay)
        return victims, max(need, 0)

    def _read(self, members: Iterable[Member]) -> Iterator[_Victim]:
        """Members with their segments, which are read some at a time."""
        for mid, group in groupby(members, key=attrgetter("mid")):
            index, rest = Index(self._client, Names(mid)), list(group)
            for first in range(0, len(rest), _READ_AT_ONCE):
                some = rest[first : first + _READ_AT_ONCE]
                yield from zip(some, index.segments([one.number for one in some]), strict=True)

    def _no_room(self, num_bytes: int, over: int, lacking: int) -> str:
        """What to say where ``lacking`` bytes are not to be had."""
        if over <= 0 or not self._budget:
            return "the server takes no more sessions, and none of them may go"
        stays = max(0, self._budget - num_bytes + lacking)
        return (
            f"{num_bytes:,} bytes more do not fit: the budget is {self._budget:,} bytes, "
            f"of which {stays:,} may not go, being pinned, an anchor, or what these stand on"
        )

    def _protected(self, members: list[Member]) -> set[Member]:
        """The anchors within their caps: of each model and user the latest one first.

        A user with many of them has the places that others leave, and takes nobody's last.
        """
        most_bytes = MOST_ANCHOR_BYTES
        if self._budget:
            most_bytes = min(most_bytes, self._budget // ANCHOR_SHARE)
        found: set[Member] = set()
        held = 0
        for member in in_turn([one for one in reversed(members) if one.anchor]):
            if len(found) < MOST_ANCHORS and held + member.size <= most_bytes:
                found.add(member)
                held += member.size
        return found


def in_turn(latest_first: Iterable[Member]) -> list[Member]:
    """One of each model and user, then a second one of each, and so on."""
    turns: Counter[str] = Counter()
    ranked: list[tuple[int, Member]] = []
    for member in latest_first:
        ranked.append((turns[member.mid], member))
        turns[member.mid] += 1
    return [member for _, member in sorted(ranked, key=lambda one: one[0])]
