"""Rows and states that do not verify: found before they are used, and dropped.

What was not checked since the start is checked when it is first read. What does not verify goes
with its whole namespace, is counted, told in the log, and its reason remembered for
KV.PREFIX.EXPLAIN.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from pion_vllm_mlx.errors import CommandError, DamagedData
from pion_vllm_mlx.server.store import eviction
from pion_vllm_mlx.server.store.index import Run, Session, StateBlob
from pion_vllm_mlx.server.store.records import Drop, Record
from pion_vllm_mlx.server.store.rows import verify_run
from pion_vllm_mlx.server.store.segment import Segment
from pion_vllm_mlx.server.store.segments import SegmentFolder
from pion_vllm_mlx.server.store.store import Store

log = logging.getLogger(__name__)


async def verified(store: Store, sessions: Sequence[Session]) -> bool:
    """Check every run of the sessions that was not checked since the start.

    A session of which all was is not looked at again until rows come.
    A session that does not verify is dropped, with its namespace, and counted. Raises
    CommandError where the disk cannot be read.
    """
    unknown = [session for session in sessions if not session.checked]
    runs = [run for session in unknown for run in session.runs() if not run.verified]
    segments = [segment for session in unknown for segment in session.segments()]
    unseen = [s for s in segments if s.sealed and not s.header_verified]
    if not runs and not unseen:
        for session in unknown:
            session.checked = True  # nothing has come since: nobody was waited for
        return True
    try:
        await store.run(lambda: _verify(store.segments, runs, unseen))
    except DamagedData as error:
        await drop_damaged(store, sessions, str(error))
        return False
    except OSError as error:
        raise CommandError(f"the stored rows cannot be read now: {error.strerror}") from error
    return True


def _verify(folder: SegmentFolder, runs: Sequence[Run], segments: Sequence[Segment]) -> None:
    for segment in segments:
        if not folder.verify_header(segment):
            raise DamagedData(f"{segment.path.name}: header checksum is wrong")
    for run in runs:
        verify_run(run)


async def drop_damaged(store: Store, sessions: Sequence[Session], why: str) -> None:
    """Drop sessions that do not verify: whole namespaces, counted and remembered."""

    def build() -> list[Record]:
        # one of the same name that was made meanwhile is another
        sids = [s.sid for s in sessions if store.state.sessions.get(s.sid) is s]
        reason, now = f"damaged: {why}", int(time.time())
        effects: list[Record] = []
        for sid in sids:
            effects += eviction.drop_damaged(store.state, sid, reason, now)
        effects = list(dict.fromkeys(effects))
        gone = [sid for effect in effects if isinstance(effect, Drop) for sid in effect.sids]
        store.counters.damaged += len(gone)
        if sids:
            log.warning("%s dropped with its namespace: %s", ", ".join(map(_shown, sids)), why)
        return effects

    await store.commit(build)


async def drop_damaged_state(store: Store, sid: bytes, blob: StateBlob, why: str) -> None:
    """Drop a state that does not verify, with its namespace, counted and remembered."""

    def build() -> list[Record]:
        # one that was stored in its place meanwhile is another
        if not any(held is blob for held in store.state.states.get(sid, {}).values()):
            return []
        store.counters.damaged += 1
        log.warning("%s dropped with its namespace: %s", _shown(sid), why)
        return eviction.drop_namespace(store.state, sid, f"damaged: {why}", int(time.time()))

    await store.commit(build)


def _shown(sid: bytes) -> str:
    return sid.decode("utf-8", "backslashreplace")
