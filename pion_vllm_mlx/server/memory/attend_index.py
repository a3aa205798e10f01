"""Value rows found by the L2 distance of their keys: sessions, layers, blocks of rows.

Keys stay float32, so that the search is exact; values are kept in a storage format and
decoded for the rows of an answer. A layer's rows lie in blocks that are never moved:
what a search has been given stays as it is while others append.

Values of the first and of the newest ``boundary`` layers are kept in the boundary
format. A newest layer that later layers push inwards is converted when it is next used.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import Format, get_format, resolve
from pion_vllm_mlx.server.memory.nearest import Floats, nearest, squared_norms

MAX_SESSIONS = 256
#: what FINALIZE leaves alone, and the longest block that appends share.
_BLOCK_BYTES = 8 << 20
_FIRST_BLOCK_ROWS = 64
_HYBRID = "bf16_rope_fp8_body"

Bytes = NDArray[np.uint8]


class NotStored(CommandError):
    """There is no such session or layer."""


@dataclass(frozen=True)
class IndexShape:
    """What ATTEND.CREATE says: widths in values, formats of the values by place."""

    key_dim: int
    value_dim: int
    values: Format
    boundary: int
    boundary_values: Format
    rope: int = 0

    def is_like(self, other: IndexShape) -> bool:
        """Whether the same command made both."""
        return self._key() == other._key()

    def _key(self) -> tuple[object, ...]:
        names = self.values.name, self.boundary_values.name
        return self.key_dim, self.value_dim, self.boundary, self.rope, names

    def format_of(self, layer: int, num_layers: int) -> Format:
        """How a layer's values are kept while the session has ``num_layers`` layers."""
        outer = layer < self.boundary or layer >= num_layers - self.boundary
        return self.boundary_values if outer else self.values


def value_format(name: str, width: int, rope: int) -> Format:
    """The format of values of a width; int8 where it does not fit. Raises CommandError."""
    name = name.lower()
    if name == _HYBRID:
        fits = 0 < rope < width and (width - rope) % 32 == 0
        return get_format(f"{_HYBRID}:{rope}") if fits else get_format("int8")
    if ":" in name:
        raise CommandError(f"unknown format '{name[:64]}'")
    return resolve(name, width)


class Block:
    """Up to ``capacity`` rows: keys ``[n, K]``, squared norms ``[n]``, values ``[n, bytes]``."""

    def __init__(self, capacity: int, key_dim: int, value_bytes: int) -> None:
        self.keys = np.empty((capacity, key_dim), np.float32)
        self.norms = np.empty(capacity, np.float32)
        self.values = np.empty((capacity, value_bytes), np.uint8)
        self.count = 0

    def append(self, keys: Floats, values: Bytes) -> None:
        """Fill the next rows; readers of the rows before do not notice."""
        end = self.count + len(keys)
        self.keys[self.count : end] = keys
        self.norms[self.count : end] = squared_norms(keys)
        self.values[self.count : end] = values
        self.count = end

    def resized(self, capacity: int) -> Block:
        """A copy with another capacity."""
        block = Block(capacity, self.keys.shape[1], self.values.shape[1])
        block.append(self.keys[: self.count], self.values[: self.count])
        return block

    @property
    def room(self) -> int:
        return len(self.norms) - self.count


@dataclass(frozen=True)
class LayerView:
    """The rows of a layer at one moment; searched on any thread."""

    parts: tuple[tuple[Floats, Floats, Bytes], ...]
    format: Format
    value_dim: int

    def query(self, query: Floats, k: int) -> tuple[Floats, Floats]:
        """The ``min(k, n)`` value rows with the nearest keys, best first, and the distances."""
        rows, distances = nearest([(keys, norms) for keys, norms, _ in self.parts], query, k)
        wire = np.empty((len(rows), self.format.row_bytes(self.value_dim)), np.uint8)
        begin = 0
        for _, _, values in self.parts:
            inside = (rows >= begin) & (rows < begin + len(values))
            wire[inside] = values[rows[inside] - begin]
            begin += len(values)
        with np.errstate(over="ignore"):
            return self.format.decode(wire), distances.astype(np.float32)


