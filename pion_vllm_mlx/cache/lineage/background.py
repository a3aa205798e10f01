"""The one thread that talks to the store while the model generates.

Work is handed over, never waited for: what does not fit into the queue is not taken.  Work that
what comes after it takes in, of the same ``line``, waits once for both.  What a store is to keep
waits for one that is gone: it may be back in a moment.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.errors import PionError, StoreUnavailable

log = logging.getLogger("pion_vllm_mlx")

MOST_TASKS = 1024
PATIENCE_SECONDS = 60.0
"""A store that is gone is waited for so long, from the first that failed on."""
_RETRY_SECONDS = 0.25


@dataclass(frozen=True)
class Line:
    """Tasks that follow one another, of which one that waits may be done with the next.

    ``name`` is the same object for those of one line, ``sort`` is equal for those that can be
    done together; ``join`` gives what does both, in the former's place, of what the former
    ``has``. With ``behind`` that is only right where nothing else of the line waits behind the
    former.
    """

    name: object
    sort: str
    join: Callable[[Any], Task]
    has: Any = None
    behind: bool = False


@dataclass(frozen=True)
class Task:
    """Something to do; ``failed`` is told why it was not, ``over`` is called in either case.

    Not so where the task is given up. One that is joined with another leaves both to what ``join``
    gives. A ``patient`` one is tried again while the store is gone, before all that wait behind it.
    """

    run: Callable[[], None]
    failed: Callable[[BaseException], None]
    num_bytes: int = 0
    line: Line | None = field(default=None, repr=False)
    over: Callable[[], None] = lambda: None
    patient: bool = False


class Background:
    """A bounded queue and its thread, which starts with the first task at the latest."""

    def __init__(self, most_bytes: int, idle: Callable[[], None]) -> None:
        """``idle`` is called on the thread whenever the queue has run empty."""
        self._most_bytes = most_bytes
        self._idle = idle
        self._tasks: deque[Task] = deque()
        self._waiting_bytes = 0
        self._busy = False
        self._closed = False
        self._flushing = 0
        self._gone_since: float | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait, those being written included."""
        return self._waiting_bytes

    @property
    def waiting(self) -> int:
        """Tasks that wait, the running one included."""
        return len(self._tasks) + self._busy

    def put(self, task: Task) -> bool:
        """Takes a task, unless the queue is full or closed. Never waits for one to end."""
        with self._changed:
            full = self._waiting_bytes + task.num_bytes > self._most_bytes and self._tasks
            at = self._former(task.line)
            if self._closed or full or (at is None and len(self._tasks) >= MOST_TASKS):
                return False
            if at is None or task.line is None:
                self._tasks.append(task)
            else:
                former = self._tasks[at]
                size = former.num_bytes + task.num_bytes
                both = task.line.join(former.line.has if former.line is not None else None)
                self._tasks[at] = replace(both, num_bytes=size)
            self._waiting_bytes += task.num_bytes
            self._start()
            self._changed.notify_all()
            return True

    def begin(self) -> None:
        """Starts the thread, so that no task has to: one is waited for until it runs."""
        with self._changed:
            if not self._closed:
                self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="pion-lineage", daemon=True)
            self._thread.start()

    def _former(self, line: Line | None) -> int | None:
        """Where a task waits that is done together with the next one of ``line``."""
        if line is None:
            return None
        for at in range(len(self._tasks) - 1, -1, -1):
            other = self._tasks[at].line
            if other is None or other.name is not line.name:
                continue
            if other.sort == line.sort:
                return at
            if line.behind:
                return None
        return None

    def flush(self, timeout: float) -> bool:
        """Waits until nothing is left to do; False when time is over.

        Meanwhile nothing waits for a store that is gone.
        """
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not (self._tasks or self._busy), timeout)
            finally:
                self._flushing -= 1

    def close(self, timeout: float) -> None:
        """Finishes what waits within ``timeout``, gives the rest up, ends the thread."""
        self.flush(timeout)
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        # a store that nobody holds any more may be let go by the last task of its own thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    # -- on the thread ----------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._closed:
                    self._changed.wait()
                if self._closed:
                    break
                task = self._tasks.popleft()
                self._busy = True
            if self._run(task):
                self._done(task)
            else:
                self._put_back(task)
            del task  # its owner may be dropped while this thread waits
        mx.clear_streams()

    def _done(self, task: Task) -> None:
        with self._changed:
            empty = not self._tasks
        if empty:
            self._run(Task(self._idle, lambda error: None))
        with self._changed:
            self._busy = False
            self._waiting_bytes = max(0, self._waiting_bytes - task.num_bytes)
            self._changed.notify_all()

    def _put_back(self, task: Task) -> None:
        """It waits in front of all others, and can be joined again."""
        with self._changed:
            self._busy = False
            if self._closed:  # and given up with the others
                return
            self._tasks.appendleft(task)
            self._changed.wait_for(lambda: self._closed or self._flushing, _RETRY_SECONDS)

    def _run(self, task: Task) -> bool:
        """Does a task, and tells what became of it; False where it is to be tried again."""
        failure = _tried(task.run)
        try:
            if task.patient and self._waits(failure):
                return False
            _tell(task, failure)
            return True
        finally:
            failure = None  # its frames hold this one: what the task had is to be freed now

    def _waits(self, failure: BaseException | None) -> bool:
        """Whether the store is gone, and still waited for."""
        if not isinstance(failure, StoreUnavailable):
            self._gone_since = None
            return False
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        patient = time.monotonic() - self._gone_since < PATIENCE_SECONDS
        return patient and not (self._closed or self._flushing)


def _tell(task: Task, failure: BaseException | None) -> None:
    """Those who wait for a task get to know what became of it."""
    try:
        try:
            if failure is not None:
                task.failed(failure)
        finally:
            task.over()
    except Exception:  # noqa: BLE001  (the thread outlives whatever they raise)
        log.exception("what became of a prefix could not be told")


def _tried(run: Callable[[], None]) -> BaseException | None:
    """Why something was not done, or None."""
    try:
        run()
    except PionError as error:
        return error
    except Exception as error:  # noqa: BLE001  (the thread outlives whatever one task does)
        log.exception("storing a prefix failed")
        return error
    return None


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method, without keeping its object alive: one that is dropped closes itself."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call
