"""The one thread on which attention is computed.

MLX binds what it does to a thread, so all of it happens here; on a processor alone one
thread is enough, too, as every kernel uses all cores. Queries that arrive while others are
computed wait in a queue; those of one layer that can share a pass over its K/V do. Work
that takes long is done in parts, and whoever waits has a turn between them. While nobody does,
the thread may read the queries of one connection itself, see ``visit``.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.visit import Bell, Visit

T = TypeVar("T")
ResultT = TypeVar("ResultT")

#: query rows that one pass over K/V serves: more of them are bound by arithmetic anyway.
MAX_ROWS = 64


class Progress(Enum):
    """What ``alone`` returns of work that is not done yet."""

    UNFINISHED = "unfinished"


class Work(Protocol[ResultT]):
    """Something to compute. ``group``: equal for what may be computed together, None: alone."""

    @property
    def group(self) -> Hashable: ...

    @property
    def rows(self) -> int: ...

    def alone(self) -> ResultT | Progress:
        """The result; UNFINISHED after a part, to be called again when others had their turn.

        Runs on the engine's thread.
        """

    def together(self, others: Sequence[Any]) -> list[ResultT]:
        """Its result and those of others of its group, in order."""


@dataclass(frozen=True)
class Call(Generic[ResultT]):
    """A plain function as work of its own."""

    function: Callable[[], ResultT]
    group: None = None
    rows: int = 0

    def alone(self) -> ResultT:
        return self.function()

    def together(self, others: Sequence[Any]) -> list[ResultT]:
        raise AssertionError("calls have no group")


@dataclass(frozen=True)
class _Job:
    """Work, and where its result is waited for."""

    work: Work[Any]
    done: asyncio.Future[Any]
    wanted: Callable[[], bool]
    then: Callable[[Any], Any]

    @property
    def waited_for(self) -> bool:
        return not self.done.done() and self.wanted()


class Engine:
    """Computes in order of arrival, parts of long work in turn with the rest.

    Belongs to an event loop, all but ``_run``.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        #: what the thread has taken from the queue
        self._waiting: deque[_Job] = deque()
        self._unfinished: list[_Job] = []
        self._bell: Bell | None = None
        self._visits = 0
        #: what was begun so far
        self.begun = 0
        #: queries answered, and passes over K/V that answered several of them; the thread counts
        self.queries = 0
        self.shared_passes = 0

    def begin(
        self, work: Work[ResultT], wanted: Callable[[], bool] = lambda: True
    ) -> asyncio.Future[ResultT]:
        """Have ``work`` computed; its result, or what it raises.

        ``wanted`` is asked from the thread when its turn comes: where nobody waits any more
        it is not computed, and a CommandError.
        """
        return self.begin_then(work, _itself, wanted)

    def begin_then(
        self,
        work: Work[ResultT],
        then: Callable[[ResultT], T],
        wanted: Callable[[], bool] = lambda: True,
    ) -> asyncio.Future[T]:
        """The same; what ``then`` makes of the result, on the thread."""
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(loop,), name="attention", daemon=True
            )
            self._thread.start()
        done: asyncio.Future[T] = loop.create_future()
        self.begun += 1
        self._put(_Job(work, done, wanted, then))
        return done

    def host(self, visit: Visit, wanted: Callable[[], bool]) -> asyncio.Future[None]:
        """Have the thread answer a connection's queries itself while nobody else needs it."""
        if self._bell is None:
            self._bell = Bell()
        visit.called_away, visit.bell = self._called_away, self._bell
        self._visits += 1
        done = self.begin(visit, wanted)
        done.add_done_callback(self._visited)
        return done

    def _visited(self, done: asyncio.Future[None]) -> None:
        self._visits -= 1

    def ring(self) -> None:
        """Have a visitor see whether it is still wanted."""
        if self._bell is not None and self._visits:
            self._bell.ring()

    def _put(self, job: _Job | None) -> None:
        self._queue.put(job)
        self.ring()

    def _called_away(self) -> bool:
        """Whether there is anything else to do. On the thread."""
        return bool(self._waiting or self._unfinished) or not self._queue.empty()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread."""
        return await self.begin(Call(function))

    def close(self) -> None:
        """Compute nothing more, once what is being computed is done."""
        self._put(None)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread: computes what is in the queue until None comes."""
        try:
            while self._turn(loop):
                pass
        finally:
            if self._bell is not None:
                self._bell.close()

    def _turn(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Compute what is next; whether there is more to come."""
        waiting = self._waiting
        while not (waiting or self._unfinished) or not self._queue.empty():
            job = self._queue.get()
            if job is None:
                return False
            waiting.append(job)
            del job  # a name here would keep the K/V of the last query until the next
        waiting.extend(self._unfinished)  # behind all that came during its last part
        self._unfinished = []
        abandoned = _take_abandoned(waiting)
        jobs = _next_group(waiting) if waiting else []
        # what clients send may be no number: that is theirs, and nothing to warn of
        with np.errstate(all="ignore"):
            outcomes = _outcomes([job.work for job in jobs]) if jobs else []
        self._unfinished, done = _sorted_out(jobs, outcomes)
        self.queries += sum(_answers(job, outcome) for job, outcome in done)
        self.shared_passes += len(done) > 1
        done = [(job, _awaited(job, outcome)) for job, outcome in done]
        try:
            loop.call_soon_threadsafe(self._settle, done, abandoned)
        except RuntimeError:
            # the loop is closed, and nobody waits
            return False
        return True

    def _settle(self, done: Sequence[tuple[_Job, Any]], abandoned: Sequence[_Job]) -> None:
        """Hand over results, on the event loop."""
        for job in abandoned:
            if not job.done.done():
                job.done.set_exception(CommandError("nobody waits for this any more"))
        for job, outcome in done:
            if job.done.done():
                continue
            if isinstance(outcome, BaseException):
                job.done.set_exception(outcome)
            else:
                job.done.set_result(outcome)


def _take_abandoned(waiting: deque[_Job]) -> list[_Job]:
    """Take the jobs whose client has left, or gave up."""
    sorted_out: tuple[list[_Job], list[_Job]] = ([], [])
    for job in waiting:
        sorted_out[job.waited_for].append(job)
    abandoned, kept = sorted_out
    if abandoned:
        waiting.clear()
        waiting.extend(kept)
    return abandoned


def _sorted_out(
    jobs: Sequence[_Job], outcomes: Sequence[Any]
) -> tuple[list[_Job], list[tuple[_Job, Any]]]:
    """The jobs of which parts are left, and the others with their outcomes."""
    unfinished, done = [], []
    for job, outcome in zip(jobs, outcomes, strict=True):
        if outcome is Progress.UNFINISHED:
            unfinished.append(job)
        else:
            done.append((job, outcome))
    return unfinished, done


def _itself(result: ResultT) -> ResultT:
    return result


def _awaited(job: _Job, outcome: Any) -> Any:
    """What is to be known of a job: what follows from its result, or an exception."""
    if isinstance(outcome, BaseException):
        return outcome
    try:
        return job.then(outcome)
    except Exception as error:  # noqa: BLE001 - outermost loop of the thread: who waits gets it
        return error


def _answers(job: _Job, outcome: Any) -> bool:
    """Whether it is a query, and was answered."""
    return job.work.rows > 0 and not isinstance(outcome, BaseException)


def _next_group(waiting: deque[_Job]) -> list[_Job]:
    """Take the first job, and those that may share its pass."""
    first = waiting.popleft()
    group, rows = first.work.group, first.work.rows
    jobs = [first]
    if group is None or not waiting:
        return jobs
    kept: list[_Job] = []
    for job in waiting:
        fits = job.work.group == group and rows + job.work.rows <= MAX_ROWS
        rows += job.work.rows if fits else 0
        (jobs if fits else kept).append(job)
    waiting.clear()
    waiting.extend(kept)
    return jobs


def _outcomes(works: Sequence[Work[Any]]) -> list[Any]:
    """A result or an exception for each."""
    try:
        return [works[0].alone()] if len(works) == 1 else works[0].together(works[1:])
    except CommandError as error:
        # its frames hold arrays
        failed: Exception = error.with_traceback(None)
    except Exception as error:  # noqa: BLE001 - outermost loop of the thread: who waits gets it
        failed = error
    if len(works) == 1:
        return [failed]
    # one of them may be at fault: each for itself
    return [outcome for work in works for outcome in _outcomes([work])]
