"""Who goes when a limit is reached, and what a namespace takes along when it goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import TypeAlias

from pion_vllm_mlx.server.store.index import (
    KEY_SUFFIX,
    VALUE_SUFFIX,
    Session,
    group_of,
    namespaces_of,
)
from pion_vllm_mlx.server.store.records import Drop, DropStates, Record
from pion_vllm_mlx.server.store.state import State

#: why sessions and states go that a limit makes leave.
EVICTED = "evicted"


class Shortage(Enum):
    """What there is too little of."""

    SESSIONS = auto()
    BYTES = auto()


OwnersOrder: TypeAlias = Callable[[bytes], Iterator[Session]]


class EvictionPolicy(ABC):
    """Chooses which session leaves next."""

    @abstractmethod
    def order(self, sessions: Iterable[Session]) -> Iterator[Session]:
        """These sessions in the order they should leave, if they were all there are.

        Called under the write lock. Good until the next record.
        """

    @abstractmethod
    def limit_pins(self, pins: PinLimits) -> None:
        """Pins protect so much from now on."""

    @abstractmethod
    def used(self, session: Session) -> object:
        """What is another when the session was used since: it does not leave in its old turn."""

    def victims(
        self, state: State, shortage: Shortage, arriving: Sequence[bytes] = ()
    ) -> Iterator[Session]:
        """Sessions in the order they should leave, for the sids ``arriving`` where they do.

        Called under the write lock; must not change the state. Good until the next record.
        """
        return self.order(state.sessions.values())

    def held_by(self, owner: bytes, state: State) -> Collection[bytes]:
        """The sids of an owner's sessions."""
        return state.sessions.keys()

    def pick(
        self, of: OwnersOrder, shortage: Shortage, arriving: Sequence[bytes]
    ) -> Iterator[Session]:
        """As ``victims``, out of the sessions that ``of`` has of an owner, in their order."""
        return of(b"")


OwnerOf: TypeAlias = Callable[[bytes], bytes]


def _one_owner(sid: bytes) -> bytes:
    """Without tenants all is the server's own user's."""
    return b""


