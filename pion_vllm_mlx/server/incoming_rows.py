"""From the argument of a V.STOREBATCH to a run in its place.

What arrives is in the wire's encoding and layout; what is stored is in the layer's
format. Where both are the same, a long argument was received straight into its
segment (the layout is guessed before the options behind the blob are known) and
nothing is left to do. Otherwise rows are converted a window at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import f16_to
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.inbound import MemoryInbound, RefusedBulk, Spool, StreamInbound
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.files import pread_into
from pion_vllm_mlx.server.store.index import group_of
from pion_vllm_mlx.server.store.records import Rows
from pion_vllm_mlx.server.store.riding import rides_in_log
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES, RunWriter, as_bytes
from pion_vllm_mlx.server.store.segment import Region
from pion_vllm_mlx.server.store.shapes import SPACED_BYTES, LayerSpec, RunShape
from pion_vllm_mlx.server.store.space import disk_error
from pion_vllm_mlx.server.store.store import Store
from pion_vllm_mlx.server.upload_room import UploadRoom
from pion_vllm_mlx.wire.resp import Arg, BulkTarget

WHERE = "V.STOREBATCH"
#: rows that come as they are stored are written while more arrive, from here on.
STREAM_BYTES = 1 << 20
#: so many are converted in no time, whatever the format.
_FEW_VALUES = 4096


@dataclass(frozen=True)
class RowsRequest:
    """The words of a V.STOREBATCH: which rows, in which encoding and layout they come."""

    sid: bytes
    layer: int
    start: int
    rows: int
    encoding: str = "F32"
    head_major: bool = False
    crc: int | None = None

    def wire_bytes(self, spec: LayerSpec) -> int:
        """How long the blob has to be."""
        if self.encoding == "STORED":
            return self.rows * spec.row_bytes
        return self.rows * spec.width * (2 if self.encoding == "F16" else 4)

    def wrong_size(self, spec: LayerSpec, nbytes: int) -> CommandError:
        """Why a blob of another length is refused, and what was expected in it."""
        names = {"F32": "fp32, no FMT", "F16": "fp16, FMT F16"}
        wanted = names.get(self.encoding, f"{spec.fmt}, FMT STORED")
        return CommandError(
            f"{WHERE}: blob size {nbytes} instead of {self.wire_bytes(spec)}: "
            f"{self.rows} rows of {spec.width} values ({wanted})"
        )


def parse_place(args: list[Arg]) -> RowsRequest:
    """The four words in front of the blob. Raises CommandError."""
    return RowsRequest(
        arguments.sid(args[1]),
        arguments.integer(args[2], "layer", 0, arguments.MAX_TOKENS),
        arguments.integer(args[3], "start", 0, arguments.MAX_TOKENS),
        arguments.integer(args[4], "n", 0, arguments.MAX_TOKENS),
    )


def parse(args: list[Arg]) -> RowsRequest:
    """All words of the command. Raises CommandError."""
    place = parse_place(args)
    given = arguments.options(args[6:], {"FMT": 1, "LAYOUT": 1, "CRC": 1}, WHERE)
    encoding = "F32"
    if "FMT" in given:
        encoding = arguments.choice(given["FMT"][0], ("F16", "STORED"), f"{WHERE}: FMT")
    head_major = arguments.head_major(given, encoding, WHERE)
    crc = arguments.integer(given["CRC"][0], "CRC", 0, 0xFFFFFFFF) if "CRC" in given else None
    return RowsRequest(place.sid, place.layer, place.start, place.rows, encoding, head_major, crc)


class RowsInbound(StreamInbound):
    """A long blob, received into a segment region or, when that cannot fit, a spool."""

    writer: RunWriter | None = None
    region: Region | None = None
    spool: Spool | None = None


def open_rows(context: Context, args: list[Arg], length: int) -> BulkTarget:
    """Where the blob of the V.STOREBATCH being received goes. Raises CommandError."""
    if len(args) != 5:
        raise CommandError("argument is too long")
    request = parse_place(args)
    session = context.session(request.sid, WHERE)
    spec = session.spec(request.layer)
    pool, when_room = context.server.pool, context.when_room
    as_stored = length == request.rows * spec.row_bytes
    if length <= (STREAM_BYTES if as_stored else WINDOW_BYTES):
        return MemoryInbound(length, pool, when_room)
    store = context.store
    if as_stored:
        shape = RunShape.spaced(
            spec, request.rows, spec.head_major() and session.expects_head_major
        )
        region = store.space.reserve(group_of(request.sid), shape.file_bytes, len(spec.parts()))
        writer = RunWriter(shape, region)
        unit = writer.window_unit
        inbound = RowsInbound(length, unit, writer.write, store.io, pool, when_room)
        inbound.writer, inbound.region = writer, region
        inbound.abandon = lambda: store.space.release(region)
        inbound.room = UploadRoom(store, pool, when_room)
        return inbound
    if length not in (request.rows * spec.width * 2, request.rows * spec.width * 4):
        raise CommandError(f"{WHERE}: blob size")
    spool = Spool(store.segments.path)
    inbound = RowsInbound(length, 1, spool.write, store.io, pool, when_room)
    inbound.spool = spool
    inbound.abandon = spool.close
    return inbound


@dataclass
class StoredRows:
    """A run that waits for its record; nothing when ``shape`` is None.

    It is in its place, or in ``blob``: then its record brings it there, into the log or, when
    there is a region, the segment.
    """

    request: RowsRequest
    shape: RunShape | None = None
    writer: RunWriter | None = None
    region: Region | None = None
    blob: bytearray | None = None

    def record(self) -> Rows:
        assert self.shape is not None and self.writer is not None
        request, region = self.request, self.region
        return Rows(
            request.sid,
            request.layer,
            request.start,
            self.shape.rows,
            self.shape.head_major,
            self.shape.padded,
            self.writer.crc,
            self.writer.stream_crc,
            region.segment.name if region else "",
            region.offset if region else 0,
            bytes(self.blob) if self.blob is not None else b"",
        )

    def finish(self, store: Store, applied: bool) -> None:
        """The record is applied, or the command was refused: the region's writer is done."""
        if self.region is not None:
            store.space.release(self.region, applied)


