"""Which (session, layer) has its K/V resident: WARM slots, and the COLD registry behind them.

::

    MISSING --put--> WARM --a limit is reached--> COLD --the registry is full--> MISSING
                       ^--------------put---------'

WARM holds K/V, COLD only says that the key was WARM once and of what shape. All limits
give up the least recently used; where there are tenants, one past its quota gives its own,
and past the limits of all the owner with the most gives first. Blocks that slots share count
once, and come free with the last of them. Nothing here is logged or saved: it is a cache, and a
restart leaves it empty. Belongs to the event loop, all but ``touch``.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from pion_vllm_mlx.errors import ColdMiss, OutOfMemory
from pion_vllm_mlx.server.attention.shared_blocks import BlockPool, Share
from pion_vllm_mlx.server.memory.attend_index import NotStored

MAX_WARM = 256
MAX_COLD = 1024


class Key(NamedTuple):
    """What a slot is found by."""

    sid: bytes
    layer: int


class Held(Protocol):
    """K/V of one layer, in memory. ``nbytes`` may grow by what queries derive from them.

    Of ``nbytes`` those of ``share``, where there is one, are blocks that others may use, too.
    """

    @property
    def heads(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def dim(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def share(self) -> Share | None: ...

    def shrink(self, most_bytes: int) -> None:
        """Give up what queries derived until so many bytes are left, or nothing derived is."""


HeldT = TypeVar("HeldT", bound=Held)


@dataclass(eq=False)
class Slot(Generic[HeldT]):
    """A WARM entry. ``sources``: the namespaces whose stored rows it was made from, if any.

    ``held`` may be exchanged for the same K/V laid out otherwise.
    """

    held: HeldT
    sources: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class ColdEntry:
    """What is left of a demoted slot."""

    heads: int
    tokens: int
    dim: int
    sources: tuple[bytes, ...]


@dataclass
class SlotCounters:
    """What happened since the start."""

    demotions: int = 0
    rehydrates: int = 0


class SlotTable(Generic[HeldT]):
    """All slots of a worker, least recently used first. ``budget`` in bytes, 0 for none."""

    def __init__(self, budget: int = 0, max_warm: int = MAX_WARM, max_cold: int = MAX_COLD) -> None:
        self.budget = budget
        self.max_warm = max_warm
        self.max_cold = max_cold
        self.warm: OrderedDict[Key, Slot[HeldT]] = OrderedDict()
        self.cold: OrderedDict[Key, ColdEntry] = OrderedDict()
        #: weak: what has left meanwhile is not kept for it
        self._touched: deque[tuple[Key, weakref.ref[Slot[HeldT]]]] = deque()
        self.counters = SlotCounters()
        #: whose a session is: of several owners the one with the most gives up a slot first
        self.owner: Callable[[bytes], bytes] | None = None
        #: bytes that an owner's K/V may take, 0 for any
        self.quota: Callable[[bytes], int] = lambda owner: 0
        #: told of a pool that slots have left with blocks that nobody uses
        self.on_loose: Callable[[BlockPool], None] = lambda pool: None

    # -- asking ----------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all that is resident, shared blocks once."""
        return sum(self._weights(self.warm).values())

    def state(self, key: Key) -> str:
        """``HIT``, ``COLD`` or ``MISS``; does not count as access."""
        if key in self.warm:
            return "HIT"
        return "COLD" if key in self.cold else "MISS"

    def shape(self, key: Key) -> tuple[int, int, int]:
        """H, N and D of what is WARM or was; zeros of what is MISSING."""
        slot = self.warm.get(key)
        found = self.cold.get(key) if slot is None else slot.held
        return (0, 0, 0) if found is None else (found.heads, found.tokens, found.dim)

    def find(self, key: Key) -> Slot[HeldT]:
        """The resident slot; does not count as access. Raises ColdMiss, NotStored."""
        self.catch_up()
        slot = self.warm.get(key)
        if slot is not None:
            return slot
        if key in self.cold:
            raise ColdMiss("the K/V of this layer is not resident, KV.PREFIX.WARM brings it back")
        raise NotStored("session not found")

    def touch(self, key: Key, slot: Slot[HeldT]) -> None:
        """A query was answered from ``slot``; without effect where another one took its place.

        Any thread may say so; it holds before anybody has to leave.
        """
        self._touched.append((key, weakref.ref(slot)))

    def catch_up(self) -> None:
        """Bring the order of ``warm`` up to date with what was touched."""
        while self._touched:
            key, slot = self._touched.popleft()
            if key in self.warm and self.warm[key] is slot():
                self.warm.move_to_end(key)

    # -- changing --------------------------------------------------------------

    def check_fits(self, sid: bytes, nbytes: int) -> None:
        """Raise OutOfMemory for what would not fit the budget, or its owner's quota, even alone."""
        self.check_quota(sid, nbytes)
        if self.budget and nbytes > self.budget:
            raise OutOfMemory(
                f"{nbytes} bytes of attention K/V do not fit --attend-budget {self.budget}"
            )

    def check_quota(self, sid: bytes, nbytes: int) -> None:
        """Raise OutOfMemory for what the owner of a session may not even have alone."""
        quota = self._quota_of(sid)
        if quota and nbytes > quota:
            raise OutOfMemory(f"the quota of {quota} bytes does not allow this store")

    def _quota_of(self, sid: bytes) -> int:
        return 0 if self.owner is None else self.quota(self.owner(sid))

    def _of_same_owner(self, key: Key) -> list[Key]:
        """The WARM keys of a key's owner, least recently used first."""
        assert self.owner is not None
        owner = self.owner(key.sid)
        return [one for one in self.warm if self.owner(one.sid) == owner]

    def put(self, key: Key, slot: Slot[HeldT], *, rehydrates: bool = False) -> None:
        """Make ``key`` WARM, the most recently used; others are demoted to make room.

        ``rehydrates``: it comes back from stored rows, which counts where it was COLD.
        Raises OutOfMemory, and then nothing has changed, for what does not fit at all.
        """
        self.check_fits(key.sid, slot.held.nbytes)
        self.catch_up()
        if key in self.warm:
            self._take_out(key)
        if self.cold.pop(key, None) is not None and rehydrates:
            self.counters.rehydrates += 1
        while len(self.warm) >= self.max_warm:
            self._demote(key, by_bytes=False)
        self.warm[key] = slot
        if slot.held.share is not None:
            slot.held.share.pool.enter(slot.held.share.table)
        self.fit(key)

    def exchange(self, slot: Slot[HeldT], held: HeldT) -> None:
        """Have a WARM slot hold the same K/V, laid out otherwise."""
        before, slot.held = slot.held.share, held
        if held.share is not None:
            held.share.pool.enter(held.share.table)
        if before is not None:
            before.pool.leave(before.table)

    def fit(self, newest: Key, *, keep_derived: bool = True) -> None:
        """Demote until quota and budget hold; ``newest`` stays.

        What queries derived from it may push out others, but is given up where it would not
        fit even alone, or not ``keep_derived``.
        """
        self.catch_up()
        quota = self._quota_of(newest.sid)
        slot = self.warm.get(newest)
        limits = [one for one in (quota, self.budget) if one] if keep_derived else [0]
        if slot is not None and limits:
            slot.held.shrink(min(limits))
        if quota:
            mine = self._of_same_owner(newest)
            excess = sum(self._weights(mine).values()) - quota
            for key in mine:
                if excess > 0 and key != newest:
                    excess -= self._cool(key)
        if not self.budget:
            return
        excess = self.nbytes - self.budget
        while excess > 0 and len(self.warm) > 1:
            excess -= self._demote(newest, by_bytes=True)

    def spare(self, nbytes: int) -> None:
        """Demote until so many bytes came free, or nothing is left.

        Those of a pool come free with the last of its slots, or later, when it is laid out again.
        """
        self.catch_up()
        while nbytes > 0 and self.warm:
            victim = self._victim(self._weights(self.warm), None)
            held = self.warm[victim].held
            freed, share = self._cool(victim), held.share
            if share is not None:
                freed = held.nbytes - share.nbytes
                freed += 0 if share.pool.slots else share.pool.allocated_bytes
            nbytes -= freed

    def _weights(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Bytes of each WARM slot; those of a pool are the first one's of its slots."""
        found: dict[Key, int] = {}
        seen: set[int] = set()
        for key in keys:
            held = self.warm[key].held
            found[key], share = held.nbytes, held.share
            if share is None:
                continue
            found[key] -= share.nbytes
            if id(share.pool) not in seen:
                seen.add(id(share.pool))
                found[key] += share.pool.nbytes
        return found

    def _take_out(self, key: Key) -> int:
        """Let a slot go; the bytes that are nobody's any more."""
        held = self.warm.pop(key).held
        share = held.share
        if share is None:
            return held.nbytes
        freed = held.nbytes - share.nbytes + share.pool.leave(share.table)
        if share.pool.is_loose:
            self.on_loose(share.pool)
        return freed

    def _demote(self, newest: Key | None, *, by_bytes: bool) -> int:
        """Take one slot's K/V away, never that of ``newest``; the bytes that came free."""
        weights = self._weights(self.warm) if by_bytes else dict.fromkeys(self.warm, 1)
        return self._cool(self._victim(weights, newest))

    def _cool(self, victim: Key) -> int:
        """Make a slot COLD; the bytes that came free."""
        slot = self.warm[victim]
        held, freed = slot.held, self._take_out(victim)
        while len(self.cold) >= self.max_cold:
            del self.cold[self._victim(dict.fromkeys(self.cold, 1), victim)]
        self.cold[victim] = ColdEntry(held.heads, held.tokens, held.dim, slot.sources)
        self.counters.demotions += 1
        return freed

    def _victim(self, weights: Mapping[Key, int], newest: Key | None) -> Key:
        """The first key, in order of use, of the owner with the greatest weight."""
        candidates = (key for key in weights if key != newest)
        if self.owner is None:
            return next(candidates)
        owners = {key: self.owner(key.sid) for key in weights}
        totals = Counter[bytes]() if newest is None else Counter({self.owner(newest.sid): 1})
        for key, weight in weights.items():
            totals[owners[key]] += weight
        return max(candidates, key=lambda key: totals[owners[key]])

    def forget(self, namespaces: Iterable[bytes]) -> None:
        """Dropped namespaces take along what was made from them, and the sessions of their name.

        Those are ``ns`` itself, ``ns_attn`` and ``ns_attn:…``; they become MISSING.
        """
        gone = set(namespaces)
        attended = {namespace + b"_attn" for namespace in gone}
        names = gone | attended
        entries: list[tuple[Key, Slot[HeldT] | ColdEntry]] = [*self.warm.items()]
        entries += self.cold.items()
        for key, entry in entries:
            beginning = key.sid.rpartition(b":")[0]
            made_of_them = not gone.isdisjoint(entry.sources)
            if not (key.sid in names or made_of_them or beginning in attended):
                continue
            if isinstance(entry, Slot):
                self._take_out(key)
            else:
                del self.cold[key]
