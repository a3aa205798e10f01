"""Who leaves next where there are many sessions: one look at all of them serves for long.

What was not used since a look is older than all that was, and than all that is new: the look's
order stays good for it. So an eviction costs what it evicts, not what there is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pion_vllm_mlx.server.store.eviction import (
    EvictionPolicy,
    PinLimits,
    Shortage,
    is_stray,
    protected,
    strays,
)
from pion_vllm_mlx.server.store.index import Session, group_of
from pion_vllm_mlx.server.store.state import State

#: with more sessions and states than these a look at all of them takes as long as many stores do.
MANY = 4096
#: what a look does not see in its turn, such as a prefix that pins protect no more, waits so long.
FRESH_SECONDS = 60.0


@dataclass
class Standing:
    """The order of one look: sessions that pins do not protect, by owner, and strays.

    ``free``: the sid of each with what the policy said of its use; never the session, with which
    the files of its rows would stay open after it went. ``kept`` has the sids that pins protect.
    ``loose`` are the groups of pinned sessions that are beyond what pins protect; ``spent``: the
    order ran out of somebody's more than ``many`` sessions, or did not do.
    """

    state: State
    policy: EvictionPolicy
    many: int
    free: dict[bytes, list[tuple[bytes, object]]] = field(default_factory=dict)
    kept: dict[bytes, list[bytes]] = field(default_factory=dict)
    strays: deque[tuple[bytes, int]] = field(default_factory=deque)
    loose: set[bytes] = field(default_factory=set)
    spent: bool = False
    made: float = field(default_factory=time.monotonic)
    _unpinned: int = 0
    _kept_at: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def look(cls, state: State, policy: EvictionPolicy, pins: PinLimits, many: int) -> Standing:
        """Look at everything. Under the write lock; on any thread, while others read."""
        made = cls(state, policy, many, strays=deque(strays(state)), _unpinned=state.unpinned)
        # first: who is used from now on loses the place that the order has for it
        used = {session.sid: policy.used(session) for session in list(state.sessions.values())}
        kept = protected(pins, reversed(state.by_access()))
        for session in policy.victims(state, Shortage.SESSIONS):
            owner = pins.owner(session.sid)
            if session.sid in kept:
                made.kept.setdefault(owner, []).append(session.sid)
                continue
            made.free.setdefault(owner, []).append((session.sid, used[session.sid]))
            if session.pinned:
                made.loose.add(group_of(session.sid))
        return made

    @property
    def old(self) -> bool:
        """Whether it is time for another look."""
        return self.spent or time.monotonic() > self.made + FRESH_SECONDS

    def of(self, owner: bytes) -> Iterator[Session]:
        """An owner's sessions that nobody used since, in order. Good until the next record.

        Where these run out, its other ones, if they are few; else the order is ``spent``.
        """
        given: set[bytes] = set()
        for session in self._unused(owner):
            given.add(session.sid)
            yield session
        sids = self.policy.held_by(owner, self.state)
        if len(sids) <= len(given) + self._still_kept(owner):
            return
        if len(sids) > self.many:
            self.spent = True
            return
        order = self.policy.order([self.state.sessions[sid] for sid in sids])
        self.free[owner] = [(session.sid, self.policy.used(session)) for session in order]
        yield from (session for session in self._unused(owner) if session.sid not in given)

    def _still_kept(self, owner: bytes) -> int:
        """How many of those that pins protected are there, and pinned: looked at if any may not."""
        kept = self.kept.get(owner, [])
        if self._kept_at.get(owner, self._unpinned) != self.state.unpinned:
            sessions = [self.state.sessions.get(sid) for sid in kept]
            kept = [session.sid for session in sessions if session is not None and session.pinned]
            self.kept[owner] = kept
        self._kept_at[owner] = self.state.unpinned
        return len(kept)

    def _unused(self, owner: bytes) -> Iterator[Session]:
        """An owner's sessions that are as they were, without those that are not any more."""
        queue = self.free.get(owner, [])
        alive: list[tuple[bytes, object]] = []
        at = 0
        while at < len(queue):
            session = self._as_it_was(*queue[at])
            if session is None:
                at += 1
                continue
            if at >= 2 * len(alive):  # half of what was passed is no more: nobody passes it again
                queue[:at] = alive
                at = len(alive)
            alive.append(queue[at])
            at += 1
            yield session
        queue[:at] = alive

    def next(
        self, shortage: Shortage, arriving: Sequence[bytes], count: int | None = None
    ) -> Iterator[Session]:
        """Sessions in the order they should leave, ``count`` of them at most.

        None any more where the order is spent: in the place of whom it lacks others would leave.
        """
        for session in islice(self.policy.pick(self.of, shortage, arriving), count):
            if self.spent:
                return
            yield session

    def protects(self, group: bytes) -> bool:
        """Whether pins protect a group."""
        return group not in self.loose and any(side.pinned for side in self._sides(group))

    def oldest_stray(self) -> tuple[bytes, int] | None:
        """As the function of this name, of what there was at the look."""
        while self.strays:
            sid, accessed = self.strays[0]
            blobs = self.state.states.get(sid, {}).values()
            as_it_was = max((blob.accessed for blob in blobs), default=-1) == accessed
            if as_it_was and is_stray(self.state, sid):
                return sid, accessed
            self.strays.popleft()
        return None

    def _as_it_was(self, sid: bytes, used: object) -> Session | None:
        """A session, where it is there, unused since, and not pinned since.

        One that is there again was used since: its clock tells.
        """
        session = self.state.sessions.get(sid)
        if session is None or (session.pinned and group_of(sid) not in self.loose):
            return None
        return session if self.policy.used(session) == used else None

    def _sides(self, group: bytes) -> Iterator[Session]:
        yield from self.state.sides(group)
        if group in self.state.sessions:
            yield self.state.sessions[group]