class Layer:
    """Rows of one layer, all in one format."""

    def __init__(self, shape: IndexShape, kind: Format) -> None:
        self.shape = shape
        self.format = kind
        self.blocks: list[Block] = []
        self.count = 0
        self._stays = False

    def wants(self, kind: Format) -> bool:
        """Whether ``convert`` to that format has something to do."""
        return self.format is not kind and not self._stays

    def append(self, keys: Floats, values: Bytes) -> None:
        """Add rows behind the others; ``values`` are wire rows of the layer's format."""
        row_bytes = 4 * keys.shape[1] + values.shape[1]
        most = max(_FIRST_BLOCK_ROWS, _BLOCK_BYTES // row_bytes)
        at = 0
        while at < len(keys):
            left = len(keys) - at
            if not self.blocks or not self.blocks[-1].room:
                capacity = max(left, min(most, max(_FIRST_BLOCK_ROWS, self.count)))
                self.blocks.append(Block(capacity, keys.shape[1], values.shape[1]))
            block = self.blocks[-1]
            n = min(left, block.room)
            block.append(keys[at : at + n], values[at : at + n])
            at += n
        self.count += len(keys)

    def convert(self, kind: Format) -> None:
        """Keep the values in another format; where it cannot hold them they stay as they are."""
        width = self.shape.value_dim
        converted = []
        for block in self.blocks:
            new = Block(len(block.norms), self.shape.key_dim, kind.row_bytes(width))
            rows = self.format.decode(block.values[: block.count])
            try:
                new.append(block.keys[: block.count], kind.encode(rows))
            except CommandError:
                self._stays = True
                return
            converted.append(new)
        self.blocks, self.format = converted, kind

    def trim(self) -> None:
        """Give back the room for rows that are not there."""
        if self.blocks and self.blocks[-1].room:
            self.blocks[-1] = self.blocks[-1].resized(self.blocks[-1].count)

    def view(self) -> LayerView:
        parts = tuple(
            (block.keys[: block.count], block.norms[: block.count], block.values[: block.count])
            for block in self.blocks
        )
        return LayerView(parts, self.format, self.shape.value_dim)


@dataclass
class IndexSession:
    """One session. Whoever changes rows, or takes a view of them, holds ``lock``."""

    slot: int
    shape: IndexShape
    layers: dict[int, Layer] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_layers(self) -> int:
        return max(self.layers, default=-1) + 1

    @property
    def num_tokens(self) -> int:
        """Rows over all layers."""
        return sum(layer.count for layer in self.layers.values())

    @property
    def stored_bytes(self) -> int:
        shape, total = self.shape, 0
        for layer in list(self.layers.values()):
            row_bytes = 4 * shape.key_dim + layer.format.row_bytes(shape.value_dim)
            total += layer.count * row_bytes
        return total

    def check_rows(self, count: int, keys_bytes: int, values_bytes: int) -> None:
        """Raise CommandError unless both blobs have exactly the bytes of ``count`` rows."""
        for what, width, given in (
            ("keys", self.shape.key_dim, keys_bytes),
            ("values", self.shape.value_dim, values_bytes),
        ):
            if given != 4 * count * width:
                raise CommandError(
                    f"{what} must be {count} x {width} float32, {4 * count * width} bytes"
                )

    def check_query(self, layer: int, query_bytes: int) -> None:
        """Raise CommandError for a query of another width, NotStored for an empty layer."""
        if query_bytes != 4 * self.shape.key_dim:
            raise CommandError(f"query must be {self.shape.key_dim} float32")
        if layer not in self.layers:
            raise NotStored("layer not found")

    def store(self, layer_id: int, keys: Floats, values: Floats) -> None:
        """Append rows to a layer. Raises CommandError, then nothing has changed. Slow."""
        if not np.isfinite(keys).all():
            # it would be at no distance from any query, and so would what is sorted with it
            raise CommandError("keys must be finite numbers")
        num_layers = max(self.num_layers, layer_id + 1)
        kind = self.shape.format_of(layer_id, num_layers)
        layer = self.layers.get(layer_id) or Layer(self.shape, kind)
        if layer.wants(kind):
            layer.convert(kind)
        layer.append(keys, layer.format.encode(values))
        self.layers[layer_id] = layer

    def is_current(self, layer_id: int) -> bool:
        """Whether a layer's values are in the format of its place."""
        return not self.layers[layer_id].wants(self.shape.format_of(layer_id, self.num_layers))

    def bring_up_to_date(self, layer_id: int) -> None:
        """Convert a layer's values to the format of its place. Slow."""
        self.layers[layer_id].convert(self.shape.format_of(layer_id, self.num_layers))

    def finalize(self, layer_id: int) -> None:
        """A layer that is complete: nothing to build, only room to give back. Slow."""
        if layer_id in self.layers:
            if not self.is_current(layer_id):
                self.bring_up_to_date(layer_id)
            self.layers[layer_id].trim()


class AttendIndex:
    """All sessions; the least recently used goes when there are too many."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self.max_sessions = max_sessions
        self.sessions: OrderedDict[bytes, IndexSession] = OrderedDict()
        self.queries = 0
        self.evictions = 0
        #: which of the names, least recently used first, leaves
        self.victim: Callable[[Sequence[bytes]], bytes] = lambda names: names[0]

    def create(self, sid: bytes, shape: IndexShape) -> int:
        """The slot of a session; one of the same shape is kept. Raises CommandError."""
        session = self.sessions.get(sid)
        if session is not None and not session.shape.is_like(shape):
            if session.layers or session.lock.locked():
                raise CommandError("session already exists with other parameters")
            session.shape = shape
        if session is None:
            if len(self.sessions) >= self.max_sessions:
                del self.sessions[self.victim(list(self.sessions))]
                self.evictions += 1
            taken = {one.slot for one in self.sessions.values()}
            slot = next(n for n in range(self.max_sessions) if n not in taken)
            session = self.sessions[sid] = IndexSession(slot, shape)
        self.sessions.move_to_end(sid)
        return session.slot

    def session(self, sid: bytes) -> IndexSession:
        """A session, now the most recently used. Raises NotStored."""
        session = self.sessions.get(sid)
        if session is None:
            raise NotStored("session not found")
        self.sessions.move_to_end(sid)
        return session

    @property
    def stored_bytes(self) -> int:
        return sum(session.stored_bytes for session in self.sessions.values())
