"""Pieces of one computation, spread over the processor's cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
    """``work`` of every item, in order of the items, by the calling thread and a few others.

    ``work`` has to leave the interpreter's lock for most of its time.  What it raises is raised.
    """
    num_helpers = min(len(items), _cores()) - 1
    if num_helpers < 1:
        return [work(item) for item in items]
    results: list[Result | None] = [None] * len(items)
    left = deque(range(len(items)))

    def help_out() -> None:
        while True:
            try:
                number = left.popleft()
            except IndexError:
                return
            results[number] = work(items[number])

    pool = _pool(os.getpid())
    helpers = [pool.submit(help_out) for _ in range(num_helpers)]
    try:
        help_out()
    finally:
        # One that has not started by now has nothing left to do.
        for helper in [helper for helper in helpers if not helper.cancel()]:
            helper.result()
    return cast("list[Result]", results)


@lru_cache(maxsize=1)
def _cores() -> int:
    """Asked once: the question takes as long as a small query."""
    return os.cpu_count() or 1


@lru_cache(maxsize=1)
def _pool(process_id: int) -> ThreadPoolExecutor:
    """The threads of a process: those of a parent do not survive a fork."""
    return ThreadPoolExecutor(_cores(), f"attention-{process_id}")
