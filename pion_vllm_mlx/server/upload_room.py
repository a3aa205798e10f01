"""Room on the disk for a long argument while it arrives.

Room is made for what has come, a window at a time, never for what was only announced: who
announces much and sends nothing throws nobody out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.store import Store


class UploadRoom:
    """Asked before each window; ``when_room`` is called when there is an answer to wait for."""

    def __init__(self, store: Store, when_room: Callable[[], None]) -> None:
        self._store = store
        self._when_room = when_room
        self._task: asyncio.Task[None] | None = None
        self._made = False
        #: why there is none
        self.error: CommandError | None = None

    def ready(self, nbytes: int) -> bool:
        """Whether the next ``nbytes`` may come; where not even they fit, ``error`` says so."""
        if self._task is not None:
            return False
        if self.error is not None or self._made or self._store.space.excess(nbytes) <= 0:
            self._made = False
            return True
        self._task = asyncio.get_running_loop().create_task(self._make(nbytes))
        return False

    async def _make(self, nbytes: int) -> None:
        try:
            await self._store.make_room(nbytes)
        except CommandError as error:
            self.error = error.with_traceback(None)
        self._made, self._task = True, None
        self._when_room()
