"""Sums over all sessions, brought up to date when they are asked for, or much has changed.

Whoever changes sessions says which; only their groups are counted anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pion_vllm_mlx.server.store.index import KEY_SUFFIX, VALUE_SUFFIX, group_of
from pion_vllm_mlx.server.store.state import State

#: so many changed groups are counted though nobody asks: more of them at once hold everybody up.
_MOST_CHANGED = 256


class Sums(NamedTuple):
    """``prefixes``: namespaces whose both sides live, ``prefix_tokens``: rows of layer 0 of
    their K sides; ``row_bytes``: logical rows of all sessions in their storage formats.
    """

    prefixes: int = 0
    prefix_tokens: int = 0
    row_bytes: int = 0


class Totals:
    """The sums of one state. Not thread-safe: belongs to the event loop as the state does."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._of_group: dict[bytes, Sums] = {}
        self._sums = Sums()
        self._changed: set[bytes] = set()
        self.changed(state.sessions)
        self.sums()  # while nobody waits

    def changed(self, sids: Iterable[bytes]) -> None:
        """Take note of sessions that came, went or got other rows."""
        self._changed.update(map(group_of, sids))
        if len(self._changed) > _MOST_CHANGED:
            self.sums()

    def sums(self) -> Sums:
        """The sums as they are now."""
        for group in self._changed:
            before, now = self._of_group.pop(group, Sums()), self._count(group)
            if any(now):
                self._of_group[group] = now
            changes = zip(self._sums, before, now, strict=True)
            self._sums = Sums(*(total - old + new for total, old, new in changes))
        self._changed.clear()
        return self._sums

    def _count(self, group: bytes) -> Sums:
        sids = [group + KEY_SUFFIX, group + VALUE_SUFFIX]
        both = all(sid in self._state.sessions for sid in sids)
        if group_of(group) == group:
            sids.append(group)
        held = [self._state.sessions[sid] for sid in sids if sid in self._state.sessions]
        first = held[0].layers.get(0) if both else None
        tokens = first.count if first else 0
        return Sums(int(both), tokens, sum(session.row_bytes() for session in held))
