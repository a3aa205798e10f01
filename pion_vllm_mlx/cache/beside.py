"""The thread beside the one that generates, and how long that one was held up.

What may take long is done there: asking the store, reading rows, freeing memory. It may use
MLX, on a stream of its own; arrays that it has evaluated belong to whoever gets them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import mlx.core as mx

from pion_vllm_mlx.cache.pace import Pace, keep_pace

#: a request waits so many deadlines for others to be looked up, then it goes on without.
MOST_DEADLINES = 10
BUSY = "the store did not get to it in time"
#: nothing between two tokens of other requests should take longer.
BLOCKING_MS = 2.0
MOST_TIMES = 4096

T = TypeVar("T")


class Beside:
    """One thread, which starts with the first thing that it is given."""

    def __init__(self, pace: Pace | None = None) -> None:
        """``pace`` is that of the thread that generates."""
        self._pace = pace
        self._given: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self, call: Callable[[], T]) -> Future[T]:
        """Has ``call`` carried out, behind all that was given before."""
        future: Future[T] = Future()
        self._start()
        self._given.put((future, call))
        return future

    def drop(self, things: list[Any]) -> None:
        """Lets the thread have the last references, and the list: it gives up one after the other.

        To free gigabytes takes milliseconds, and no other thread of Python runs while one is freed.
        """
        self._start()
        self._given.put((Future(), lambda: _let_go(things)))

    def close(self) -> None:
        """Ends the thread behind what it was given; waits for nothing."""
        with self._lock:
            if self._thread is not None:
                self._given.put(None)
                self._thread = None

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="pion-beside", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        keep_pace(self._pace)
        while (given := self._given.get()) is not None:
            future, call = given
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  (it is raised where it was asked)
                    future.set_exception(error)
            del given, future, call  # nothing is held while this thread waits
        mx.clear_streams()


def _let_go(things: list[Any]) -> None:
    while things:
        things.pop()


def waited(done: Future[None], seconds: float) -> bool:
    """Waits until something is done that began within ``seconds``; False if it never began."""
    try:
        done.result(seconds)
    except TookTooLong:
        if done.cancel():
            return False
        done.result()
    return True


class Blocking:
    """How long calls of each name held up the thread that generates. Any thread may read."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}
        self._longest: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._over: Counter[str] = Counter()

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Notes how long the block takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.note(name, (time.perf_counter() - began) * 1000)

    def note(self, name: str, elapsed_ms: float) -> None:
        """Notes one call."""
        self._times.setdefault(name, deque(maxlen=MOST_TIMES)).append(elapsed_ms)
        self._longest[name] = max(self._longest.get(name, 0.0), elapsed_ms)
        self._counts[name] += 1
        self._over[name] += elapsed_ms > BLOCKING_MS

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Per name how many calls, how many over 2 ms, and median, p99 (of the latest), longest."""
        return {name: self._told(name, sorted(times)) for name, times in list(self._times.items())}

    def _told(self, name: str, times: list[float]) -> dict[str, float]:
        return {
            "calls": self._counts[name],
            "over_2_ms": self._over[name],
            "median_ms": round(times[len(times) // 2], 3),
            "p99_ms": round(times[min(len(times) - 1, int(0.99 * len(times)))], 3),
            "longest_ms": round(self._longest[name], 3),
        }
