"""Leaves: the run-bearing pairs of arrays that the cache of a model is made of.

Dimension letters: H_kv heads, N rows (tokens), D width of one head's row. A
leaf has a K side and a V side, each ``[1, H, N, D]`` in MLX and ``[H, N, D]``
in the store. A side of width 0 has no stored rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from pion_vllm_mlx.errors import DamagedData

Side = Literal["k", "v"]

_FLOAT_FORMATS = {mx.bfloat16: "bf16", mx.float16: "fp16", mx.float32: "fp32"}
_DTYPES = {
    str(dtype).rpartition(".")[2]: dtype
    for dtype in (
        mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64,
        mx.int8, mx.int16, mx.int32, mx.int64,
        mx.float16, mx.bfloat16, mx.float32, mx.float64, mx.complex64,
    )
}  # fmt: skip


def dtype_name(dtype: mx.Dtype) -> str:
    """The name of a dtype as records carry it, for example ``bfloat16``."""
    return str(dtype).rpartition(".")[2]


def dtype_of(name: str) -> mx.Dtype:
    """The dtype of a name; raises DamagedData for one that MLX does not have."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise DamagedData(f"unknown dtype {name!r} in a completion record") from None


@dataclass(frozen=True)
class LeafSpec:
    """What the server has to know about one leaf; its layer id is its rank.

    ``k_width`` and ``v_width`` count values of a row over all heads, and bytes
    for a ``raw:<bytes per row>`` leaf. 0 means that the side has no rows. ``v_format`` is
    the format of the V side where it is another one; ``token_major`` leaves are stored so
    though their format could be cut at heads.
    """

    layer: int
    heads: int
    format: str
    k_width: int
    v_width: int
    v_format: str = ""
    token_major: bool = False

    def format_of(self, side: Side) -> str:
        """The format of one side."""
        return self.v_format if side == "v" and self.v_format else self.format

    def width(self, side: Side) -> int:
        return self.k_width if side == "k" else self.v_width

    def as_json(self) -> dict[str, Any]:
        other = {"v_format": self.v_format} if self.v_format else {}
        widths = {"k": self.k_width, "v": self.v_width}
        return {**widths, "heads": self.heads, "format": self.format, **other}


class Turned:
    """A ring buffer ``[1, H, N, D]`` by the order of its tokens; joined when it is looked at.

    ``pieces`` are the row ranges of the buffer in that order.
    """

    def __init__(self, buffer: mx.array, pieces: Sequence[tuple[int, int]]) -> None:
        self._buffer = buffer
        self._pieces = [(first, last) for first, last in pieces if last > first] or [(0, 0)]
        heads, dim = buffer.shape[1], buffer.shape[3]
        self.shape = (1, heads, sum(last - first for first, last in self._pieces), dim)
        self.dtype = buffer.dtype

    def __getitem__(self, key: Any) -> mx.array:
        parts = [self._buffer[:, :, first:last, :] for first, last in self._pieces]
        return (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2))[key]


@dataclass(frozen=True)
class LeafRows:
    """Rows ``[start, start + n)`` of one side of a leaf: ``first:last`` of a live buffer.

    Nothing is copied here, and nothing sliced before ``array`` is asked for.
    """

    layer: int
    side: Side
    start: int
    buffer: mx.array | Turned
    first: int
    last: int

    @property
    def array(self) -> mx.array:
        """The rows ``[1, H, n, D]``, a lazy slice."""
        return self.buffer[:, :, self.first : self.last, :]

    @property
    def count(self) -> int:
        return self.last - self.first

    def part(self, first: int, count: int) -> LeafRows:
        """At most ``count`` of the rows, from row ``first`` of them on."""
        begin = self.first + first
        last = min(begin + count, self.last)
        return replace(self, start=self.start + first, first=begin, last=last)


def leaves_json(leaves: Sequence[LeafSpec]) -> str:
    """The ``LEAVES`` argument of KV.PREFIX.REGISTER."""
    return json.dumps([leaf.as_json() for leaf in leaves], separators=(",", ":"))


