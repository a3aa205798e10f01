"""A copy of the state as it is at one moment, made a part at a time while it changes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from pion_vllm_mlx.server.store.index import Session, StateBlob
from pion_vllm_mlx.server.store.state import State

#: how many sessions and how many ids of states are copied before others have their turn.
PART = 128


@contextmanager
def not_collecting() -> Iterator[None]:
    """Within the block many objects are made that stay: nobody is held up to look for garbage."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Freezing:
    """Copies a state for a snapshot that is written while it changes.

    What is about to change is copied just before. The copy shares what never changes: the places
    of runs, lists of extents; and runs, whose ``shown`` and ``live`` are those of later. States
    keep their order. Belongs to the event loop.
    """

    def __init__(self, state: State) -> None:
        """The moment that is kept. No record may be logged that is not applied yet."""
        self._state = state
        self._sessions = dict(state.sessions)
        self._states = dict(state.states)
        self._copied_sessions: dict[bytes, Session] = {}
        # what is not copied yet stands in for its copy
        self._copied_states: dict[bytes, dict[int, StateBlob]] = dict(state.states)
        state.before_change = self._keep

    async def copied(self) -> State:
        """The state as it was when this was made. Awaited at once, and once."""
        state = self._state
        try:
            while self._sessions or self._states:
                for waiting in (self._sessions, self._states):
                    for sid in list(islice(reversed(waiting), PART)):
                        self._keep(sid)
                await asyncio.sleep(0)
        finally:
            state.before_change = None
        return State(state.segment_of, self._copied_sessions, self._copied_states)

    def _keep(self, sid: bytes) -> None:
        """Copy what is called ``sid``, unless it is copied."""
        session = self._sessions.pop(sid, None)
        if session is not None:
            layers = {number: replace(rows) for number, rows in session.layers.items()}
            self._copied_sessions[sid] = replace(session, layers=layers)
        blobs = self._states.pop(sid, None)
        if blobs is not None:
            self._copied_states[sid] = dict(blobs)
