"""Who waits for memory of arguments: woken one after the other, while there is some."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

WhenRoom = Callable[[], None]


class WaitingLine:
    """Waits in the order of asking. ``has_room`` is asked before somebody is woken.

    Who is woken and has to wait again keeps its place, and ends the waking: there is not
    enough for it, and those behind it had to wait for longer otherwise.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._waiting: OrderedDict[WhenRoom, None] = OrderedDict()
        self._waking = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, when_room: WhenRoom) -> bool:
        return when_room in self._waiting

    def join(self, when_room: WhenRoom) -> None:
        """Wait; who waits already keeps its place."""
        self._waiting[when_room] = None

    def leave(self, when_room: WhenRoom) -> None:
        self._waiting.pop(when_room, None)

    def first(self, when_room: WhenRoom) -> None:
        """Put somebody who waits in front of all others."""
        self._waiting.move_to_end(when_room, last=False)

    def wake(self) -> None:
        """There may be room: later, as who gives back may be in the middle of answering."""
        if self._waiting and not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake_next)

    def _wake_next(self) -> None:
        self._waking = False
        if not self._waiting or not self._has_room():
            return
        when_room, _ = self._waiting.popitem(last=False)
        when_room()
        if when_room in self._waiting:
            self.first(when_room)
        else:
            self.wake()