@dataclass(frozen=True)
class PinLimits:
    """How much pins may protect: so many sessions, so many bytes of rows; 0 = no limit.

    Half of the session table and half of the disk budget: what is not pinned always finds
    room, and a forgotten pin cannot close the store. ``owner``: whose a session is.
    """

    sessions: int = 0
    bytes: int = 0
    owner: OwnerOf = _one_owner

    @classmethod
    def half_of(cls, max_sessions: int, disk_budget: int) -> PinLimits:
        return cls(max(2, max_sessions // 2), disk_budget // 2)

    def allow(self, count: int, nbytes: int) -> bool:
        """Whether so many sessions with so many bytes are within the limits."""
        return not (self.sessions and count > self.sessions or self.bytes and nbytes > self.bytes)

    def refusal(self, sessions: Iterable[Session], more: Iterable[Session]) -> str:
        """Why ``more`` sessions cannot be pinned beside ``sessions``, empty when they can."""
        pinned = [session for session in sessions if session.pinned] + list(more)
        if self.allow(len(pinned), sum(session.row_bytes() for session in pinned)):
            return ""
        limits = [f"{self.sessions} sessions", f"{self.bytes} bytes"]
        allowed = " and ".join(limit for limit in limits if limit[0] != "0")
        return f"pinned prefixes may take {allowed} at most"


def protected(pins: PinLimits, latest_first: Iterable[Session]) -> set[bytes]:
    """The sids that pins protect, of sessions in the order in which they were used.

    Pinned prefixes may grow beyond the limits, and the pins of several owners be more than
    these: then those protect nothing that whoever has pinned most used least recently.
    """
    pinned: dict[bytes, list[Session]] = {}
    for session in latest_first:
        if session.pinned:
            pinned.setdefault(pins.owner(session.sid), []).append(session)
    counts = {owner: len(held) for owner, held in pinned.items()}
    sizes = {owner: sum(map(Session.row_bytes, held)) for owner, held in pinned.items()}
    while not pins.allow(sum(counts.values()), sum(sizes.values())):
        most = counts if not pins.allow(sum(counts.values()), 0) else sizes
        owner = max(most, key=lambda one: most[one])
        sizes[owner] -= pinned[owner].pop().row_bytes()
        counts[owner] -= 1
    return {session.sid for held in pinned.values() for session in held}


class LeastRecentlyUsed(EvictionPolicy):
    """The least recently accessed session first; those that pins protect last."""

    def __init__(self, pins: PinLimits | None = None) -> None:
        self.pins = pins or PinLimits()

    def limit_pins(self, pins: PinLimits) -> None:
        self.pins = pins

    def used(self, session: Session) -> object:
        return session.accessed

    def order(self, sessions: Iterable[Session]) -> Iterator[Session]:
        order = sorted(sessions, key=lambda session: session.accessed)
        kept = protected(self.pins, reversed(order))
        yield from (session for session in order if session.sid not in kept)
        yield from (session for session in order if session.sid in kept)


def state_sids(state: State, namespace: bytes) -> tuple[bytes, ...]:
    """The sids of a namespace's recurrent states: its own and its checkpoints' ``ns@*``."""
    return tuple(state.states_under.get(namespace, ()))


def is_stray(state: State, sid: bytes) -> bool:
    """Whether there is no namespace that the states of a sid go along with."""

    def there(namespace: bytes) -> bool:
        sids = (namespace, namespace + KEY_SUFFIX, namespace + VALUE_SUFFIX)
        return any(group_of(one) == namespace and one in state.sessions for one in sids)

    return not any(map(there, namespaces_of(sid)))


def strays(state: State) -> list[tuple[bytes, int]]:
    """The sids of states of no namespace that is there, and when each was accessed; oldest first.

    States may be stored without a namespace, and then no prefix takes them along.
    """
    found = [
        (sid, max(blob.accessed for blob in layers.values()))
        for sid, layers in state.states.items()
        if is_stray(state, sid)
    ]
    return sorted(found, key=lambda one: one[1])


def oldest_stray(state: State) -> tuple[bytes, int] | None:
    """The first of the strays."""
    return next(iter(strays(state)), None)


def drop_namespace(state: State, namespace: bytes, reason: str, at: int) -> list[Record]:
    """The records that free both sides of a namespace and its states."""
    effects: list[Record] = []
    sids = tuple(
        sid for sid in (namespace + KEY_SUFFIX, namespace + VALUE_SUFFIX) if sid in state.sessions
    )
    if sids:
        effects.append(Drop(sids, reason, at))
    states = state_sids(state, namespace)
    if states:
        effects.append(DropStates(states, reason=reason))
    return effects


def drop_expired(state: State, now_ms: int, limit: int) -> list[Record]:
    """The records that free namespaces past their deadline, about ``limit`` sessions of them."""
    over = (sid for sid in state.timed if state.sessions[sid].deadline_ms <= now_ms)
    groups = dict.fromkeys(group_of(sid) for sid in islice(over, limit))
    effects = (drop_namespace(state, group, "expired", now_ms // 1000) for group in groups)
    return [effect for namespace in effects for effect in namespace]


def drop_damaged(state: State, sid: bytes, reason: str, at: int) -> list[Record]:
    """The records that free a session with all that belongs to its namespace."""
    effects = drop_namespace(state, group_of(sid), reason, at)
    if group_of(sid) == sid and sid in state.sessions:
        effects.insert(0, Drop((sid,), reason, at))
    return effects


def drop_session(state: State, session: Session, reason: str, at: int) -> list[Record]:
    """The records that free one session; its namespace's states go along, it can hit no more."""
    effects: list[Record] = [Drop((session.sid,), reason, at)]
    group = group_of(session.sid)
    if group != session.sid:
        states = state_sids(state, group)
        if states:
            effects.append(DropStates(states, reason=reason))
    return effects
