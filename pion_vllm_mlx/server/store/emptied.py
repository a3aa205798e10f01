"""Segments in which nothing lives any more, and when their files may go.

Not before the records that emptied them are on stable storage; and without logs not while the
last snapshot, or one being written, has something there of somebody who is there still.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pion_vllm_mlx.server.store.segment import Segment
from pion_vllm_mlx.server.store.segments import SegmentFolder
from pion_vllm_mlx.server.store.state import State


class Emptied:
    """Those of one store; they come through ``state.unused``. Belongs to the event loop."""

    def __init__(self, state: State, segments: SegmentFolder) -> None:
        self._state, self._segments = state, segments
        #: those that a start would miss, by a group for which it would
        self._missed: dict[bytes, list[Segment]] = {}

    def segments(self) -> list[Segment]:
        """Segments in which nothing lives and nobody writes, and that no start would miss."""
        empty = (s for s in self._state.unused if not s.uses and not s.writers)
        return [segment for segment in empty if self._missed_for(segment) is None]

    def await_flush(self) -> bool:
        """Whether a segment waits for the records that emptied it to be on stable storage.

        Else a power cut could keep the unlink and lose the records. What was never flushed
        itself need not wait.
        """
        return any(segment.durable for segment in self.segments())

    def discard(self, flushed: Sequence[Segment] = ()) -> None:
        """Unlink segments in which nothing lives and nobody writes.

        ``flushed``: those that were emptied before the last flush of the logs.
        """
        waiting, ready = [], {segment.name for segment in flushed}
        for segment in self._state.unused:
            if segment.uses or segment.name not in self._segments.segments:
                continue
            if (group := self._missed_for(segment)) is not None:  # also before its snapshot's flush
                self._missed.setdefault(group, []).append(segment)
            elif segment.writers or (segment.durable and segment.name not in ready):
                waiting.append(segment)
            else:
                self._segments.unlink(segment)
        self._state.unused = waiting

    def saved(self) -> None:
        """Snapshots are others: what a start would have missed may go."""
        self._look_again(list(self._missed))

    def left(self, groups: Collection[bytes]) -> None:
        """Something of these groups is gone, or all of it."""
        self._look_again([group for group in groups if group in self._missed])

    def _look_again(self, groups: Iterable[bytes]) -> None:
        for group in groups:
            self._state.unused += self._missed.pop(group)

    def _missed_for(self, segment: Segment) -> bytes | None:
        """A group for which a start without logs would miss a segment; None where it would not.

        It is there still, and the snapshot has something of it in the segment.
        """
        state = self._state
        for group in segment.in_snapshot:
            if state.sides(group) or group in state.sessions or group in state.states:
                return group
        return None
