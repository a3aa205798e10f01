"""Long arguments that live in memory: values of stores that have no disk.

Such an argument is received into memory of its own, once, and the command may keep
that memory. What of all commands under way has come is counted against a budget, in
steps: what was only announced takes no room from anybody. When the budget is spent
all wait but the connection that has held something for the longest time. It may go on
until its command is whole, so that no two can wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pion_vllm_mlx.server.waiting_line import WaitingLine

#: bytes of long arguments that all commands under way may hold together; one command has less.
UNDER_WAY_BYTES = 1 << 30
#: bytes that are counted before they come: the first ones are few, and in memory of their own,
#: as one byte of a long piece of memory may take this much of it.
FIRST_BYTES = 128 << 10
STEP_BYTES = 2 << 20
CACHE_LINE_BYTES = 64


class LongInbound:
    """A long argument in memory of its own."""

    def __init__(self, length: int, budget: LongArguments, when_room: Callable[[], None]) -> None:
        self.length = length
        self._budget = budget
        self._when_room = when_room
        self._memory: memoryview | None = None
        self._filled = 0
        self._counted = 0

    @property
    def view(self) -> memoryview:
        """All bytes, read only; the memory lives as long as somebody refers to it."""
        assert self._memory is not None
        return self._memory.toreadonly()

    def buffer(self) -> memoryview | None:
        if self._filled == self._counted and not self._count_more():
            return None
        assert self._memory is not None
        return self._memory[self._filled : self._counted]

    def _count_more(self) -> bool:
        """Count the next step; False while there is no room for it."""
        step = min(STEP_BYTES if self._counted else FIRST_BYTES, self.length - self._counted)
        if not self._budget.take(step, self._when_room):
            return False
        begun = self._memory
        self._counted += step
        if begun is None or len(begun) < self._counted:
            # not zeroed: every byte is received before anyone sees it
            self._memory = _lined_up(self.length if begun else step)
            if begun is not None:
                self._memory[: len(begun)] = begun
        return True

    def advance(self, n: int) -> None:
        self._filled += n

    def release(self) -> None:
        """The command is over: who kept the view keeps the memory."""
        if self._filled < self.length:
            # its connection is gone, nobody waits any more
            self._budget.line.leave(self._when_room)
        counted, self._counted = self._counted, 0
        self._filled = self.length
        if counted:
            self._budget.give_back(counted, self._when_room)
        self._memory = None


def _lined_up(length: int) -> memoryview:
    """Memory from the start of a cache line: sums over K and V that lie so take a tenth less."""
    memory = np.empty(length + CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[start : start + length].data


class LongArguments:
    """The budget, and who waits for it. Belongs to the event loop."""

    def __init__(self, budget: int = UNDER_WAY_BYTES) -> None:
        self.budget = budget
        self.held = 0
        self.line = WaitingLine(self._has_room)
        #: bytes by connection, the one that has held some for the longest time first
        self._holders: dict[Callable[[], None], int] = {}

    @property
    def wanted(self) -> bool:
        """Whether somebody waits."""
        return len(self.line) > 0

    def open(self, length: int, when_room: Callable[[], None]) -> LongInbound:
        """A place for a long argument; ``when_room`` stands for its connection."""
        return LongInbound(length, self, when_room)

    def take(self, nbytes: int, when_room: Callable[[], None]) -> bool:
        """Count bytes; when False, ``when_room`` is called once there may be room."""
        mine = self._holders.get(when_room, 0)
        # commands that it has sent ahead must not make the first one's room endless
        privileged = self._oldest() in (None, when_room) and mine + nbytes <= self.budget
        if self.held + nbytes > self.budget and not privileged:
            self.line.join(when_room)
            return False
        self._holders[when_room] = mine + nbytes
        self.held += nbytes
        return True

    def give_back(self, nbytes: int, when_room: Callable[[], None]) -> None:
        self.held -= nbytes
        left = self._holders[when_room] - nbytes
        if left:
            self._holders[when_room] = left
        else:
            del self._holders[when_room]
        oldest = self._oldest()
        if oldest is not None and oldest in self.line:
            self.line.first(oldest)
        self.line.wake()

    def _oldest(self) -> Callable[[], None] | None:
        return next(iter(self._holders), None)

    def _has_room(self) -> bool:
        oldest = self._oldest()
        return self.held < self.budget or (oldest is not None and oldest in self.line)
