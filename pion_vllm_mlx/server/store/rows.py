"""Writing the rows of one run and reading them back.

The *stream* of a run is its rows as they travel in the storage format, in the
run's own layout: token after token, or head after head. A format of several
parts splits the stream into one per part; each part's stream lies in the file in
order, with the spare rows of a head-major run between its heads.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.formats import Part
from pion_vllm_mlx.server.store.files import pread_exactly, pread_into
from pion_vllm_mlx.server.store.index import InSegment, LayerRows, Run, StateBlob, place_file
from pion_vllm_mlx.server.store.segment import Region
from pion_vllm_mlx.server.store.shapes import RunShape

#: bulk bytes move in windows of this size.
WINDOW_BYTES = 2 << 20
#: what says nothing about the bytes on disk
_NO_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)

Bytes = NDArray[np.uint8]


def as_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of an array, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def combine_crcs(crcs: list[int]) -> int:
    """One checksum for a run: its only part's, or the checksum of all parts' checksums."""
    if len(crcs) == 1:
        return crcs[0]
    combined: int = crc32c(struct.pack(f"<{len(crcs)}I", *crcs))
    return combined


#: a gap that is at most this part of a piece is written, not left out.
_LEAST_PIECES_PER_GAP = 16


class _PartStream:
    """Where the next bytes of one part go: consecutive data, with a gap behind every head."""

    def __init__(self, part: Part, base: int, shape: RunShape) -> None:
        heads = shape.spec.heads if shape.head_major else 1
        self.base = base
        self.block = shape.rows * part.bytes_per_row // heads
        self.stride = shape.padded * part.bytes_per_row // heads
        self.done = 0
        self.crc = 0

    def take(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Split the next bytes into ``(offset in the run, bytes)``."""
        while data:
            head, at = divmod(self.done, self.block)
            count = min(self.block - at, len(data))
            yield self.base + head * self.stride + at, data[:count]
            self.done += count
            data = data[count:]


class RunWriter:
    """Takes the stream of a run, window by window, and puts it in its place.

    The place is a region of a segment, or a buffer of ``shape.file_bytes`` bytes.
    A window must hold whole rows (of a head, when head-major) for formats of several
    parts. Not thread-safe; writing may block and raises OSError.
    """

    def __init__(self, shape: RunShape, target: Region | bytearray) -> None:
        self.shape = shape
        self.target = target
        self.stream_crc = 0
        self.written = 0
        self._parts = [_PartStream(part, base, shape) for part, base in shape.part_offsets()]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one row, or of one head's share of it when head-major."""
        row = self.shape.spec.row_bytes
        return row // self.shape.spec.heads if self.shape.head_major else row

    @property
    def window_unit(self) -> int:
        """Bytes that a window must not cut: only formats of several parts have such."""
        return self.unit_bytes if len(self._parts) > 1 else 1

    @property
    def crc(self) -> int:
        return combine_crcs([part.crc for part in self._parts])

    def write(self, window: memoryview) -> None:
        """Append ``window`` to the run's stream."""
        self.stream_crc = crc32c(window, self.stream_crc)
        self.written += len(window)
        if len(self._parts) == 1:
            # the only part is the whole stream: one pass over the bytes for both checksums
            self._parts[0].crc = self.stream_crc
            self._put(self._parts[0], window)
            return
        rows = np.frombuffer(window, np.uint8).reshape(-1, self.unit_bytes)
        for stream, part in zip(self._parts, self.shape.spec.format.split(rows), strict=True):
            data = as_bytes(part)
            stream.crc = crc32c(data, stream.crc)
            self._put(stream, data)

    def _put(self, stream: _PartStream, data: memoryview) -> None:
        if isinstance(self.target, Region):
            for offset, pieces in _joined(stream.take(data)):
                self.target.write_pieces(pieces, offset)
            return
        for offset, piece in stream.take(data):
            self.target[offset : offset + len(piece)] = piece


def _joined(
    pieces: Iterable[tuple[int, memoryview]],
) -> Iterator[tuple[int, list[memoryview | bytes]]]:
    """Pieces that one system call can write: the gaps between them are short, and zeros.

    Holes of 8 KB between pieces of 512 KB made writing a third slower than zeros do.
    """
    first = end = 0
    together: list[memoryview | bytes] = []
    for offset, piece in pieces:
        gap = offset - end
        if together and gap > len(piece) // _LEAST_PIECES_PER_GAP:
            yield first, together
            together = []
        if not together:
            first = offset
        elif gap:
            together.append(bytes(gap))
        together.append(piece)
        end = offset + len(piece)
    if together:
        yield first, together


