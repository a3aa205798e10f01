"""What leaves together so that bytes become free, and how many do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pion_vllm_mlx.server.store.eviction import drop_namespace
from pion_vllm_mlx.server.store.index import Session, group_of
from pion_vllm_mlx.server.store.records import Drop, DropStates, Record
from pion_vllm_mlx.server.store.sealing import group_segments
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.server.store.wal import Inline

#: how many prefixes leave at once, at most.
_LEAVING_AT_ONCE = 64


def leaving_together(
    state: State,
    order: Iterable[Session],
    may_leave: Callable[[bytes], bool],
    nbytes: int = 0,
) -> list[Session]:
    """Sessions of an order, one a group, whose leaving together frees bytes.

    The first that do, and the next ones as long as all of them free no more than
    ``nbytes``. One whose rows all lie where prefixes live that leave later stays: it costs
    nothing. It leaves together with the last of those that hold the same bytes. So stays one
    that holds nothing yet, and one of a group that may not leave.
    """
    before: dict[bytes, Session] = {}
    leaving: dict[bytes, Session] = {}
    freed_bytes = 0
    for session in order:
        group = group_of(session.sid)
        if group in leaving or _frees_nothing(state, session, group) or not may_leave(group):
            continue
        before.setdefault(group, session)
        segments = group_segments(state, group)
        freed = [users for s in segments if before.keys() >= (users := set(s.users()))]
        if segments and not freed:
            continue
        fewest = min(freed, key=len, default={group})
        leaving.update((one, first) for one, first in before.items() if one in fewest)
        freed_bytes += sum(_bytes_at_most(state, one) for one in fewest)
        if freed_bytes >= nbytes or len(leaving) >= _LEAVING_AT_ONCE:
            break
    return list(leaving.values())


def _frees_nothing(state: State, session: Session, group: bytes) -> bool:
    sides = state.sides(group) if group != session.sid else [session]
    return not any(side.layers for side in sides) and group not in state.states_under


def _bytes_at_most(state: State, group: bytes) -> int:
    """What leaves the disk with a group, now or at the next save; shared rows count whole."""
    effects = drop_namespace(state, group, "", 0)
    states = [sid for effect in effects if isinstance(effect, DropStates) for sid in effect.sids]
    segments = {s.name: s for sid in {group, *states} for s in group_segments(state, sid)}
    in_segments = sum(segment.disk_bytes() for segment in segments.values())
    return in_segments + outside_of_segments(state, [*effects, Drop((group,), "", 0)])


def outside_of_segments(state: State, effects: Iterable[Record]) -> int:
    """Bytes in logs and snapshots that nothing needs any more after these drops."""
    nbytes = 0
    for effect in dict.fromkeys(effects):
        if isinstance(effect, Drop):
            sessions = (state.sessions.get(sid) for sid in effect.sids)
            runs = (run for session in sessions if session for run in session.runs())
            nbytes += sum(r.shape.file_bytes for r in runs if isinstance(r.place, Inline))
        elif isinstance(effect, DropStates):
            blobs = (b for sid in effect.sids for b in state.states.get(sid, {}).values())
            nbytes += sum(blob.length for blob in blobs if isinstance(blob.place, Inline))
    return nbytes
