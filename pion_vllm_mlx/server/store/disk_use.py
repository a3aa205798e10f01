"""What the segment files occupy, without a look at each of them every time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pion_vllm_mlx.server.store.segment import Segment


class DiskUse:
    """Bytes on disk of the segments of one folder; a file is looked at when it has changed."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._total = 0
        #: filled by any thread
        self._changed: dict[str, Segment] = {}

    def add(self, segment: Segment) -> None:
        """Count a segment from now on."""
        self._bytes[segment.name] = 0
        segment.changed = self._changed
        self._changed[segment.name] = segment

    def remove(self, segment: Segment) -> None:
        """Its file is about to go."""
        self._total -= self._bytes.pop(segment.name, 0)
        segment.changed = None
        self._changed.pop(segment.name, None)

    def total(self) -> int:
        """Bytes that the files occupy; holes do not count."""
        for name in list(self._changed):
            # first: what is written while it is looked at counts the next time
            segment = self._changed.pop(name, None)
            if segment is not None and name in self._bytes:
                occupied = segment.disk_bytes()
                self._total += occupied - self._bytes[name]
                self._bytes[name] = occupied
        return self._total
