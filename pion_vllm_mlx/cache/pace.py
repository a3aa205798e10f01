"""When the thread beside the one that generates reads: while that one needs no Python.

A step of the model is made in Python, then it is scheduled and waited for without Python's lock.
What another thread does in Python, or moves out of a GPU's memory with that lock held, holds the
next step up if it falls into the making of one.  So the work is done in bounded pieces, each of
which begins soon after a step was scheduled, as long as somebody generates at all.

What is written is not: on an H200 that took three times as long so, and more from each step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextvars import ContextVar

#: of a step so long may be worked, pieces that have begun not counted.
WORKED_SECONDS = 0.0015
#: nobody generates who has not scheduled a step for so long.
IDLE_SECONDS = 0.1
#: a step that takes longer than that is not waited for.
MOST_SECONDS = 0.03


class Pace:
    """Knows when steps are scheduled. One thread generates, any may ask."""

    def __init__(self) -> None:
        self._at = -IDLE_SECONDS
        #: a lock a thread that waits: who generates takes none, and waits for nobody.
        self._waiting: deque[threading.Lock] = deque()

    @property
    def generating(self) -> bool:
        """Whether a step was scheduled lately."""
        return time.monotonic() - self._at < IDLE_SECONDS

    def step(self) -> None:
        """A step is about to be scheduled. For the thread that generates."""
        self._at = time.monotonic()
        self._go_on()

    def ended(self) -> None:
        """Nobody generates any more, for now. For the thread that generates."""
        self._at = -IDLE_SECONDS
        self._go_on()

    def wait(self) -> None:
        """Returns at once, or with the next step where the last one was a while ago."""
        since = time.monotonic() - self._at
        if WORKED_SECONDS < since < IDLE_SECONDS:
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
            turn.acquire(timeout=MOST_SECONDS)

    def _go_on(self) -> None:
        while self._waiting:
            self._waiting.popleft().release()


_PACE: ContextVar[Pace | None] = ContextVar("pion_pace", default=None)


def keep_pace(pace: Pace | None) -> None:
    """The calling thread works at this pace from now on."""
    _PACE.set(pace)


def between_pieces() -> None:
    """Called between pieces of work that take a millisecond or so; waits for its time."""
    pace = _PACE.get()
    if pace is not None:
        pace.wait()


def in_company() -> bool:
    """Whether somebody generates beside the calling thread."""
    pace = _PACE.get()
    return pace is not None and pace.generating
