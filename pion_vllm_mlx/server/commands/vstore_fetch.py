"""V.FETCH: rows by token id, by range, or all layers at once.

What is asked for as it is stored is sent from the files; what is asked for in
another encoding or layout is read and converted a window at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.outbound import (
    GATHER_BYTES,
    Chunk,
    Computed,
    FileRange,
    Stream,
    Window,
)
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.files import FileHandle, pread_into
from pion_vllm_mlx.server.store.index import LayerRows, Session, place_file
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES, as_bytes, read_head, read_layer
from pion_vllm_mlx.server.store.verifying import verified
from pion_vllm_mlx.wire.resp import Arg, array_header, nil

WHERE = "V.FETCH"
MAX_REPLY = 1 << 30
#: short pieces are read together into so much memory.
_READ_BYTES = 256 << 10


class _Place(NamedTuple):
    """Rows ``[start, end)``: ``first`` is the offset of head 0's, ``stride`` from head to head."""

    start: int
    end: int
    file: FileHandle
    first: int
    stride: int


@dataclass(frozen=True)
class Wanted:
    """Rows ``[start, end)``, their encoding (F32, NATIVE, STORED) and layout."""

    start: int
    end: int
    encoding: str = "F32"
    head_major: bool = False

    def value_bytes(self, rows: LayerRows) -> int:
        """Bytes of one row in the wanted encoding."""
        spec = rows.spec
        if self.encoding == "STORED" or (self.encoding == "NATIVE" and spec.fmt == "fp16"):
            return spec.row_bytes
        return spec.width * 4

    def stored(self, rows: LayerRows) -> bool:
        """Whether the wanted bytes are the stored bytes."""
        fmt = rows.spec.fmt
        return (
            self.encoding == "STORED"
            or fmt == "fp32"
            or (self.encoding == "NATIVE" and fmt == "fp16")
        )


def _places(rows: LayerRows, wanted: Wanted) -> Iterator[_Place]:
    """Where the wanted rows lie that are stored as they are wanted. Raises OSError."""
    (part,) = rows.spec.parts()
    heads = rows.spec.heads if wanted.head_major else 1
    row = part.bytes_per_row // heads
    for extent in rows.covering(wanted.start, wanted.end):
        place, shape = extent.run.place, extent.run.shape
        first = place.offset + extent.row * row
        yield _Place(extent.start, extent.end, place_file(place), first, shape.padded * row)


def _pieces(rows: LayerRows, wanted: Wanted) -> Iterator[FileRange | bytes]:
    """The wanted bytes as they lie in files, head by head, with zeros in the gaps."""
    (part,) = rows.spec.parts()
    heads = rows.spec.heads if wanted.head_major else 1
    row = part.bytes_per_row // heads
    places = list(_places(rows, wanted))
    for head in range(heads):
        at = wanted.start
        for start, end, file, first, stride in places:
            yield from _zeros((start - at) * row)
            yield FileRange(file, first + head * stride, (end - start) * row)
            at = end
        yield from _zeros((wanted.end - at) * row)


def _zeros(length: int) -> Iterator[bytes]:
    for at in range(0, length, GATHER_BYTES):
        yield bytes(min(GATHER_BYTES, length - at))


def _gathered(rows: LayerRows, wanted: Wanted) -> Iterator[Window | FileRange]:
    """The wanted bytes: long pieces where they lie, short ones read into one piece of memory."""
    window, filled = memoryview(b""), 0
    for piece in _pieces(rows, wanted):
        length = len(piece) if isinstance(piece, bytes) else piece.length
        if filled + length > len(window) or length >= GATHER_BYTES:
            if filled:
                yield window[:filled]
            window, filled = memoryview(b""), 0
        if length >= GATHER_BYTES:
            yield piece
            continue
        if not window:
            window = np.empty(_READ_BYTES, np.uint8).data
        into = window[filled : filled + length]
        if isinstance(piece, bytes):
            into[:] = piece
        else:
            pread_into(piece.file.fd, into, piece.offset)
        filled += length
    if filled:
        yield window[:filled]


def _as_stored(rows: LayerRows, wanted: Wanted) -> bool:
    """Whether the files hold the wanted bytes in the wanted order."""
    if not wanted.stored(rows) or len(rows.spec.parts()) > 1:
        return False
    return rows.spec.heads == 1 or all(
        extent.run.shape.head_major == wanted.head_major
        for extent in rows.covering(wanted.start, wanted.end)
    )


