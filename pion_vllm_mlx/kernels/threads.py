"""Pieces of one computation, spread over the processor's cores.

A query takes a fraction of a millisecond, so what it costs to hand a piece over counts: helpers
wait in one queue, and a future for each piece would cost more than the pieces of a short one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
    """``work`` of every item, in order of the items, by the calling thread and a few others.

    ``work`` has to leave the interpreter's lock for most of its time.  What it raises is raised,
    once all items are done.
    """
    num_helpers = min(len(items), cores()) - 1
    if num_helpers < 1:
        return [work(item) for item in items]
    share = _Share(items, work)
    _crew(os.getpid()).call(share, num_helpers)
    share.help_out()
    return share.results()


@lru_cache(maxsize=1)
def cores() -> int:
    """Asked once: the question takes as long as a small query."""
    return os.cpu_count() or 1


class _Share(Generic[Item, Result]):
    """The items that are left, and the results so far."""

    def __init__(self, items: Sequence[Item], work: Callable[[Item], Result]) -> None:
        self._items = items
        self._work = work
        self._left = deque(range(len(items)))
        # One fewer than there are items: who finds it empty has finished the last one.
        self._others = deque(range(len(items) - 1))
        self._results: list[Result | None] = [None] * len(items)
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def help_out(self) -> None:
        """Work on what is left; nothing where this comes too late."""
        while True:
            try:
                number = self._left.popleft()
            except IndexError:
                return
            try:
                self._results[number] = self._work(self._items[number])
            except BaseException as error:  # noqa: BLE001 - of any thread: the caller raises it
                self._error = error
            try:
                self._others.pop()
            except IndexError:
                self._done.release()

    def results(self) -> list[Result]:
        """All of them, waited for."""
        self._done.acquire()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose frames hold this one
        return cast("list[Result]", self._results)


class _Crew:
    """The helpers of a process; as many as were ever called at once."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Share[Any, Any]] = SimpleQueue()
        self._growing = threading.Lock()
        self._helpers: list[threading.Thread] = []
        self._avoided = -1

    def call(self, share: _Share[Any, Any], num_helpers: int) -> None:
        """Have so many helpers work on it, each when it has time."""
        if len(self._helpers) < num_helpers:
            with self._growing:
                while len(self._helpers) < num_helpers:
                    helper = threading.Thread(
                        target=self._run, name="attention-helper", daemon=True
                    )
                    helper.start()
                    self._helpers.append(helper)
                self._avoided = -1
        self._step_aside()
        for _ in range(num_helpers):
            self._queue.put(share)

    def _step_aside(self) -> None:
        """Keep the helpers off the processor that the calling thread is on.

        Linux likes to wake a helper there where a client has just left another processor, which
        looks busy for a moment: caller and helper would take turns.
        """
        here = _processor_here()()
        if here == self._avoided:
            return
        elsewhere = os.sched_getaffinity(0) - {here}
        if not elsewhere:
            return
        self._avoided = here
        for helper in self._helpers:
            if helper.native_id is not None:
                with contextlib.suppress(OSError):  # it is only slower then
                    os.sched_setaffinity(helper.native_id, elsewhere)

    def _run(self) -> None:
        while True:
            # no name for it: a helper that waits must not keep alive what it worked on
            self._queue.get().help_out()


@lru_cache(maxsize=1)
def _processor_here() -> Callable[[], int]:
    """What tells the number of the processor that the calling thread is on; -1 where unknown."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            found: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
            return found
    return lambda: -1


@lru_cache(maxsize=1)
def _crew(process_id: int) -> _Crew:
    """The helpers of a process: those of a parent do not survive a fork."""
    return _Crew()
