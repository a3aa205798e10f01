"""Keeps one engine: starts it when it is wanted, again when it died, and stops it when idle.

A request holds a *lease* while it uses the engine.  Without ``unload_after`` the engine is
started with the front; with it, on demand, and stopped after so many seconds without a lease.
Either way an engine that has died is started again by the next lease; those that were being
answered see their connection break, and those that were not yet ask the next engine, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from pion_vllm_mlx.serve.api_errors import ApiError, engine_gone, unavailable
from pion_vllm_mlx.serve.engine_client import EngineClient, Unanswered
from pion_vllm_mlx.serve.engine_process import (
    EngineCommand,
    EngineFailed,
    EngineProcess,
    check_flags,
    start_engine,
)

log = logging.getLogger("pion_vllm_mlx.serve")

#: how long an engine started on demand may take, and a request waits for one that starts.
START_SECONDS = 300.0
_SICK_SECONDS = 5.0
_DEATH_SECONDS = 1.0

T = TypeVar("T")


@dataclass
class Counters:
    """What became of the engines so far."""

    loads: int = 0
    unloads: int = 0
    deaths: int = 0
    in_flight: int = 0


class Supervisor:
    """Owns the engine's process; used on one event loop."""

    def __init__(self, command: EngineCommand, unload_after: float | None = None) -> None:
        self.command = command
        self.unload_after = unload_after
        self.counters = Counters()
        self.model = command.model  # the engine knows it better, once there is one
        self._engine: EngineProcess | None = None
        self._starting: asyncio.Task[EngineProcess] | None = None
        self._idle: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()  # one process at a time, also while one is being stopped
        self._closed = False

    @property
    def client(self) -> EngineClient | None:
        """The running engine's client, without starting one."""
        return self._engine.client if self._engine is not None else None

    @property
    def starting(self) -> bool:
        """Whether an engine is on its way up."""
        return self._starting is not None

    def status(self) -> dict[str, Any]:
        """``/v1/pion/supervisor``."""
        return {
            "loaded": self._engine is not None,
            "pid": self._engine.pid if self._engine is not None else None,
            "loads": self.counters.loads,
            "unloads": self.counters.unloads,
            "in_flight": self.counters.in_flight,
        }

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[EngineClient]:
        """Use the engine, started if need be.

        Raises ``ApiError``: 502 when it cannot be started, 503 when that takes too long.
        """
        self.counters.in_flight += 1
        self._cancel_idle()
        try:
            engine = await self._running()
            try:
                yield engine.client
            except ApiError as error:
                if error.status >= 500:
                    await self._give_up_if_sick(engine, error.code)
                raise
        finally:
            self.counters.in_flight -= 1
            if not self.counters.in_flight:
                self._await_idleness()

    @contextlib.asynccontextmanager
    async def asking(
        self, ask: Callable[[EngineClient], AbstractAsyncContextManager[T]]
    ) -> AsyncIterator[T]:
        """What ``ask`` gives of the engine, under a lease.

        Where the engine died before it answered anything, the next one is asked, once: a
        request that comes just behind a death had no part in it.
        """
        for again in (True, False):
            async with contextlib.AsyncExitStack() as held:
                try:
                    engine = await held.enter_async_context(self.lease())
                    process = self._engine
                    answer = await held.enter_async_context(ask(engine))
                except Unanswered as error:
                    if not again or not await _has_died(process):
                        raise
                    log.warning("%s; the next one is asked", error)
                    continue
                yield answer
                return

    async def start(self) -> EngineClient:
        """Start the engine now. Raises ``EngineFailed``; takes what loading takes."""
        return (await asyncio.shield(self._start_task())).client

    async def check(self) -> None:
        """See whether the engine takes its flags, before it is started. Raises ``EngineFailed``."""
        try:
            await check_flags(self.command)
        except EngineFailed as error:
            log.error("%s", error)
            raise

    def wake(self) -> None:
        """Let an engine come up, in the background."""
        if self._engine is None and not self._closed:
            self._start_task()

    async def close(self) -> None:
        """Stop the engine for good."""
        self._closed = True
        self._cancel_idle()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        async with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _running(self) -> EngineProcess:
        if self._closed:
            raise unavailable("the server is shutting down")
        if self._engine is not None and not self._engine.ended.is_set():
            return self._engine
        task = self._start_task()
        try:
            return await asyncio.wait_for(asyncio.shield(task), START_SECONDS)
        except asyncio.TimeoutError as error:
            raise unavailable("the model is still being loaded") from error
        except EngineFailed as error:
            raise engine_gone(str(error)) from error

    def _start_task(self) -> asyncio.Task[EngineProcess]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(self._started)
        return self._starting

    def _started(self, task: asyncio.Task[EngineProcess]) -> None:
        self._starting = None
        if not task.cancelled() and task.exception() is not None:
            log.error("%s", task.exception())

    async def _start(self) -> EngineProcess:
        async with self._lock:
            if self._engine is not None and not self._engine.ended.is_set():
                return self._engine
            limit = None if self.unload_after is None else START_SECONDS
            engine = await start_engine(self.command, limit)
            self._engine = engine
            self.model = engine.client.model or self.model
            self.counters.loads += 1
            log.info("engine ready: pid %d, model %s", engine.pid, engine.client.model or "?")
            self._run(self._watch(engine))
            if not self.counters.in_flight:
                self._await_idleness()
            return engine

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside everything else; a loop alone would not keep its task alive."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self, engine: EngineProcess) -> None:
        """Note the engine's death; one that was stopped is no longer ours."""
        await engine.ended.wait()
        if self._engine is engine:
            self._engine = None
            self.counters.deaths += 1
            log.error("engine ended with code %s; the next request starts another", engine.code)

    async def _give_up_if_sick(self, engine: EngineProcess, code: str | None) -> None:
        """An engine that lives but says that it cannot serve is stopped; a slow one is not."""
        if code == "engine_gone":  # its death, if it is that, is known in a moment
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(engine.ended.wait(), _DEATH_SECONDS)
        with contextlib.suppress(ApiError, asyncio.TimeoutError):
            health = await asyncio.wait_for(engine.client.get("/health"), _SICK_SECONDS)
            if health.status == 503 and self._engine is engine and not self._closed:
                log.error("engine reports that it cannot serve any more; it is stopped")
                await self._unload(engine)
                self.counters.deaths += 1

    def _await_idleness(self) -> None:
        if self.unload_after is not None and not self._closed:
            self._cancel_idle()
            self._idle = self._run(self._unload_when_idle(self.unload_after))

    def _cancel_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    async def _unload_when_idle(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        # From here a lease must not cancel the stop half-way: it waits for the lock instead.
        self._idle = None
        if self._engine is not None and not self.counters.in_flight:
            log.info("engine idle for %g s: unloaded", seconds)
            self.counters.unloads += 1
            await self._unload(self._engine)

    async def _unload(self, engine: EngineProcess) -> None:
        self._engine = None
        async with self._lock:
            await engine.stop()


async def _has_died(engine: EngineProcess | None) -> bool:
    """Whether an engine that does not answer is over, which is known in a moment."""
    if engine is not None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(engine.ended.wait(), _DEATH_SECONDS)
    return engine is None or engine.ended.is_set()
