"""What each tenant stores, what its quota lets it add, and whose prefix leaves first.

A tenant past its quota makes room among its own prefixes; when that is not enough the
store is refused. Where a limit of the whole server is reached, the owner who has the most
gives first: a busy tenant throws out its own. The admin counts as one owner more.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pion_vllm_mlx.errors import CommandError, OutOfMemory
from pion_vllm_mlx.server.keyspace.changes import Change, Verb
from pion_vllm_mlx.server.keyspace.keyspace import Keyspace
from pion_vllm_mlx.server.keyspace.sizes import entry_bytes, growth
from pion_vllm_mlx.server.memory import MemoryStores
from pion_vllm_mlx.server.memory.state_slots import MAX_SLOTS
from pion_vllm_mlx.server.store.eviction import (
    EVICTED,
    EvictionPolicy,
    OwnersOrder,
    PinLimits,
    Shortage,
    drop_namespace,
    drop_session,
)
from pion_vllm_mlx.server.store.index import Session, group_of
from pion_vllm_mlx.server.store.records import (
    Blocks,
    DropStates,
    Record,
    Rows,
    StoreState,
    changed_sids,
)
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.server.store.store import Store
from pion_vllm_mlx.server.tenants import Tenant, owner_of


@dataclass
class Ledger:
    """Bytes by name, their sum by owner, and the names that are an owner's, in order."""

    tenants: Collection[bytes]
    bytes_of: dict[bytes, int] = field(default_factory=dict)
    totals: Counter[bytes] = field(default_factory=Counter)
    names: dict[bytes, dict[bytes, None]] = field(default_factory=dict)

    def count(self, name: bytes, there: bool) -> None:
        """A name is one of its owner's, whatever it holds, or is not any more."""
        mine = self.names.setdefault(owner_of(name, self.tenants), {})
        if there:
            mine[name] = None
        else:
            mine.pop(name, None)

    def put(self, name: bytes, nbytes: int) -> None:
        """A name counts so many bytes from now on; 0: it is gone."""
        before = self.bytes_of.pop(name, 0)
        if nbytes:
            self.bytes_of[name] = nbytes
        self.totals[owner_of(name, self.tenants)] += nbytes - before

    def clear(self) -> None:
        self.bytes_of.clear()
        self.totals.clear()
        self.names.clear()


def session_bytes(session: Session) -> int:
    """What a session counts: its rows and its table of blocks."""
    blocks = 0 if session.blocks is None else len(session.blocks.blob)
    return session.row_bytes() + blocks


class FairShare(EvictionPolicy):
    """The owner with the most of what is short gives first, in the order of another policy.

    Where sessions are, one counts like another, whatever it holds.
    """

    def __init__(self, inner: EvictionPolicy, sessions: Ledger) -> None:
        self._inner = inner
        self._sessions = sessions

    def limit_pins(self, pins: PinLimits) -> None:
        self._inner.limit_pins(pins)

    def used(self, session: Session) -> object:
        return self._inner.used(session)

    def order(self, sessions: Iterable[Session]) -> Iterator[Session]:
        return self._inner.order(sessions)

    def held_by(self, owner: bytes, state: State) -> Collection[bytes]:
        return self._sessions.names.get(owner, {}).keys()

    def victims(
        self, state: State, shortage: Shortage, arriving: Sequence[bytes] = ()
    ) -> Iterator[Session]:
        queues: dict[bytes, deque[Session]] = {}
        held: Counter[bytes] = Counter()
        for session in self._inner.victims(state, shortage, arriving):
            owner = owner_of(session.sid, self._sessions.tenants)
            queues.setdefault(owner, deque()).append(session)
            held[owner] += self._weight(session.sid, shortage)
        found = {owner: iter(queue) for owner, queue in queues.items()}
        return self._in_turn(found, held, shortage, arriving)

    def pick(
        self, of: OwnersOrder, shortage: Shortage, arriving: Sequence[bytes]
    ) -> Iterator[Session]:
        ledger = self._sessions
        counts = {owner: len(names) for owner, names in ledger.names.items() if names}
        found = {owner: of(owner) for owner in counts}
        held = counts if shortage is Shortage.SESSIONS else ledger.totals
        return self._in_turn(found, Counter(held), shortage, arriving)

    def _in_turn(
        self,
        queues: dict[bytes, Iterator[Session]],
        held: Counter[bytes],
        shortage: Shortage,
        arriving: Sequence[bytes],
    ) -> Iterator[Session]:
        """Always the next one of whoever has the most that is left to leave."""
        tenants = self._sessions.tenants
        for sid in arriving:
            held[owner_of(sid, tenants)] += self._weight(sid, shortage)
        while queues:
            owner = max(queues, key=lambda one: held[one])
            session = next(queues[owner], None)
            if session is None:
                del queues[owner]
                continue
            held[owner] -= self._weight(session.sid, shortage)
            yield session

    def _weight(self, sid: bytes, shortage: Shortage) -> int:
        return 1 if shortage is Shortage.SESSIONS else self._sessions.bytes_of.get(sid, 0)


