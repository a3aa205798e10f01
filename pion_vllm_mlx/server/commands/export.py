"""V.EXPORT: both sides of a prefix as one safetensors file for a client on this host."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import Format, Part, get_format, to_f16, transpose_rows
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.session import Context, Export, Server, ServerConfig
from pion_vllm_mlx.server.store.files import DIRECTORY_MODE, TEMPORARY, FileHandle, pwrite_all
from pion_vllm_mlx.server.store.index import LayerRows, Session
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES, as_bytes, read_layer
from pion_vllm_mlx.server.store.space import disk_error
from pion_vllm_mlx.server.store.verifying import verified
from pion_vllm_mlx.wire.resp import Arg

WHERE = "V.EXPORT"


def export_folder(config: ServerConfig) -> Path:
    """Where exports go; several servers may share a chosen folder."""
    return config.export_dir or config.folder / "pion-export"


def export_prefix(config: ServerConfig) -> str:
    """How the names of the exports of this worker of a data folder begin."""
    folder = hashlib.sha256(os.fsencode(config.folder)).hexdigest()[:12]
    return f"export-{folder}-{config.worker}-"


def remove_old_exports(server: Server) -> None:
    """Delete what an earlier process on this data folder exported."""
    for path in export_folder(server.config).glob(export_prefix(server.config) + "*"):
        server.delete_export(path)


@dataclass(frozen=True)
class ExportRequest:
    """Layers ``[0, layers)`` of two sessions, rows ``[start, end)``, cut at heads."""

    sessions: tuple[Session, Session]
    start: int
    end: int
    layers: int
    heads: int
    head_dim: int
    stored: bool

    @property
    def count(self) -> int:
        """Rows of every tensor."""
        return self.end - self.start

    def kind(self, rows: LayerRows) -> Format:
        """The format in which one layer's rows are written."""
        return rows.spec.format if self.stored else get_format("fp16")

    def parts(self, rows: LayerRows) -> tuple[Part, ...]:
        """The tensors of one layer's side, for one head."""
        return self.kind(rows).per_head(self.heads).parts(rows.spec.width // self.heads)

    def tensors(self) -> Iterator[tuple[str, LayerRows]]:
        for layer in range(self.layers):
            for side, session in zip("kv", self.sessions, strict=True):
                yield f"{side}.{layer}", session.layers[layer]


def _request(context: Context, args: list[Arg]) -> ExportRequest:
    keys, values = (context.session(arguments.sid(arg), WHERE) for arg in args[1:3])
    start = arguments.integer(args[3], "start", 0, arguments.MAX_TOKENS)
    end = arguments.integer(args[4], "end", 0, arguments.MAX_TOKENS)
    layers = arguments.integer(args[5], "n_layers", 1, 1024)
    heads = arguments.integer(args[6], "n_heads", 1, 1024)
    head_dim = arguments.integer(args[7], "head_dim", 1, 65536)
    given = arguments.options(args[8:], {"FMT": 1}, WHERE)
    stored = bool(given) and bool(arguments.choice(given["FMT"][0], ("STORED",), f"{WHERE}: FMT"))
    if end <= start:
        raise CommandError(f"{WHERE}: end must exceed start")
    request = ExportRequest((keys, values), start, end, layers, heads, head_dim, stored)
    for session in request.sessions:
        for layer in range(layers):
            _check(session, layer, request)
    return request


def _version(request: ExportRequest) -> tuple[int, ...]:
    """Runs of everything that is exported, and how far they show: of one content only."""
    runs = [run for _, rows in request.tensors() for run in rows.runs()]
    return tuple(number for run in runs for number in (run.run_id, run.shown))


def _check(session: Session, layer: int, request: ExportRequest) -> None:
    rows = session.layers.get(layer)
    if rows is None:
        raise CommandError(f"{WHERE}: layer {layer} has no rows")
    if rows.spec.width != request.heads * request.head_dim:
        raise CommandError(f"{WHERE}: heads x head_dim is not the stored width {rows.spec.width}")
    if request.end > rows.count:
        raise CommandError(f"{WHERE}: layer {layer} has only {rows.count} rows")
    if rows.spec.fmt.startswith("raw:") and not request.stored:
        raise CommandError(f"{WHERE}: opaque rows need FMT STORED")
    if not request.kind(rows).head_major(rows.spec.width, request.heads):
        raise CommandError(f"{WHERE}: {rows.spec.fmt} rows cannot be cut at heads; leave FMT away")


def _write_layer(fd: int, at: int, request: ExportRequest, rows: LayerRows) -> int:
    """Write the tensors ``[1, H, n, D]`` of one layer's side from ``at`` on; where they end.

    Reads and writes a window of rows at a time.
    """
    heads, width = request.heads, rows.spec.width
    kind = request.kind(rows)
    parts = request.parts(rows)
    step = max(1, WINDOW_BYTES // (max(width * 4, rows.spec.row_bytes)))
    for first in range(request.start, request.end, step):
        wire = read_layer(rows, first, min(first + step, request.end))
        if not request.stored:
            wire = to_f16(rows.spec.format, wire)
        by_head = transpose_rows(kind, wire, width, heads, to_head_major=True)
        base, column = at, 0
        for part in parts:
            piece = by_head[:, :, column : column + part.bytes_per_row]
            for head in range(heads):
                row = head * request.count + first - request.start
                pwrite_all(fd, as_bytes(piece[head]), base + row * part.bytes_per_row)
            base += heads * request.count * part.bytes_per_row
            column += part.bytes_per_row
    return at + heads * request.count * sum(part.bytes_per_row for part in parts)


def _header(request: ExportRequest) -> tuple[bytes, int]:
    """The safetensors header and the size of the data behind it."""
    entries, at = {}, 0
    count = request.count
    for name, rows in request.tensors():
        for part in request.parts(rows):
            length = request.heads * count * part.bytes_per_row
            entries[name + part.suffix] = {
                "dtype": part.dtype,
                "shape": [1, request.heads, count, part.items_per_row],
                "data_offsets": [at, at + length],
            }
            at += length
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text, at


def _size_of_file(request: ExportRequest) -> tuple[int, int]:
    """Bytes of the header and of the data of an export."""
    header, nbytes = _header(request)
    return len(header), nbytes


def _file_crc(path: Path) -> int | None:
    """The checksum of a whole file, None when it cannot be read. May block."""
    crc = 0
    try:
        with path.open("rb", buffering=0) as file:
            while window := file.read(WINDOW_BYTES):
                crc = crc32c(window, crc)
    except OSError:
        return None
    return crc


def _write(request: ExportRequest, path: Path) -> int:
    """Write the file whole, then give it its name; its checksum. Raises OSError."""
    path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    temporary = path.with_suffix(TEMPORARY)
    file = FileHandle(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        header, _ = _header(request)
        pwrite_all(file.fd, header, 0)
        at = len(header)
        for _, rows in request.tensors():
            at = _write_layer(file.fd, at, request, rows)
        crc = _file_crc(temporary)
        if crc is None:
            raise OSError("the exported file cannot be read back")
    except (OSError, CommandError):
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    return crc


@command(
    "V.EXPORT",
    -8,
    "Writes rows of both sides to a safetensors file; its path, for clients on this host.",
    syntax="k_sid v_sid start end n_layers n_heads head_dim [FMT STORED]",
    extensions=("FMT",),
    kvcache=True,
    home="session",
    keys=(1, 2),
)
async def v_export(context: Context, args: list[Arg]) -> Reply:
    if not context.client.local:
        raise CommandError(f"{WHERE} is for clients on this host")
    request = _request(context, args)
    key = tuple(arguments.word(arg) for arg in args[1:])
    exports = context.server.exports
    version = _version(request)
    known = exports.get(key)
    if known is not None and known.version == version:
        if await context.store.run(lambda: _file_crc(known.path)) == known.crc:
            return str(known.path)
    if not await verified(context.store, request.sessions):
        raise CommandError(f"{WHERE}: session not found (its rows did not verify)")
    folder = export_folder(context.server.config)
    name = f"{export_prefix(context.server.config)}{secrets.token_hex(8)}.safetensors"
    path = folder.resolve() / name
    await context.store.make_room(sum(_size_of_file(request)))
    try:
        crc = await context.store.run(lambda: _write(request, path))
    except OSError as error:
        raise disk_error(error) from error
    gone = any(context.state.sessions.get(s.sid) is not s for s in request.sessions)
    if gone or _version(request) != version:
        context.server.delete_export(path)
        raise CommandError(f"{WHERE}: the session changed while it was exported")
    stale = exports.get(key)
    if stale is not None:
        context.server.delete_export(stale.path)
    exports[key] = Export(path, version, crc)
    context.store.space.use.look_again()
    return str(path)
