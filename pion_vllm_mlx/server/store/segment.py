"""One segment file, and the regions of it that are being written.

A segment belongs to one segment group. While it is open, rows are written at
its end, behind a header whose space was reserved. Sealing fills the header, cuts
off what no record has named and publishes the file: from then on it is a safetensors
file that never changes, only disappears. Dead bytes are named U8 tensors, since
safetensors allows no gaps.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from pion_vllm_mlx.server.store.files import FileHandle, OpenFiles, pwritev_all, unlink_file
from pion_vllm_mlx.server.store.segment_header import LENGTH_BYTES, TENSOR_HEADER_BYTES

SUFFIX = ".safetensors"
#: runs start at multiples of this: copies from the page cache to a socket or an
#: array run at up to twice the speed where both sides are aligned alike.
ALIGNMENT = 64
#: so much may die of a segment before another one is begun in its place.
_LITTLE_BYTES = 1 << 20
MAX_SEGMENT_BYTES = 8 << 30


@dataclass
class Segment:
    """One segment file and what the server knows of it.

    ``tail`` is where the next bytes go; ``writers`` counts regions handed out whose
    writing has not ended; ``uses`` counts runs and states that live here, ``guests`` those
    of each other group (equal rows are stored once); ``died``: bytes of what lived here, as if
    nobody shared them; ``named_end``: what records have named here, alive or dead, ends there (0:
    nothing); ``flushed``: that may be on stable storage;
    ``abandoned`` holds begin and end of regions that nothing came of; ``changed`` is where it
    says that its size may be another, ``due`` where it says that it is to be flushed;
    ``in_snapshot``: without logs, groups for which the last snapshot, or one being written,
    names it.
    """

    name: str
    group: bytes
    path: Path
    files: OpenFiles
    data_start: int
    tail: int
    sealed: bool = False
    closed: bool = False
    size: int = 0
    header_bytes: int = 0
    header_crc: int = 0
    header_verified: bool = True
    writers: int = 0
    uses: int = 0
    died: int = 0
    guests: dict[bytes, int] = field(default_factory=dict)
    tensors: int = 0
    flushed: bool = False
    named_end: int = 0
    in_snapshot: frozenset[bytes] = frozenset()
    abandoned: set[tuple[int, int]] = field(default_factory=set)
    changed: dict[str, Segment] | None = field(default=None, repr=False, compare=False)
    due: dict[str, Segment] | None = field(default=None, repr=False, compare=False)
    _disk_bytes: int = 0
    _unlinked: FileHandle | None = None

    @property
    def file(self) -> FileHandle:
        """The file, open. Whoever uses its descriptor holds the handle meanwhile."""
        handle = self._unlinked or self.files.get(self.path)
        if self._unlinked not in (None, handle):
            # opened while it went: kept open by nobody but who asked
            self.files.forget(self.path)
        # a thread that asks for a file while it is unlinked finds none: its handle was kept first
        return handle if handle.fd >= 0 else self._unlinked or handle

    def groups(self) -> tuple[bytes, ...]:
        """Its own group, and the others of which something lives here."""
        return (self.group, *self.guests)

    def users(self) -> list[bytes]:
        """The groups of which something lives here."""
        own = self.uses > sum(self.guests.values())
        return [self.group, *self.guests] if own else list(self.guests)

    def settle(self, group: bytes, end: int) -> None:
        """A run or state of a group lives here, up to the byte ``end`` of the file."""
        self.uses += 1
        self.named_end = max(self.named_end, end)
        if group != self.group:
            self.guests[group] = self.guests.get(group, 0) + 1

    def leave(self, group: bytes, nbytes: int) -> None:
        """One that settled lives here no more."""
        self.uses -= 1
        self.died += nbytes
        if group in self.guests:
            self.guests[group] -= 1
            if not self.guests[group]:
                del self.guests[group]

    @property
    def durable(self) -> bool:
        """Whether something that lives or lived here may be on stable storage."""
        return self.flushed and self.named_end > 0

    def unlink(self) -> None:
        """Remove the file; who still holds a run of it can read it to its end. Raises OSError."""
        with contextlib.suppress(OSError):
            self._unlinked = self.file
            self._unlinked.retired = self.files.retired
        try:
            unlink_file(self.path)
        except OSError:
            self._unlinked = None  # it is where it was
            raise
        # only now: who asks in between would open it again, and keep its blocks
        self.files.forget(self.path)

    def written(self) -> None:
        """Bytes of the file have changed, on whichever thread."""
        due = self.due
        if due is not None:
            due[self.name] = self
        self.resized()

    def resized(self) -> None:
        """It may take more or less of the disk now."""
        self._disk_bytes = 0
        changed = self.changed
        if changed is not None:
            changed[self.name] = self

    def disk_bytes(self) -> int:
        """Bytes the file occupies; holes do not count."""
        if self._disk_bytes:
            return self._disk_bytes
        try:
            occupied = self.path.stat().st_blocks * 512
        except FileNotFoundError:
            return 0
        if self.sealed:  # it changes no more, unless it is said
            self._disk_bytes = occupied
        return occupied

    def append(self, nbytes: int, tensors: int) -> int:
        """Give out the next ``nbytes``, for a run of ``tensors`` parts; their aligned offset."""
        offset = -(-self.tail // ALIGNMENT) * ALIGNMENT
        self.tail = offset + nbytes
        self.tensors += tensors
        return offset

    def take_back(self, begin: int, end: int) -> None:
        """Nothing came of these bytes: what lies at the end of the file is cut off.

        Called on the event loop while the region still counts as a writer: nobody seals.
        """
        self.abandoned.add((begin, end))
        tail = self.tail
        while ends := [a for a in self.abandoned if a[1] == self.tail]:
            self.abandoned -= set(ends)
            self.tail = min(begin for begin, _ in ends)
        file = self.file
        if self.tail < tail and file.size() > self.tail:
            os.ftruncate(file.fd, self.tail)
            self.resized()

    def mostly_died(self) -> bool:
        """Whether more than half of it, and not just a little, lived once."""
        return self.died > max(_LITTLE_BYTES, (self.tail - self.data_start) // 2)

    def has_room(self, nbytes: int, tensors: int) -> bool:
        """Whether a run of ``nbytes`` in ``tensors`` parts still fits."""
        header = (self.tensors + tensors + 1) * TENSOR_HEADER_BYTES
        return (
            not self.closed
            and self.tail + nbytes <= MAX_SEGMENT_BYTES
            and header <= self.data_start - LENGTH_BYTES
        )


@dataclass
class Region:
    """Bytes of an open segment that one writer fills: ``length`` of them at ``offset``."""

    segment: Segment
    offset: int
    length: int
    released: bool = False

    def write(self, data: memoryview | bytes, at: int) -> None:
        """Write ``data`` at ``at`` bytes into the region. May block on the disk."""
        self.write_pieces([data], at)

    def write_pieces(self, pieces: list[memoryview | bytes], at: int) -> None:
        """Write ``pieces``, one behind the other, at ``at`` bytes into the region."""
        file = self.segment.file
        pwritev_all(file.fd, pieces, self.offset + at)
        self.segment.written()

    def release(self) -> None:
        """The writer has ended, well or not."""
        if not self.released:
            self.released = True
            self.segment.writers -= 1