async def store_rows(context: Context, args: list[Arg]) -> StoredRows:
    """Check the command, wait for its blob and put the rows in their place."""
    request = parse(args)
    session = context.session(request.sid, WHERE)
    spec = session.spec(request.layer)
    blob = args[5]
    if blob_length(blob) != request.wire_bytes(spec):
        raise request.wrong_size(spec, blob_length(blob))
    if request.start + request.rows > arguments.MAX_TOKENS:
        raise CommandError(f"{WHERE}: rows end beyond {arguments.MAX_TOKENS}")
    if request.head_major and not spec.head_major():
        raise CommandError(f"{WHERE}: LAYOUT HND needs HEADS and a format that can be cut at heads")
    if isinstance(blob, RefusedBulk):
        raise blob.reason
    if request.rows == 0 or spec.row_bytes == 0:
        return StoredRows(request)
    session.expects_head_major = request.head_major
    if isinstance(blob, RowsInbound):
        await blob.wait()
        stored = _received_in_place(request, spec, blob)
        if stored is not None:
            await context.store.make_room(0)
            return stored
    return await _convert(context, request, spec, blob)


def blob_length(blob: Arg) -> int:
    return len(blob) if isinstance(blob, bytes) else blob.length


def _received_in_place(
    request: RowsRequest, spec: LayerSpec, blob: RowsInbound
) -> StoredRows | None:
    """The run, when the guess at its layout was right, or does not matter."""
    writer = blob.writer
    if writer is None or not _comes_as_stored(request.encoding, spec):
        return None
    shape = writer.shape
    if shape.spec != spec:
        return None
    if shape.head_major != request.head_major and spec.heads != 1:
        if shape.head_major or len(spec.parts()) > 1:
            return None
        # a stream without gaps is what a dense run of the other layout is, too
        shape = RunShape.dense(spec, request.rows, request.head_major)
    _check_crc(request, writer.stream_crc)
    return StoredRows(request, shape, writer, blob.region)


def _comes_as_stored(encoding: str, spec: LayerSpec) -> bool:
    """Whether the bytes of a wire encoding are the stored bytes."""
    return encoding == "STORED" or (encoding, spec.fmt) in (("F16", "fp16"), ("F32", "fp32"))


def _check_crc(request: RowsRequest, crc: int) -> None:
    if request.crc is not None and request.crc != crc:
        raise CommandError(f"{WHERE}: checksum of the blob is wrong")


async def _convert(
    context: Context, request: RowsRequest, spec: LayerSpec, blob: Arg
) -> StoredRows:
    """Write the rows from memory, a spool or a wrong place into their place."""
    store = context.store
    if isinstance(blob, RowsInbound) and blob.region is not None and len(spec.parts()) == 1:
        dense = RunShape.dense(spec, request.rows, request.head_major)
        # Where they are is large enough, and no row moves towards the end: each window
        # has been read before anything is written over it.
        stored = StoredRows(request, dense, RunWriter(dense, blob.region), blob.region)
    else:
        stored = await _with_room(store, request, spec)
    source = _source(blob)
    try:
        if stored.blob is not None and _takes_no_time(request, spec, blob):
            _write(request, spec, source, stored.writer)
        else:
            await store.run(lambda: _write(request, spec, source, stored.writer))
    except (CommandError, OSError) as error:
        stored.finish(store, False)
        raise disk_error(error) if isinstance(error, OSError) else error from None
    if stored.region is not None and stored.shape is not None:
        store.space.shorten(stored.region, stored.shape.file_bytes)
    return stored


