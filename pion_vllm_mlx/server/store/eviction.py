"""Who goes when a limit is reached, and what a namespace takes along when it goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from pion_vllm_mlx.server.store.index import KEY_SUFFIX, VALUE_SUFFIX, Session, group_of
from pion_vllm_mlx.server.store.records import Drop, DropStates, Record
from pion_vllm_mlx.server.store.state import State


class EvictionPolicy(ABC):
    """Chooses which session leaves next."""

    @abstractmethod
    def victims(self, state: State) -> Iterator[Session]:
        """Sessions in the order they should leave.

        Called under the write lock; must not change the state. Good until the next record.
        """


class LeastRecentlyUsed(EvictionPolicy):
    """The least recently accessed session first."""

    def victims(self, state: State) -> Iterator[Session]:
        yield from state.by_access()


def state_sids(state: State, namespace: bytes) -> tuple[bytes, ...]:
    """The sids of a namespace's recurrent states: its own and its checkpoints' ``ns@*``."""
    prefix = namespace + b"@"
    return tuple(sid for sid in state.states if sid == namespace or sid.startswith(prefix))


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
        effects.append(DropStates(states))
    return effects


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
            effects.append(DropStates(states))
    return effects