class Shares:
    """Keeps the accounts of a server with tenants. Belongs to the event loop."""

    def __init__(
        self,
        tenants: Mapping[bytes, Tenant],
        store: Store,
        keyspace: Keyspace,
        memory: MemoryStores,
    ) -> None:
        """Count what is there; be told of every change from now on."""
        self._tenants = tenants
        self._store, self._keyspace, self._memory = store, keyspace, memory
        self.sessions, self.states, self.keys = Ledger(tenants), Ledger(tenants), Ledger(tenants)
        for sid in store.state.sessions:
            self._count_session(sid)
        for sid in store.state.states:
            self._count_states(sid)
        for key, entry in keyspace.data.entries.items():
            self._put_key(key, entry_bytes(key, entry.value))
        self._touched: set[bytes] = set()
        store.space.policy = FairShare(store.space.policy, self.sessions)
        store.on_effects = self._effects
        keyspace.on_change = self._change
        memory.index.victim = self._index_victim

    # -- counting --------------------------------------------------------------

    def _count_session(self, sid: bytes) -> None:
        session = self._store.state.sessions.get(sid)
        self.sessions.put(sid, 0 if session is None else session_bytes(session))
        self.sessions.count(sid, session is not None)

    def _count_states(self, sid: bytes) -> None:
        blobs = self._store.state.states.get(sid, {})
        self.states.put(sid, sum(blob.length for blob in blobs.values()))
        self.states.count(sid, bool(blobs))

    def _effects(self, effects: Sequence[Record]) -> None:
        for effect in effects:
            match effect:
                case StoreState():
                    self._count_states(effect.sid)
                case DropStates():
                    for sid in effect.sids:
                        self._count_states(sid)
                case Blocks():
                    self._count_session(effect.sid)
                case _:
                    for sid in changed_sids(effect):
                        self._count_session(sid)

    def _put_key(self, key: bytes, nbytes: int) -> None:
        if owner_of(key, self._tenants):
            self.keys.put(key, nbytes)

    def _change(self, one: Change) -> None:
        """A change of the keyspace is about to be made."""
        held, key = self.keys.bytes_of, one.keys[0] if one.keys else b""
        if one.verb is Verb.FLUSH:
            self.keys.clear()
        elif one.verb is Verb.DELETE:
            for name in one.keys:
                self._put_key(name, 0)
        elif one.verb is Verb.RENAME:
            entry = self._keyspace.data.entries.get(key)
            self._put_key(key, 0)
            if entry is not None:
                self._put_key(one.keys[1], entry_bytes(one.keys[1], entry.value))
        elif one.verb is Verb.SET:
            self._put_key(key, growth(self._keyspace.data, one))
        elif owner_of(key, self._tenants):
            self.keys.put(key, max(1, held.get(key, 0) + growth(self._keyspace.data, one)))
            self._touched.add(key)

    def _key_bytes(self, tenant: bytes) -> int:
        """Bytes of a tenant's keys; those that lost their last item are gone."""
        for key in self._touched:
            if key not in self._keyspace.data.entries:
                self._put_key(key, 0)
        self._touched.clear()
        return self.keys.totals[tenant]

    def stored_bytes(self, tenant: bytes) -> int:
        """All that counts against a tenant's quota."""
        mine = tenant + b":"
        slots = self._memory.states.slots.items()
        indices = self._memory.index.sessions.items()
        return (
            self.sessions.totals[tenant]
            + self.states.totals[tenant]
            + self._key_bytes(tenant)
            + sum(slot.size for name, slot in slots if name.startswith(mine))
            + sum(index.stored_bytes for name, index in indices if name.startswith(mine))
        )

    # -- quotas ----------------------------------------------------------------

    def _excess(self, tenant: bytes, nbytes: int) -> int:
        quota = self._tenants[tenant].quota if tenant else 0
        return self.stored_bytes(tenant) + nbytes - quota if quota and nbytes > 0 else 0

    def charge(self, tenant: bytes, nbytes: int) -> None:
        """Raise OutOfMemory where so many bytes more do not fit a tenant's quota."""
        if self._excess(tenant, nbytes) > 0:
            raise self._refusal(tenant)

    def _refusal(self, tenant: bytes) -> OutOfMemory:
        quota = self._tenants[tenant].quota
        return OutOfMemory(f"the quota of {quota} bytes does not allow this store")

    def fitted(self, tenant: bytes, records: Sequence[Record]) -> list[Record]:
        """Records of a tenant's command behind those that make room for them.

        Raises OutOfMemory when all its other prefixes are not room enough.
        """
        excess = self._excess(tenant, sum(self._added(record) for record in records))
        if excess <= 0:
            return list(records)
        if any(isinstance(record, Change) for record in records):
            raise self._refusal(tenant)
        kept = {_lineage(sid) for record in records for sid in _stored_to(record)}
        leaving: list[Record] = []
        for effects in self._leaving_first(tenant, kept):
            if excess <= 0:
                break
            excess -= self._freed(effects)
            leaving += effects
        if excess > 0:
            raise self._refusal(tenant)
        return [*leaving, *records]

    def _leaving_first(self, tenant: bytes, kept: Collection[bytes]) -> Iterator[list[Record]]:
        """What makes a tenant's prefixes leave, one by one: the least recently used first.

        Sessions without a namespace leave in their turn, states without one at the end; those
        of lineages that are ``kept`` stay.
        """
        state, now = self._store.state, int(time.time())
        groups, states = set[bytes](), set[bytes]()
        for session in self._store.space.in_order_of(tenant):
            group = group_of(session.sid)
            if _lineage(group) in kept:
                continue
            if group == session.sid:
                yield drop_session(state, session, EVICTED, now)
            elif group not in groups:
                groups.add(group)
                yield _once(drop_namespace(state, group, EVICTED, now), states)
        for sid in self.states.names.get(tenant, ()):
            if _lineage(sid) not in kept and sid not in states:
                yield _once(drop_namespace(state, sid, EVICTED, now), states)

    def _freed(self, effects: Sequence[Record]) -> int:
        sessions = (sid for effect in effects for sid in changed_sids(effect))
        return sum(self.sessions.bytes_of.get(sid, 0) for sid in sessions) + sum(
            self.states.bytes_of.get(sid, 0) for sid in _states_of(effects)
        )

    def _added(self, record: Record) -> int:
        """Bytes that a record adds to what its owner stores."""
        state = self._store.state
        match record:
            case Rows():
                session = state.sessions[record.sid]
                spec, end = session.spec(record.layer), record.start + record.rows
                layer = session.layers.get(record.layer)
                covered = layer.covering(record.start, end) if layer else ()
                hidden = sum(extent.end - extent.start for extent in covered)
                return (record.rows - hidden) * spec.row_bytes
            case StoreState():
                old = state.states.get(record.sid, {}).get(record.layer)
                return record.length - (old.length if old else 0)
            case Blocks():
                return len(record.hashes)
            case Change():
                before = self.keys.bytes_of.get(record.keys[0], 0) if record.keys else 0
                added = growth(self._keyspace.data, record)
                return added - before if record.verb is Verb.SET else added
        return 0

    # -- shares of what is fixed -----------------------------------------------

    def check_slot(self, name: bytes) -> None:
        """Raise CommandError where the owner of a new state slot has its share of them."""
        owner = owner_of(name, self._tenants)
        held = sum(owner_of(n, self._tenants) == owner for n in self._memory.states.slots)
        if held >= max(1, MAX_SLOTS // (len(self._tenants) + 1)):
            raise CommandError("no free state slot")

    def _index_victim(self, names: Sequence[bytes]) -> bytes:
        """Whose index leaves, of names in order of use: one of the owner with the most."""
        counts = Counter(owner_of(name, self._tenants) for name in names)
        busiest = max(counts, key=lambda owner: counts[owner])
        return next(name for name in names if owner_of(name, self._tenants) == busiest)


def _lineage(sid: bytes) -> bytes:
    """What sides, states and checkpoints of one namespace have in common."""
    return group_of(sid).partition(b"@")[0]


def _once(effects: Iterable[Record], states: set[bytes]) -> list[Record]:
    """Effects without the states that left with another namespace; ``states`` gets the others."""
    found: list[Record] = []
    for effect in effects:
        if isinstance(effect, DropStates):
            effect = replace(effect, sids=tuple(sid for sid in effect.sids if sid not in states))
            states.update(effect.sids)
        if not isinstance(effect, DropStates) or effect.sids:
            found.append(effect)
    return found


def _states_of(effects: Iterable[Record]) -> list[bytes]:
    """The sids whose states leave."""
    return [sid for effect in effects if isinstance(effect, DropStates) for sid in effect.sids]


def _stored_to(record: Record) -> tuple[bytes, ...]:
    """The sessions that a record stores to."""
    return (record.sid,) if isinstance(record, (StoreState, Blocks)) else changed_sids(record)