def _converted(rows: LayerRows, wanted: Wanted) -> Iterator[memoryview]:
    """The wanted bytes, a window of rows at a time. Reads the disk."""
    step = max(1, WINDOW_BYTES // max(1, rows.spec.width * 4, rows.spec.row_bytes))
    windows = [
        (first, min(first + step, wanted.end)) for first in range(wanted.start, wanted.end, step)
    ]
    if wanted.head_major:
        for head in range(rows.spec.heads):
            for first, last in windows:
                yield as_bytes(read_head(rows, head, first, last))
        return
    for first, last in windows:
        data = read_layer(rows, first, last)
        if not wanted.stored(rows):
            data = rows.spec.format.decode(data).view(np.uint8)
        yield as_bytes(data)


def layer_chunks(rows: LayerRows, wanted: Wanted) -> list[Chunk]:
    """One layer's bulk string in pieces. Raises CommandError when it cannot be given so."""
    spec = rows.spec
    if wanted.head_major and not spec.head_major():
        raise CommandError(f"{WHERE}: LAYOUT HND needs HEADS and a format that can be cut at heads")
    if spec.fmt.startswith("raw:") and wanted.encoding != "STORED":
        raise CommandError(f"{WHERE}: opaque rows need FMT STORED")
    length = (wanted.end - wanted.start) * wanted.value_bytes(rows)
    # sent while others write: all of it is of this moment
    then = rows.as_now(wanted.start, wanted.end)
    make = _gathered if _as_stored(rows, wanted) else _converted
    return [Computed(length, lambda: make(then, wanted))]


def _wanted(args: list[Arg], options: list[Arg]) -> Wanted:
    start = arguments.integer(args[0], "start", 0, arguments.MAX_TOKENS)
    end = arguments.integer(args[1], "end", 0, arguments.MAX_TOKENS)
    if end <= start:
        raise CommandError(f"{WHERE}: end must exceed start")
    given = arguments.options(options, {"FMT": 1, "LAYOUT": 1}, WHERE)
    encoding = "F32"
    if "FMT" in given:
        encoding = arguments.choice(given["FMT"][0], ("NATIVE", "STORED"), f"{WHERE}: FMT")
    return Wanted(start, end, encoding, arguments.head_major(given, encoding, WHERE))


def _check_size(layers: list[LayerRows | None], wanted: Wanted) -> None:
    count = wanted.end - wanted.start
    total = sum(count * wanted.value_bytes(rows) for rows in layers if rows is not None)
    if total > MAX_REPLY:
        raise CommandError(f"{WHERE}: the reply would be larger than {MAX_REPLY} bytes")


async def _reply(
    context: Context, session: Session, numbers: list[int], wanted: Wanted, one: bool
) -> Reply:
    layers = [session.layers.get(number) for number in numbers]
    _check_size(layers, wanted)
    stream = Stream()
    pieces = [None if rows is None else layer_chunks(rows, wanted) for rows in layers]
    if not await verified(context.store, [session]):
        raise CommandError(f"{WHERE}: session not found (its rows did not verify)")
    if context.state.sessions.get(session.sid) is not session:
        raise CommandError(f"{WHERE}: session not found")
    context.state.touch(session)
    context.store.counters.fetches += 1
    if not one:
        stream.chunks.append(array_header(len(layers)))
    for chunks in pieces:
        if chunks is None:
            stream.chunks.append(nil(context.client.proto))
        else:
            stream.bulk(chunks)
    return stream


async def _by_id(context: Context, session: Session, layer: int, ids: list[int]) -> Reply:
    """Float32 rows of the given tokens; nil when none of them is stored."""
    stored = session.layers.get(layer)
    # sent while others write: all of it is of this moment
    rows = None if stored is None else stored.as_now(min(ids), max(ids) + 1)
    if rows is None or not any(map(rows.shows, ids)):
        context.state.touch(session)
        context.store.counters.fetches += 1
        return None
    if len(ids) * rows.spec.width * 4 > MAX_REPLY:
        raise CommandError(f"{WHERE}: the reply would be larger than {MAX_REPLY} bytes")
    if rows.spec.fmt.startswith("raw:"):
        raise CommandError(f"{WHERE}: opaque rows need FMT STORED")
    if not await verified(context.store, [session]):
        raise CommandError(f"{WHERE}: session not found (its rows did not verify)")
    if context.state.sessions.get(session.sid) is not session:
        raise CommandError(f"{WHERE}: session not found")

    def windows() -> Iterator[memoryview]:
        for token in ids:
            data = rows.spec.format.decode(read_layer(rows, token, token + 1))
            yield as_bytes(data)

    context.state.touch(session)
    context.store.counters.fetches += 1
    stream = Stream()
    stream.bulk([Computed(len(ids) * rows.spec.width * 4, windows)])
    return stream


@command(
    "V.FETCH",
    -4,
    "Rows of a session by token id, of a range, or of all layers; nil for a layer without rows.",
    syntax="sid (layer token_id...|layer RANGE start end [FMT (NATIVE|STORED)] [LAYOUT "
    "(HND|NHD)]|BATCH start end [n_layers] [FMT (NATIVE|STORED)] [LAYOUT (HND|NHD)])",
    extensions=("STORED", "LAYOUT"),
    kvcache=True,
    home="session",
    keys=(1, 1),
    tenant=True,
)
async def v_fetch(context: Context, args: list[Arg]) -> Reply:
    session = context.session(arguments.sid(args[1]), WHERE)
    form = arguments.word(args[2]).upper()
    if form == b"BATCH":
        return await _batch(context, session, args)
    layer = arguments.integer(args[2], "layer", 0, arguments.MAX_TOKENS)
    session.spec(layer)
    if arguments.word(args[3]).upper() == b"RANGE":
        if len(args) < 6:
            raise CommandError(f"{WHERE}: RANGE needs start and end")
        wanted = _wanted(args[4:6], args[6:])
        return await _reply(context, session, [layer], wanted, one=True)
    ids = [arguments.integer(arg, "token id", 0, arguments.MAX_TOKENS) for arg in args[3:]]
    return await _by_id(context, session, layer, ids)


async def _batch(context: Context, session: Session, args: list[Arg]) -> Reply:
    if len(args) < 5:
        raise CommandError(f"{WHERE}: BATCH needs start and end")
    rest = args[5:]
    count = session.layer_count()
    if rest and arguments.word(rest[0]).isdigit():
        count = arguments.integer(rest[0], "num_layers", 1, 1024)
        rest = rest[1:]
    wanted = _wanted(args[3:5], rest)
    return await _reply(context, session, list(range(count)), wanted, one=False)