def _read_part(run: Run, part: Part, base: int, first: int, last: int) -> Bytes:
    """Rows ``[first, last)`` of one part, token-major ``[rows, bytes_per_row]``."""
    file, origin = place_file(run.place), run.place.offset
    shape = run.shape
    heads = shape.spec.heads if shape.head_major else 1
    data = np.empty((heads, last - first, part.bytes_per_row // heads), np.uint8)
    for head, piece in enumerate(shape.part_pieces(part, base, first, last)):
        pread_into(file.fd, as_bytes(data[head]), origin + piece.offset)
    rows: Bytes = data.transpose(1, 0, 2).reshape(last - first, part.bytes_per_row)
    return rows


def read_rows(run: Run, first: int, last: int) -> Bytes:
    """Rows ``[first, last)`` of a run as they travel: token-major ``[rows, row_bytes]``.

    Reads the disk; raises OSError.
    """
    parts = [_read_part(run, part, base, first, last) for part, base in run.shape.part_offsets()]
    return run.shape.spec.format.join(parts)


def read_layer(rows: LayerRows, start: int, end: int) -> Bytes:
    """Rows ``[start, end)`` of a layer, token-major, missing rows zero. Reads the disk."""
    result = np.zeros((end - start, rows.spec.row_bytes), np.uint8)
    for extent in rows.covering(start, end):
        last = extent.row + extent.end - extent.start
        result[extent.start - start : extent.end - start] = read_rows(extent.run, extent.row, last)
    return result


def _part_crc(run: Run, part: Part, base: int) -> int:
    file, crc = place_file(run.place), 0
    buffer = memoryview(bytearray(min(WINDOW_BYTES, max(1, run.shape.data_bytes))))
    for piece in run.shape.part_pieces(part, base, 0, run.shape.rows):
        at = 0
        while at < piece.length:
            view = buffer[: min(len(buffer), piece.length - at)]
            pread_into(file.fd, view, run.place.offset + piece.offset + at)
            crc = crc32c(view, crc)
            at += len(view)
    return crc


def verify_run(run: Run) -> None:
    """Check a run against its checksum, once. Reads the disk.

    Raises DamagedData, or OSError when it could not be found out.
    """
    if not run.verified:
        check_run(run)
        run.verified = True


def check_run(run: Run) -> None:
    """Check a run against its checksum, verified before or not. Reads the disk.

    Raises DamagedData, or OSError when it could not be found out.
    """
    try:
        crcs = [_part_crc(run, part, base) for part, base in run.shape.part_offsets()]
    except OSError as error:
        if error.errno in _NO_DAMAGE:
            raise
        raise DamagedData(f"{where(run)}: {error}") from error
    if combine_crcs(crcs) != run.crc:
        raise DamagedData(f"{where(run)}: checksum of rows is wrong")


def state_is_intact(blob: StateBlob) -> bool:
    """Whether a state's bytes have their checksum. Reads the disk, a window at a time.

    Raises OSError when that could not be found out.
    """
    place, crc = blob.place, 0
    try:
        file = place_file(place)
        for at in range(0, blob.length, WINDOW_BYTES):
            count = min(WINDOW_BYTES, blob.length - at)
            crc = crc32c(pread_exactly(file.fd, count, place.offset + at), crc)
    except OSError as error:
        if error.errno in _NO_DAMAGE:
            raise
        return False
    return crc == blob.crc


def where(run: Run) -> str:
    """The file and offset of a run, for messages."""
    place = run.place
    name = place.segment.path.name if isinstance(place, InSegment) else place.file.path.name
    return f"{name} at {place.offset}"


def read_head(rows: LayerRows, head: int, start: int, end: int) -> Bytes:
    """One head's share of rows ``[start, end)`` as it travels: ``[rows, row_bytes / H]``.

    Missing rows are zero. Reads the disk.
    """
    spec = rows.spec
    result = np.zeros((end - start, spec.row_bytes // spec.heads), np.uint8)
    for extent in rows.covering(start, end):
        last = extent.row + extent.end - extent.start
        shape = extent.run.shape
        file, origin = place_file(extent.run.place), extent.run.place.offset
        parts = []
        for part, base in shape.part_offsets():
            share = part.bytes_per_row // spec.heads
            if not shape.head_major:
                whole = _read_part(extent.run, part, base, extent.row, last)
                parts.append(whole[:, head * share : (head + 1) * share])
                continue
            data = np.empty((last - extent.row, share), np.uint8)
            piece = list(shape.part_pieces(part, base, extent.row, last))[head]
            pread_into(file.fd, as_bytes(data), origin + piece.offset)
            parts.append(data)
        joined = np.concatenate(parts, axis=1)
        result[extent.start - start : extent.end - start] = joined
    return result
