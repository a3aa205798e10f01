"""The one thread that talks to the store while the model generates.

Work is handed over, never waited for: what does not fit into the queue is not taken.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from pion_vllm_mlx.errors import PionError

log = logging.getLogger("pion_vllm_mlx")

MOST_TASKS = 1024


@dataclass(frozen=True)
class Task:
    """Something to do; ``failed`` is told why it was not."""

    run: Callable[[], None]
    failed: Callable[[BaseException], None]
    num_bytes: int = 0


class Background:
    """A bounded queue and its thread, which starts with the first task."""

    def __init__(self, most_bytes: int, idle: Callable[[], None]) -> None:
        """``idle`` is called on the thread whenever the queue has run empty."""
        self._most_bytes = most_bytes
        self._idle = idle
        self._tasks: deque[Task] = deque()
        self._waiting_bytes = 0
        self._busy = False
        self._closed = False
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
            if self._closed or full or len(self._tasks) >= MOST_TASKS:
                return False
            self._tasks.append(task)
            self._waiting_bytes += task.num_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="pion-lineage", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def flush(self, timeout: float) -> bool:
        """Waits until nothing is left to do; False when time is over."""
        ends_at = time.monotonic() + timeout
        with self._changed:
            while self._tasks or self._busy:
                left = ends_at - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return not (self._tasks or self._busy)
        return True

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
            self._run(task)
            with self._changed:
                empty = not self._tasks
            if empty:
                self._run(Task(self._idle, lambda error: None))
            with self._changed:
                self._busy = False
                self._waiting_bytes = max(0, self._waiting_bytes - task.num_bytes)
                self._changed.notify_all()
            del task  # its owner may be dropped while this thread waits
        mx.clear_streams()

    def _run(self, task: Task) -> None:
        try:
            task.run()
        except PionError as error:
            task.failed(error)
        except Exception as error:  # noqa: BLE001  (the thread outlives whatever one task does)
            log.exception("storing a prefix failed")
            task.failed(error)


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method, without keeping its object alive: one that is dropped closes itself."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call