def as_stored_bytes(array: mx.array) -> memoryview:
    """The bytes of rows ``[1, H, n, D]`` in the stored order ``[H, n, D]``.

    Evaluates; copies only what is not contiguous. Returns a flat view of bytes
    that keeps the array alive.
    """
    flat = mx.contiguous(array).reshape(-1)
    if flat.size == 0:
        return memoryview(b"")
    raw = flat if flat.dtype == mx.uint8 else flat.view(mx.uint8)
    mx.eval(raw)
    return memoryview(raw).cast("B")  # type: ignore[arg-type]  # mlx's stubs omit the buffer protocol


@dataclass(frozen=True)
class ArraySpec:
    """Where one array of a cache object lives: its leaf, side, and geometry."""

    layer: int
    side: Side
    heads: int
    dim: int
    dtype: str

    def as_json(self) -> list[Any]:
        return [self.layer, self.side, self.heads, self.dim, self.dtype]

    @staticmethod
    def from_json(value: Sequence[Any]) -> ArraySpec:
        layer, side, heads, dim, dtype = value
        if side not in ("k", "v"):
            raise DamagedData(f"unknown side {side!r} in a completion record")
        return ArraySpec(int(layer), side, int(heads), int(dim), str(dtype))


Buffer = mx.array | Turned


class LeafBuilder:
    """Collects leaves and their rows in the order in which slots are visited."""

    def __init__(self) -> None:
        self.leaves: list[LeafSpec] = []
        self.rows: list[LeafRows] = []

    def add(
        self, k: Buffer, v: Buffer, parts: Sequence[tuple[int, int, int]], *, opaque: bool
    ) -> tuple[ArraySpec, ArraySpec]:
        """Adds the pair ``k``, ``v`` ``[1, H, N, D]``.

        ``parts`` are ``(position, first, last)``: rows ``first:last`` of the arrays
        are the tokens from ``position`` on. ``opaque`` stores raw bytes. A pair whose
        sides differ in heads or format becomes two one-sided leaves.
        """
        k_format, v_format = _format(k, opaque), _format(v, opaque)
        alike = k.shape[1] == v.shape[1] and k_format == v_format
        if alike or v.shape[3] == 0 or k.shape[3] == 0:
            lead = k if k.shape[3] else v
            layer = self._leaf(_format(lead, opaque), lead.shape[1], _width(k, opaque),
                               _width(v, opaque))  # fmt: skip
            k_layer = v_layer = layer
        else:
            k_layer = self._leaf(k_format, k.shape[1], _width(k, opaque), 0)
            v_layer = self._leaf(v_format, v.shape[1], 0, _width(v, opaque))
        return self._side(k_layer, "k", k, parts), self._side(v_layer, "v", v, parts)

    def _leaf(self, kind: str, heads: int, k_width: int, v_width: int) -> int:
        self.leaves.append(LeafSpec(len(self.leaves), heads, kind, k_width, v_width))
        return len(self.leaves) - 1

    def _side(
        self, layer: int, side: Side, array: Buffer, parts: Sequence[tuple[int, int, int]]
    ) -> ArraySpec:
        if array.shape[3]:
            for position, first, last in parts:
                if last > first:
                    self.rows.append(LeafRows(layer, side, position, array, first, last))
        return ArraySpec(layer, side, array.shape[1], array.shape[3], dtype_name(array.dtype))


def _width(array: Buffer, opaque: bool) -> int:
    values = int(array.shape[1] * array.shape[3])
    stored_as_bytes = opaque or array.dtype not in _FLOAT_FORMATS
    return values * array.dtype.size if stored_as_bytes else values


def _format(array: Buffer, opaque: bool) -> str:
    name = None if opaque else _FLOAT_FORMATS.get(array.dtype)
    return name or f"raw:{_width(array, opaque)}"
