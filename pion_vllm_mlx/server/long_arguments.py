"""Long arguments that live in memory: values of stores that have no disk.

Such an argument is received into memory of its own, once, and the command may keep
that memory. What all commands under way hold together is counted against a budget:
a command that holds nothing yet waits for room, one that already holds something is
refused instead, so that no two of them can wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from pion_vllm_mlx.errors import CommandError

#: bytes of long arguments that all commands under way may hold together.
UNDER_WAY_BYTES = 1 << 30


class LongInbound:
    """A long argument in memory of its own."""

    def __init__(self, length: int, budget: LongArguments, when_room: Callable[[], None]) -> None:
        self.length = length
        self._budget = budget
        self._when_room = when_room
        self._memory: memoryview | None = None
        self._filled = 0
        self._counted = False

    @property
    def view(self) -> memoryview:
        """All bytes, read only; the memory lives as long as somebody refers to it."""
        assert self._memory is not None
        return self._memory.toreadonly()

    def claim(self) -> bool:
        """Count the argument and give it memory; False while there is no room."""
        if self._memory is None and self._budget.take(self.length, self._when_room):
            self._counted = True
            # not zeroed: every byte is received before anyone sees it
            self._memory = np.empty(self.length, np.uint8).data
        return self._memory is not None

    def buffer(self) -> memoryview | None:
        if not self.claim():
            return None
        assert self._memory is not None
        return self._memory[self._filled :]

    def advance(self, n: int) -> None:
        self._filled += n

    def release(self) -> None:
        """The command is over: who kept the view keeps the memory."""
        if self._counted:
            self._counted = False
            self._budget.give_back(self.length)
        self._memory = None


class LongArguments:
    """The budget, and who waits for it. Belongs to the event loop."""

    def __init__(self, budget: int = UNDER_WAY_BYTES) -> None:
        self.budget = budget
        self.held = 0
        self._waiting: dict[Callable[[], None], None] = {}

    def open(self, length: int, first: bool, when_room: Callable[[], None]) -> LongInbound:
        """A place for a long argument; ``first`` says that its command holds no other one.

        Raises CommandError where a later one does not fit.
        """
        target = LongInbound(length, self, when_room)
        if not first and not target.claim():
            self._waiting.pop(when_room, None)
            raise CommandError("too many bytes of arguments are under way, try again")
        return target

    def take(self, length: int, when_room: Callable[[], None]) -> bool:
        """Count ``length`` bytes; when False, ``when_room`` is called once there may be room."""
        if self.held + length > self.budget:
            self._waiting[when_room] = None
            return False
        self.held += length
        return True

    def give_back(self, length: int) -> None:
        self.held -= length
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            loop = asyncio.get_running_loop()
            for wake in waiting:
                loop.call_soon(wake)