async def _with_room(store: Store, request: RowsRequest, spec: LayerSpec) -> StoredRows:
    """A place for the rows: in a record of the log, or in a segment. Raises CommandError."""
    shape = RunShape.spaced(spec, request.rows, request.head_major)
    group, parts = group_of(request.sid), len(spec.parts())
    if shape.data_bytes >= SPACED_BYTES:
        long = await store.reserve(group, shape.file_bytes, parts)
        return StoredRows(request, shape, RunWriter(shape, long), long)
    await store.make_room_in_log(shape.file_bytes)
    region: Region | None = None
    if not _rides_in_log(store, request.sid, shape.data_bytes):
        region = store.space.reserve(group, shape.file_bytes, parts)
    # written with the record, in one trip to a thread: that costs more than so few bytes
    buffer = bytearray(shape.file_bytes)
    return StoredRows(request, shape, RunWriter(shape, buffer), region, buffer)


def _rides_in_log(store: Store, sid: bytes, nbytes: int) -> bool:
    session = store.state.sessions.get(sid)
    layers = session.layers.values() if session is not None else ()
    return rides_in_log(store.config, nbytes, sum(len(rows.extents) for rows in layers))


def _takes_no_time(request: RowsRequest, spec: LayerSpec, blob: Arg) -> bool:
    """Whether the event loop may put rows into memory: few, or a copy of what is there."""
    if not isinstance(blob, (bytes, MemoryInbound)):
        return False
    few = request.rows * spec.width <= _FEW_VALUES
    return few or _comes_as_stored(request.encoding, spec)


Source = Callable[[int, int], memoryview]


def _source(blob: Arg) -> Source:
    """A function that reads ``(offset, length)`` of the blob as it came."""
    if isinstance(blob, (bytes, MemoryInbound)):
        view = memoryview(blob) if isinstance(blob, bytes) else blob.view
        return lambda offset, length: view[offset : offset + length]
    if isinstance(blob, RowsInbound) and blob.spool is not None:
        return blob.spool.read
    if isinstance(blob, RowsInbound) and blob.region is not None and blob.writer is not None:
        return _read_back(blob.region, blob.writer.shape)
    raise CommandError("argument is too long")


def _read_back(region: Region, shape: RunShape) -> Source:
    """Reads a run that was received under a wrong guess, as the stream it came as.

    The stream is a row after the other, of a head when head-major; a format of several
    parts keeps each part apart.
    """
    heads = shape.spec.heads if shape.head_major else 1
    unit = shape.spec.row_bytes // heads
    file = region.segment.file

    def units(head: int, row: int, count: int) -> NDArray[np.uint8]:
        columns = []
        for part, base in shape.part_offsets():
            column = np.empty((count, part.bytes_per_row // heads), np.uint8)
            piece = list(shape.part_pieces(part, base, row, row + count))[head]
            pread_into(file.fd, as_bytes(column), region.offset + piece.offset)
            columns.append(column)
        return np.concatenate(columns, axis=1)

    def read(offset: int, length: int) -> memoryview:
        at, end = offset // unit, -(-(offset + length) // unit)
        skipped = offset - at * unit
        runs = []
        while at < end:
            head, row = divmod(at, shape.rows)
            count = min(shape.rows - row, end - at)
            runs.append(units(head, row, count))
            at += count
        return as_bytes(np.concatenate(runs))[skipped : skipped + length]

    return read


def _windows(total: int, unit: int) -> Iterator[tuple[int, int]]:
    step = max(unit, WINDOW_BYTES - WINDOW_BYTES % unit)
    for offset in range(0, total, step):
        yield offset, min(step, total - offset)


def _write(request: RowsRequest, spec: LayerSpec, read: Source, writer: RunWriter | None) -> None:
    """Move every row; checks the sender's checksum on the way. May block."""
    assert writer is not None
    total = request.wire_bytes(spec)
    crc = 0
    stored = request.encoding == "STORED"
    row_bytes = total // request.rows
    for offset, length in _windows(total, writer.window_unit if stored else row_bytes):
        window = read(offset, length)
        if not stored:
            crc = crc32c(window, crc) if request.crc is not None else 0
            window = _encoded(request.encoding, spec, window, length // row_bytes)
        writer.write(window)
    _check_crc(request, writer.stream_crc if stored else crc)


def _encoded(encoding: str, spec: LayerSpec, window: memoryview, rows: int) -> memoryview:
    """A window of float rows as wire rows of the layer's format."""
    if encoding == "F16":
        wire = f16_to(spec.format, np.frombuffer(window, np.uint8).reshape(rows, -1))
    else:
        wire = spec.format.encode(np.frombuffer(window, "<f4").reshape(rows, spec.width))
    return as_bytes(wire)
