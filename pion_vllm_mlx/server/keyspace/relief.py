"""Room that plain keys keep for themselves, for when the disk has none left.

Two reserves: one for the records of whatever takes away, and one behind it, that a flush of all
keys and a save of a little always find.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pion_vllm_mlx.server.keyspace.changes import FREEING, Change, Verb, size_of
from pion_vllm_mlx.server.store.reserve import RESERVE_BYTES, Reserve


class Relief:
    """The reserves of one log, filled from the start where there is room. For one thread."""

    def __init__(self, path: Path) -> None:
        """``path``: the name of each for the moment in which it has one. Blocks."""
        self._folder = path.parent
        self._deleting, self._last = Reserve(path), Reserve(path)
        self.fill()

    @property
    def held(self) -> bool:
        """Whether none of it is used."""
        return self._deleting.held and self._last.held

    def fill(self) -> None:
        """Take what is missing, if it is there. Blocks."""
        self._last.fill()
        self._deleting.fill()

    def give_for(self, changes: Sequence[Change]) -> bool:
        """Give room for the record of these, if they only take away; False if not. Blocks."""
        if not all(one.verb in FREEING for one in changes) or size_of(changes) >= RESERVE_BYTES:
            return False
        if self._deleting.give():
            return True
        return all(one.verb is Verb.FLUSH for one in changes) and self._last.give()

    def give_for_save(self, nbytes: int) -> bool:
        """Whether so many bytes fit on the disk, if need be in the last reserve. Blocks.

        Raises OSError.
        """
        disk = os.statvfs(self._folder)
        free_bytes = disk.f_bavail * disk.f_frsize
        if nbytes < free_bytes:
            return True
        return nbytes < free_bytes + self._last_bytes and self._last.give()

    @property
    def _last_bytes(self) -> int:
        # a block more than the values: frames, and the empty log behind the snapshot
        return RESERVE_BYTES - (16 << 10) if self._last.held else 0
