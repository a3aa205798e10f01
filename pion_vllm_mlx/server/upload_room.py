"""Room on the disk for a long argument while it arrives.

Room is made for what has come, a window at a time, never for what was only announced: who
announces much and sends nothing throws nobody out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.store import Store

if TYPE_CHECKING:
    from pion_vllm_mlx.server.inbound import WindowPool

#: windows of others that are on their way count up to this part of the budget: under a small
#: one they could be more than all of it.
_PART_ON_ITS_WAY = 32


class UploadRoom:
    """Asked before each window; ``when_room`` is called when there is an answer to wait for."""

    def __init__(self, store: Store, pool: WindowPool, when_room: Callable[[], None]) -> None:
        self._store = store
        self._pool = pool
        self._when_room = when_room
        self._task: asyncio.Task[None] | None = None
        self._made = False
        #: why there is none
        self.error: CommandError | None = None

    def ready(self, nbytes: int) -> bool:
        """Whether the next ``nbytes`` may come; where not even they fit, ``error`` says so."""
        if self._task is not None:
            return False
        nbytes += self._on_its_way()
        if self.error is not None or self._made or self._store.space.excess(nbytes) <= 0:
            self._made = False
            return True
        self._task = asyncio.get_running_loop().create_task(self._make(nbytes))
        return False

    def roomy(self, nbytes: int) -> bool:
        """Whether the next ``nbytes`` may come with nobody asking before each window."""
        if self._task is not None or self.error is not None:
            return False
        return self._store.space.excess(nbytes + self._on_its_way()) <= 0

    def _on_its_way(self) -> int:
        return min(self._pool.held, self._store.space.disk_budget // _PART_ON_ITS_WAY)

    async def _make(self, nbytes: int) -> None:
        try:
            await self._store.make_room(nbytes)
        except CommandError as error:
            self.error = error.with_traceback(None)
        self._made, self._task = True, None
        self._when_room()
