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

    ``free``: each with what the policy said of its use. ``loose`` are the groups of pinned
    sessions that are beyond what pins protect; ``spent``: somebody's sessions ran out.
    """

    state: State
    policy: EvictionPolicy
    free: dict[bytes, deque[tuple[Session, object]]] = field(default_factory=dict)
    strays: deque[tuple[bytes, int]] = field(default_factory=deque)
    loose: set[bytes] = field(default_factory=set)
    spent: bool = False
    made: float = field(default_factory=time.monotonic)

    @classmethod
    def look(cls, state: State, policy: EvictionPolicy, pins: PinLimits) -> Standing:
        """Look at everything. Under the write lock; on any thread, while others read."""
        made = cls(state, policy, strays=deque(strays(state)))
        # first: who is used from now on loses the place that the order has for it
        used = {session.sid: policy.used(session) for session in list(state.sessions.values())}
        kept = protected(pins, reversed(state.by_access()))
        for session in policy.victims(state, Shortage.SESSIONS):
            if session.sid in kept:
                continue
            queue = made.free.setdefault(pins.owner(session.sid), deque())
            queue.append((session, used[session.sid]))
            if session.pinned:
                made.loose.add(group_of(session.sid))
        return made

    @property
    def old(self) -> bool:
        """Whether it is time for another look."""
        return self.spent or time.monotonic() > self.made + FRESH_SECONDS

    def of(self, owner: bytes) -> Iterator[Session]:
        """An owner's sessions that nobody used since, in order. Good until the next record."""
        queue = self.free.get(owner)
        if queue is None:
            return
        while queue and not self._as_it_was(*queue[0]):
            queue.popleft()
        yield from (session for session, used in queue if self._as_it_was(session, used))
        self.spent = True

    def next(
        self, shortage: Shortage, arriving: Sequence[bytes], count: int | None = None
    ) -> Iterator[Session]:
        """Sessions in the order they should leave, ``count`` of them at most."""
        return islice(self.policy.pick(self.of, shortage, arriving), count)

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

    def _as_it_was(self, session: Session, used: object) -> bool:
        """Whether a session is there, unused since, and not pinned since."""
        if self.state.sessions.get(session.sid) is not session:
            return False
        pinned = session.pinned and group_of(session.sid) not in self.loose
        return not pinned and self.policy.used(session) == used

    def _sides(self, group: bytes) -> Iterator[Session]:
        yield from self.state.sides(group)
        if group in self.state.sessions:
            yield self.state.sessions[group]
