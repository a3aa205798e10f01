"""What a server does by itself while it runs: flush, save, drop what is over, tidy up.

Each line of duties is a task that goes round once a tick, one duty after the other. A disk that
refuses ends no duty, and neither does a bug: it is logged with its traceback and counted, the
duty rests for a while, and all others go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pion_vllm_mlx.config import EmbeddedDefaults
from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.session import Server
from pion_vllm_mlx.server.store.reclaim import Reclaimer
from pion_vllm_mlx.server.store.store import Store

log = logging.getLogger("pion_vllm_mlx.server")

#: a log past its size is saved away after so long without a write.
QUIET_SECONDS = 2.0
#: how long after a save that failed the next one is tried.
SAVE_RETRY_SECONDS = 30.0
#: how often dead bytes are given back, a step at a time, when no moment is quiet.
BUSY_STEP_SECONDS = 10.0
#: how often logs are flushed with --appendfsync everysec.
_FLUSH_SECONDS = 1.0
#: how often it is tried again to delete files that the disk kept.
_MEND_SECONDS = 1.0
#: how long a duty rests that a bug has ended.
BUG_REST_SECONDS = 10.0
_TICK_SECONDS = 0.25
#: how many sessions leave at once where there are more than the limit allows.
_LEAVING_BATCH = 256


def _always(now: float, begun: float) -> bool:
    return True


@dataclass
class Duty:
    """One thing to do again and again; ``what`` completes "... failed".

    ``is_due`` is asked with the time and when the duty was begun last. After a refusal by the
    disk the duty rests for so many seconds.
    """

    what: str
    work: Callable[[], Awaitable[object]]
    is_due: Callable[[float, float], bool] = _always
    refused_rest_seconds: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    rests_until: float = 0.0

    async def turn(self) -> None:
        """Do it, if it is due. A failing disk must not end it."""
        now = time.monotonic()
        if now < self.rests_until or not self.is_due(now, self.begun):
            return
        self.begun = now
        try:
            await self.work()
        except (OSError, CommandError) as error:
            log.error("%s failed: %s", self.what, error)
            self.rests_until = now + self.refused_rest_seconds


def begin(server: Server) -> list[asyncio.Task[None]]:
    """The tasks of a server, begun. They end when they are cancelled."""
    lines: tuple[Sequence[Duty], ...] = (_housekeeping(server), _upkeep(server), _of_keys(server))
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(_go_round(server, line)) for line in lines]
    if server.config.embedded:
        deserted = loop.create_task(_until_deserted(server, EmbeddedDefaults()))
        deserted.add_done_callback(lambda task: server.stopping.set())
        tasks.append(deserted)
    return tasks


async def _go_round(server: Server, duties: Sequence[Duty]) -> None:
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        for duty in duties:
            try:
                await duty.turn()
            except Exception:  # noqa: BLE001 - outermost loop: what is left undone would fill the disk
                server.housekeeping_errors += 1
                log.exception("internal error: %s failed", duty.what)
                duty.rests_until = time.monotonic() + BUG_REST_SECONDS


def _housekeeping(server: Server) -> list[Duty]:
    """What is short: flush, drop what is over, close stalled connections."""
    store = server.store
    every_second = server.config.appendfsync == "everysec"

    def flush_is_due(now: float, begun: float) -> bool:
        return every_second and now - begun >= _FLUSH_SECONDS and store.flush_soon()

    def mending_is_due(now: float, begun: float) -> bool:
        return now - begun >= _MEND_SECONDS

    return [
        Duty("flushing", store.flush, flush_is_due),
        Duty("dropping old prefixes", store.expire),
        Duty("keeping to --max-sessions", partial(_fit_sessions, store)),
        Duty("closing files", store.close_retired),
        Duty("trying again", server.mend, mending_is_due, SAVE_RETRY_SECONDS),
        Duty("telling other workers", partial(_exchange, server)),
        Duty("closing stalled connections", partial(_abort_stalled, server)),
    ]


async def _fit_sessions(store: Store) -> None:
    """An earlier start may have allowed more sessions than this one."""
    excess = len(store.state.sessions) - store.config.max_sessions
    if excess > 0:
        most = min(excess, _LEAVING_BATCH)
        await store.commit(lambda: store.space.evict_for_sessions((), most))


async def _abort_stalled(server: Server) -> None:
    """Close connections that stand still, and one in whose look at itself a bug shows."""
    now = asyncio.get_running_loop().time()
    for connection in list(server.connections.values()):
        try:
            over = connection.stalled(now)
        except Exception:  # noqa: BLE001 - or what is wrong with one would keep all others open
            server.housekeeping_errors += 1
            log.exception("internal error: a connection is closed")
            over = True
        if over:
            connection.abort()


async def _exchange(server: Server) -> None:
    """What other workers hit here counts as used; a claim of which nothing came is released."""
    directory, store = server.directory, server.store
    for namespace in directory.exchange():
        for session in store.state.sides(namespace):
            store.state.touch(session)
    if not store.write_lock.locked():
        directory.release()


def _upkeep(server: Server) -> list[Duty]:
    """What may take a while: save a long log, give dead bytes back, mostly in quiet moments."""
    store = server.store

    def save_is_due(now: float, begun: float) -> bool:
        return store.saver.due(QUIET_SECONDS)

    def step_is_due(now: float, begun: float) -> bool:
        return now >= min(store.last_write + QUIET_SECONDS, begun + BUSY_STEP_SECONDS)

    reclaimer = Reclaimer(store)
    store.tidy = reclaimer.make_room
    return [
        Duty("saving", store.save_in_steps, save_is_due, SAVE_RETRY_SECONDS),
        Duty("reclaiming", reclaimer.step, step_is_due),
    ]


def _of_keys(server: Server) -> list[Duty]:
    """Delete keys past their deadline, flush their log, save a long one."""
    keyspace = server.keyspace
    every_second = server.config.appendfsync == "everysec"

    def flush_is_due(now: float, begun: float) -> bool:
        return every_second and now - begun >= _FLUSH_SECONDS and keyspace.flush_soon()

    def save_is_due(now: float, begun: float) -> bool:
        return keyspace.save_soon(QUIET_SECONDS)

    return [
        Duty("deleting old keys", keyspace.reap),
        Duty("flushing", keyspace.flush, flush_is_due),
        Duty("saving", keyspace.save, save_is_due, SAVE_RETRY_SECONDS),
        Duty("relieving a full disk", keyspace.relieve),
    ]


async def _until_deserted(server: Server, defaults: EmbeddedDefaults) -> None:
    """Return when an embedded server has had no client for its idle time."""
    patience = defaults.first_client_seconds
    lonely_since, seen = time.monotonic(), 0
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        if server.clients or server.connections_total > seen:
            seen = server.connections_total
            lonely_since = time.monotonic()
            patience = defaults.idle_exit_seconds
        elif time.monotonic() - lonely_since > patience:
            return
