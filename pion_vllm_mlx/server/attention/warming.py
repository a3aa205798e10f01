"""K/V of a layer from its rows in the V-store, in any storage format.

Letters: H KV heads, n rows, W = H*D values of a row. Rows travel token-major ``[n, W]``,
or head-major where they were stored so; attention wants ``[H, n, D]``. What is stored as it
is to be kept is copied as bits; the 4-bit groups of mlx4g32 may stay as they are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.formats import transpose_rows
from pion_vllm_mlx.formats.base import Bytes
from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.quantized import dequantized
from pion_vllm_mlx.server.attention.resident import Resident
from pion_vllm_mlx.server.store.files import pread_exactly
from pion_vllm_mlx.server.store.index import LayerRows, StateBlob, place_file
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES, read_head, read_layer
from pion_vllm_mlx.server.store.shapes import LayerSpec

#: how formats of one number a value lie in memory; numpy has no bfloat16.
_ITEMS = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2"}
_FOUR_BITS = "mlx4g32"
#: values that stay in a processor's cache while they are taken out of their groups.
_CACHED_VALUES = 128 << 10


@dataclass(frozen=True)
class LayerPair:
    """Both sides of one layer, as they were at one moment."""

    layer: int
    keys: LayerRows
    values: LayerRows

    @classmethod
    def of(cls, layer: int, keys: LayerRows, values: LayerRows) -> LayerPair:
        """A view that later stores do not change."""
        return cls(layer, _snapshot(keys), _snapshot(values))

    def is_current(self, keys: LayerRows, values: LayerRows) -> bool:
        """Whether the layer still shows the rows that this pair shows."""
        return keys.extents == self.keys.extents and values.extents == self.values.extents

    @property
    def tokens(self) -> int:
        """The smaller number of rows of the two sides."""
        return min(self.keys.count, self.values.count)

    @property
    def absent(self) -> int:
        """Rows before the last row that is missing on either side, it included."""
        return max(_begin_of_last_rows(side, self.tokens) for side in (self.keys, self.values))

    def fits(self, heads: int, dim: int) -> bool:
        """Whether rows of both sides are H x D values, for all that is known of them."""
        known = {spec.heads for spec in self._specs} - {0, heads}
        return self.has_width(heads * dim) and not known

    def has_width(self, width: int) -> bool:
        """Whether rows of both sides are so many values."""
        return all(s.width == width and not s.fmt.startswith("raw:") for s in self._specs)

    @property
    def _specs(self) -> tuple[LayerSpec, LayerSpec]:
        return self.keys.spec, self.values.spec

    def kept_bytes(self, dtype: str, dim: int) -> int:
        """What ``read`` will take, about."""
        rows = self.tokens - self.absent
        sides = (self.keys.spec, self.values.spec)
        if _in_groups(self, dtype, dim):
            return rows * sum(spec.row_bytes for spec in sides)
        return rows * sum(spec.width for spec in sides) * (4 if _kept(self, dtype) == "fp32" else 2)


def _snapshot(rows: LayerRows) -> LayerRows:
    return LayerRows(rows.spec, rows.count, list(rows.extents))


def _begin_of_last_rows(rows: LayerRows, end: int) -> int:
    """The first of the rows that reach up to ``end`` without a gap."""
    at = end
    for extent in reversed(list(rows.covering(0, end))):
        if extent.end < at:
            break
        at = extent.start
    return at


def _in_groups(pair: LayerPair, dtype: str, dim: int) -> bool:
    """Whether both sides stay in groups of 4 bits."""
    sides = (pair.keys.spec, pair.values.spec)
    return dtype == "stored" and dim % 32 == 0 and all(s.fmt == _FOUR_BITS for s in sides)


def _kept(pair: LayerPair, dtype: str) -> str:
    """The type in which K and V are kept: one for both."""
    if dtype != "stored":
        return dtype
    formats = {pair.keys.spec.fmt, pair.values.spec.fmt}
    one = formats.pop()
    return one if not formats and one in _ITEMS else "fp32"


def kept_as(pair: LayerPair, dtype: str, dim: int) -> str:
    """In what ``read`` keeps K and V: a type of values, or the format of groups."""
    return _FOUR_BITS if _in_groups(pair, dtype, dim) else _kept(pair, dtype)


def read(pair: LayerPair, heads: int, dim: int, dtype: str) -> Resident:
    """K/V of a layer as they stay. Reads the disk; raises OSError."""
    first, last = pair.absent, pair.tokens
    if _in_groups(pair, dtype, dim):
        sides = [_groups(side, heads, first, last) for side in (pair.keys, pair.values)]
        return Resident(api.Prefix(sides[0], sides[1], last - first), first)
    kept = _kept(pair, dtype)
    k, v = (_values(side, heads, first, last) for side in (pair.keys, pair.values))
    return Resident(api.dense_prefix(k, v, kept), first)


def _groups(rows: LayerRows, heads: int, first: int, last: int) -> api.Affine:
    """One side in groups of 32: codes, scales, biases ``[H, n, …]``."""
    wire = _by_head(rows, heads, first, last)
    n, row_bytes = wire.shape[1:]
    parts = rows.spec.format.split(wire.reshape(heads * n, row_bytes))
    kinds = ("<u4", "<f2", "<f2")
    codes, scales, biases = (
        np.ascontiguousarray(part).view(kind).reshape(heads, n, -1)
        for part, kind in zip(parts, kinds, strict=True)
    )
    return api.Affine(codes, scales, biases, 4, 32)


def _values(rows: LayerRows, heads: int, first: int, last: int) -> NDArray[Any]:
    """One side ``[H, n, D]``: the bits of formats of one number a value, else float32."""
    spec, n = rows.spec, last - first
    if spec.fmt in _ITEMS:
        return _by_head(rows, heads, first, last).view(_ITEMS[spec.fmt])
    out = np.empty((heads, n, spec.width // heads), np.float32)
    if spec.fmt == _FOUR_BITS and spec.format.head_major(spec.width, heads):
        groups = _groups(rows, heads, first, last)
        step = max(1, _CACHED_VALUES // spec.width)
        for begin in range(0, n, step):
            part = dequantized(_rows_of(groups, begin, begin + step), "warming")
            out[:, begin : begin + step] = part
        return out
    for begin, end in _windows(rows, first, last):
        values = spec.format.decode(read_layer(rows, begin, end))
        tokens = values.reshape(end - begin, heads, -1).transpose(1, 0, 2)
        out[:, begin - first : end - first] = tokens
    return out


def _rows_of(groups: api.Affine, first: int, last: int) -> api.Affine:
    return groups.mapped(lambda array: array[:, first:last])


def _by_head(rows: LayerRows, heads: int, first: int, last: int) -> Bytes:
    """Wire rows ``[H, n, bytes of a head's share]``."""
    spec, n = rows.spec, last - first
    head = spec.format.per_head(heads)
    out = np.empty((heads, n, head.row_bytes(spec.width // heads)), np.uint8)
    stored_so = all(extent.run.shape.head_major for extent in rows.covering(first, last))
    if stored_so and spec.heads == heads:
        for number in range(heads):
            out[number] = read_head(rows, number, first, last)
        return out
    for begin, end in _windows(rows, first, last):
        data = read_layer(rows, begin, end)
        out[:, begin - first : end - first] = transpose_rows(
            spec.format, data, spec.width, heads, to_head_major=True
        )
    return out


def _windows(rows: LayerRows, first: int, last: int) -> list[tuple[int, int]]:
    """Ranges of rows that are converted at once."""
    step = max(1, WINDOW_BYTES // max(1, rows.spec.width * 4))
    return [(begin, min(begin + step, last)) for begin in range(first, last, step)]


def state_digest(blob: StateBlob) -> str:
    """SHA-256 of a state's bytes, in hexadecimal. Reads the disk; raises OSError."""
    place = blob.place  # once: a save may move a short state
    file, digest = place_file(place), hashlib.sha256()
    for at in range(0, blob.length, WINDOW_BYTES):
        count = min(WINDOW_BYTES, blob.length - at)
        digest.update(pread_exactly(file.fd, count, place.offset + at))
    return digest.hexdigest()
