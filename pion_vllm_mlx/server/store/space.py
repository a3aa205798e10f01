"""Room for rows and states: regions of segments, and what has to go to make more.

Regions are given out and taken back on the event loop. Eviction only names the
records that would make room; the store logs them.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.emptied import Emptied
from pion_vllm_mlx.server.store.eviction import (
    EVICTED,
    EvictionPolicy,
    PinLimits,
    Shortage,
    drop_namespace,
    drop_session,
    oldest_stray,
    protected,
)
from pion_vllm_mlx.server.store.files import refusals
from pion_vllm_mlx.server.store.folder_use import FolderUse
from pion_vllm_mlx.server.store.freeing import leaving_together, outside_of_segments
from pion_vllm_mlx.server.store.freezing import not_collecting
from pion_vllm_mlx.server.store.index import InSegment, Session, group_of
from pion_vllm_mlx.server.store.records import Drop, DropStates, Record
from pion_vllm_mlx.server.store.sealing import sessions_of
from pion_vllm_mlx.server.store.segment import Region
from pion_vllm_mlx.server.store.segments import SegmentFolder
from pion_vllm_mlx.server.store.standing import MANY, Standing
from pion_vllm_mlx.server.store.state import State

log = logging.getLogger(__name__)

#: what a disk budget leaves free of the disk, where that is no more than half of the budget.
RESERVED_FREE_BYTES = 5 << 30
#: how many sessions a new one makes leave, at most: a start with fewer allowed lets more go.
_SESSIONS_AT_ONCE = 512
#: so many short of its limit a table is looked at before it is full.
_NEARLY_FULL = 64
#: how long small stores are granted out of what was measured.
_GRANT_SECONDS = 0.05


class Leaving(NamedTuple):
    """What evictions make leave: so many sessions, or states without one, and bytes owed.

    ``groups`` are those of which something goes, by whatever it is.
    """

    sessions: int
    owed: int
    groups: set[bytes]


@dataclass
class Space:
    """The segments of a store under its limits; ``disk_budget`` in bytes, 0 = no limit.

    ``use``: what counts beside the segments. ``owed``: bytes in logs and snapshots whose
    prefixes were evicted; the next save gives them back. ``spare`` deletes one file that can
    be made again; False when there is none. ``wasted``: bytes of what counts beside prefixes
    that a save of it gives back. ``workers`` share the disk, and have a budget like this each.
    ``disk_allows`` says what the budget grows to, by what is free and by our own bytes, when it
    is short: others may have given back what was theirs when it was set. ``standing``: who leaves
    next, where there are many sessions.
    """

    state: State
    segments: SegmentFolder
    policy: EvictionPolicy
    disk_budget: int
    max_sessions: int
    pin_limits: PinLimits
    use: FolderUse
    spare: Callable[[], bool] = lambda: False
    wasted: Callable[[], int] = lambda: 0
    workers: int = 1
    disk_allows: Callable[[int, int], int] | None = None
    evictions: int = 0
    owed: int = 0
    standing: Standing | None = field(default=None, repr=False)
    emptied: Emptied = field(init=False, repr=False)
    _asked: bool = field(default=False, repr=False)
    _granted: int = field(default=0, repr=False)
    _granted_until: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        self.emptied = Emptied(self.state, self.segments)

    def disk_bytes(self) -> int:
        """Bytes of the segment files on disk."""
        return self.segments.disk_bytes()

    def used_bytes(self) -> int:
        """All that counts against the budget: what the files of the data folder occupy."""
        return self.disk_bytes() + self.use.total()

    # -- eviction --------------------------------------------------------------

    def excess(self, nbytes: int) -> int:
        """Bytes that have to go before ``nbytes`` more fit; not positive when they fit."""
        if not self.disk_budget:
            return 0
        used = self.used_bytes()
        if self.disk_allows is not None and used + nbytes > self.disk_budget:
            self._grow(self.disk_allows(self._free(), used))
        over = used - self.disk_budget
        return nbytes + max(over, self._left_free() - self._free()) - self.owed

    def _grow(self, disk_budget: int) -> None:
        if disk_budget > self.disk_budget:
            self.disk_budget = disk_budget
            limits = PinLimits.half_of(self.max_sessions, disk_budget)
            self.pin_limits = replace(limits, owner=self.pin_limits.owner)
            self.policy.limit_pins(self.pin_limits)
            if self.standing is not None and self.standing.loose:
                self.standing = None  # pins protect what they did not

    def _free(self) -> int:
        return shutil.disk_usage(self.segments.path).free

    def _left_free(self) -> int:
        """Bytes of the disk that stores leave to others."""
        return min(RESERVED_FREE_BYTES, self.disk_budget * self.workers // 2)

    def room_to_copy(self) -> int:
        """Bytes that may be there twice while dead ones are given back.

        What the budget has left, and half of what stores leave free of the disk.
        """
        left_free = min(RESERVED_FREE_BYTES // self.workers, self.disk_budget // 2)
        return left_free // 2 - self.excess(0)

    def refusal(self) -> CommandError:
        """Why a store does not fit though all has left that can."""
        why = "the disk budget does not allow this store"
        free, left = self._free(), self._left_free()
        if free - left < self.disk_budget - self.used_bytes():
            why += f": it leaves {left >> 20} MB of the disk free, and only {free >> 20} MB are"
        return CommandError(why)

    def fits(self, nbytes: int) -> bool:
        """Whether a small store fits, by what was measured a moment ago."""
        if not self.disk_budget:
            return True
        now = time.monotonic()
        if now > self._granted_until or nbytes > self._granted:
            self._granted, self._granted_until = -self.excess(0), now + _GRANT_SECONDS
        self._granted -= nbytes
        return self._granted >= 0

    def measure_again(self) -> None:
        """Something was written that no store had asked for: what was granted may be gone."""
        self._granted_until = 0.0

    def saved(self, owed: int) -> None:
        """Logs and snapshots are rewritten without what was ``owed`` when that began."""
        self.owed -= owed
        self.use.look_again()

    def evict_for_bytes(self, excess: int) -> list[Record]:
        """Effects that make prefixes and sessions leave, with all that hold the same bytes.

        Not more than have to, some at a time: who asks looks again. So do states of no namespace,
        in their turn. Raises CommandError when even an empty store would not do, and where all
        that is not pinned is still being stored.
        """
        effects: list[Record] = []
        stray, victims = self._out_of_many(excess)
        if stray is None and not victims:
            self._look_again()
            stray = oldest_stray(self.state)
            victims = self._byte_victims(at_last=stray is None)
        if stray and all(session.pinned or session.accessed > stray[1] for session in victims):
            victims = []
            effects.append(DropStates((stray[0],), reason=EVICTED))
        in_files = self.disk_bytes() - self.segments.undeleted_bytes()
        possible = excess <= in_files + self.use.of_prefixes()
        if not possible or not (victims or effects):
            raise self.refusal()
        for victim in victims:
            group, now = group_of(victim.sid), int(time.time())
            if group == victim.sid:
                effects += drop_session(self.state, victim, EVICTED, now)
            else:
                effects += drop_namespace(self.state, group, EVICTED, now)
        return effects

    def leaving(self, effects: Iterable[Record]) -> Leaving:
        """What evictions among these effects will have made leave. Before they are applied."""
        drops = [effect for effect in effects if isinstance(effect, (Drop, DropStates))]
        # a snapshot knows rows by their namespace, states by their own name
        groups = {name for drop in drops for sid in drop.sids for name in (sid, group_of(sid))}
        gone = [drop for drop in drops if drop.reason == EVICTED]
        sessions = {sid for one in gone if isinstance(one, Drop) for sid in one.sids}
        count = sum(sid in self.state.sessions for sid in sessions)
        return Leaving(count or bool(gone), outside_of_segments(self.state, gone), groups)

    def left(self, leaving: Leaving) -> None:
        """The effects were logged, and are applied."""
        if leaving.sessions:
            self.evictions += leaving.sessions
            self.owed += leaving.owed
            self.use.look_again()
        self.emptied.left(leaving.groups)

    def _pinned(self) -> set[bytes]:
        """The groups that pins protect."""
        kept = protected(self.pin_limits, reversed(self.state.by_access()))
        return {group_of(sid) for sid in kept}

    def _stored_to(self, group: bytes) -> bool:
        return any(segment.writers for segment in self.segments.of_group(group))

    def _out_of_many(self, excess: int) -> tuple[tuple[bytes, int] | None, list[Session]]:
        """The oldest stray, and who leaves next, as the last look at many sessions has them."""
        standing = self._standing()
        if standing is None:
            return None, []
        stray = standing.oldest_stray()
        victims = leaving_together(
            self.state,
            standing.next(Shortage.BYTES, ()),
            lambda group: not standing.protects(group) and not self._stored_to(group),
            excess if stray is None else 0,
        )
        return stray, victims

    def _byte_victims(self, at_last: bool) -> list[Session]:
        """Who leaves next where bytes are short.

        ``at_last``: where nothing idle is left, who is being stored to, then who is pinned. None
        that is pinned while another is being stored to, whose bytes nobody can free yet.
        """
        pinned = self._pinned()

        def of(may_leave: Callable[[bytes], bool]) -> list[Session]:
            order = self.policy.victims(self.state, Shortage.BYTES)
            return leaving_together(self.state, order, may_leave)

        victims = of(lambda group: group not in pinned and not self._stored_to(group))
        if victims or not at_last:
            return victims
        victims = of(lambda group: group not in pinned)
        segments = self.segments.segments.values()
        if victims or any(one.writers and one.group not in pinned for one in segments):
            return victims
        return of(lambda group: not self._stored_to(group)) or of(lambda group: True)

    def evict_for_sessions(
        self, arriving: Sequence[bytes], most: int = _SESSIONS_AT_ONCE
    ) -> list[Record]:
        """Effects that free session slots for new sessions of these sids, ``most`` of them.

        Where an earlier start allowed more sessions, the rest leaves in the background.

        Whoever has the most of them: no pinned one leaves while another is there that is not.
        """
        count = min(len(self.state.sessions) + len(arriving) - self.max_sessions, most)
        victims: list[Session] = []
        if count > 0 and (standing := self._standing()) is not None:
            victims = list(standing.next(Shortage.SESSIONS, arriving, count))
        if count > len(victims):
            self._look_again()
            kept = protected(self.pin_limits, reversed(self.state.by_access()))
            order = self.policy.victims(self.state, Shortage.SESSIONS, arriving)
            victims = sorted(order, key=lambda session: session.sid in kept)[:count]
        effects: list[Record] = []
        for victim in victims:
            effects += drop_session(self.state, victim, EVICTED, int(time.time()))
        return effects

    # -- who leaves next, of many ------------------------------------------------

    def look_is_due(self, evicting: bool = False) -> bool:
        """Whether whoever evicts needs another look at all there is; ``evicting``: at once."""
        if len(self.state.sessions) + len(self.state.states) <= MANY:
            self.standing = None
            return False
        full = len(self.state.sessions) > self.max_sessions - _NEARLY_FULL
        if self.standing is None:
            return full or evicting or self._asked
        return self.standing.old and self._asked

    def look(self) -> None:
        """Look at all sessions. Under the write lock; on any thread."""
        self._asked = False
        self.standing = None  # the former one makes room first
        with not_collecting():
            self.standing = Standing.look(self.state, self.policy, self.pin_limits, MANY)

    def in_order_of(self, owner: bytes) -> Iterator[Session]:
        """An owner's sessions in the order they should leave, each once."""
        standing, given = self._standing(), set[bytes]()
        for session in standing.of(owner) if standing is not None else ():
            if session.sid not in given:
                given.add(session.sid)
                yield session
        sids = [sid for sid in self.policy.held_by(owner, self.state) if sid not in given]
        yield from self.policy.order([self.state.sessions[sid] for sid in sids])

    def _look_again(self) -> None:
        """The last look did not do."""
        self._asked = True
        if self.standing is not None:
            self.standing.spent = True

    def _standing(self) -> Standing | None:
        """The last look, where it is worth one."""
        self._asked = True
        many = len(self.state.sessions) + len(self.state.states) > MANY
        return self.standing if many else None

    # -- regions ---------------------------------------------------------------

    def reserve(self, group: bytes, nbytes: int, tensors: int) -> Region:
        """A region in a segment of the group.

        Evicts nothing: refuses, with CommandError, only what can never fit, and when the
        disk does.
        """
        if self.disk_budget:
            most = self.disk_budget - self.use.total() + self.use.of_prefixes()
            most -= self.segments.undeleted_bytes()
            if nbytes > most and nbytes > most + self.wasted():
                raise self.refusal()
        try:
            return self.segments.reserve(group, nbytes, tensors)
        except OSError as error:
            raise disk_error(error) from error

    def shorten(self, region: Region, nbytes: int) -> None:
        """Only the first ``nbytes`` are needed. The region must not be released yet."""
        if nbytes < region.length:
            self._take_back(region, nbytes)
            region.length = nbytes

    def release(self, region: Region, kept: bool = False) -> None:
        """The region's writer has ended; give its bytes back if nothing came of them.

        ``kept``: its record was applied. Only the first call for a region counts.
        """
        if region.released:
            return
        if not kept and not self._lives(region):
            self._take_back(region, 0)
        region.release()
        if region.segment.uses == 0 and region.segment.writers == 0:
            self.state.unused.append(region.segment)
            self.emptied.discard()

    def _take_back(self, region: Region, begin: int) -> None:
        segment = region.segment
        try:
            segment.take_back(region.offset + begin, region.offset + region.length)
        except OSError as error:
            log.error("%s could not be cut: %s", segment.path.name, error)

    def _lives(self, region: Region) -> bool:
        """Whether a record put something there: it may be applied though its flush failed."""
        group = region.segment.group
        places = [run.place for s in sessions_of(self.state, group) for run in s.runs()]
        places += [blob.place for blob in self.state.states.get(group, {}).values()]
        return any(
            isinstance(place, InSegment)
            and place.segment is region.segment
            and place.offset == region.offset
            for place in places
        )


def disk_error(error: OSError) -> CommandError:
    """What a client is told when the disk refuses; the log is told, too."""
    refusals.tell("stores", error)
    return CommandError(f"the disk refused the store: {error.strerror or os.strerror(28)}")
