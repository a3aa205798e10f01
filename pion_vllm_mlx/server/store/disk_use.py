"""What the segment files occupy, without a look at each of them every time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pion_vllm_mlx.server.store.segments import Segment


class DiskUse:
    """Bytes on disk of the segments of one folder; a sealed file is looked at once."""

    def __init__(self) -> None:
        self._growing: dict[str, Segment] = {}
        self._sealed: dict[str, int] = {}
        self._sealed_bytes = 0

    def add(self, segment: Segment) -> None:
        """Count a segment from now on."""
        self._growing[segment.name] = segment

    def remove(self, segment: Segment) -> None:
        """Its file is about to go."""
        self._growing.pop(segment.name, None)
        self._sealed_bytes -= self._sealed.pop(segment.name, 0)

    def total(self) -> int:
        """Bytes that the files occupy; holes do not count."""
        growing = 0
        for segment in list(self._growing.values()):
            occupied = segment.disk_bytes()
            if segment.sealed:
                del self._growing[segment.name]
                self._sealed[segment.name] = occupied
                self._sealed_bytes += occupied
            else:
                growing += occupied
        return self._sealed_bytes + growing
