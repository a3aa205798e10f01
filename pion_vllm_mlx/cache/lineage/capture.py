"""Taking what is new out of live caches, fast, so that another thread can have its bytes.

``capture`` runs on MLX's thread and waits for nothing that is not computed yet. On a GPU the
new rows are copied by MLX, scheduled behind what is being computed, those of like leaves in
one go: what counts here is the number of calls. On a CPU, where a long copy would hold up
the caller, of much the buffers themselves are handed over: MLX does not write into an array
that somebody else holds, but copies it once. ``captured_of`` takes out of caches that were
lent, on any thread. ``Held…`` objects give their bytes on any thread, by the buffer protocol
alone, without a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache.boundary import storage_leaves
from pion_vllm_mlx.cache.lanes_codec import FLOAT_DTYPES, layout_of
from pion_vllm_mlx.cache.layers import StoredCache, dismantle
from pion_vllm_mlx.cache.leaf import LeafRows, LeafSpec, Side, dtype_name
from pion_vllm_mlx.cache.lineage.bringing import Bytes, rows_of, shared
from pion_vllm_mlx.cache.lineage.coverage import Window
from pion_vllm_mlx.cache.lineage.lending import Lent
from pion_vllm_mlx.cache.lineage.shape import (
    Shape,
    Slot,
    array_specs,
    flat,
    window_leaves,
    window_of,
)
from pion_vllm_mlx.cache.slots_state import StatePart, encode_parts, state_dtype
from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import get_format

SMALL_BYTES = 4 << 20
"""On a CPU more bytes than that are handed over as they are, instead of copied."""

_NATIVE = {name: dtype_name(dtype) for name, dtype in FLOAT_DTYPES.items()}
_LARGEST_FP16 = 65519.0

@dataclass(frozen=True)
class HeldRows:
    """Rows ``[start, end)`` of one side of a leaf: heads ``first_head …`` of ``raw``.

    ``raw`` is ``[1, H, n, bytes]``, of several leaves maybe, its row ``first_row`` the token
    ``start``; ``dtype`` is the cache's own.
    """

    layer: int
    side: Side
    start: int
    end: int
    raw: mx.array
    first_head: int
    heads: int
    dtype: str
    first_row: int = 0

    @property
    def num_bytes(self) -> int:
        return (self.end - self.start) * self.heads * int(self.raw.shape[3])

    def until(self, end: int) -> HeldRows:
        """The rows before token ``end``."""
        return replace(self, end=min(self.end, end))

    def encoded(self, start: int, end: int, leaf: LeafSpec) -> Bytes:
        """The bytes of rows ``[start, end)`` in the leaf's format and layout."""
        heads = slice(self.first_head, self.first_head + self.heads)
        shift = self.first_row - self.start
        table = rows_of(self.raw, heads, start + shift, end + shift)
        name = leaf.format_of(self.side)
        if name.startswith("raw:") or _NATIVE.get(name) == self.dtype:
            return np.ascontiguousarray(table).reshape(-1)
        values = _as_float32(np.ascontiguousarray(table), self.dtype)
        width = values.shape[2]
        if layout_of(leaf, self.side) == "NHD":
            values, width = values.transpose(1, 0, 2), leaf.width(self.side)
        rows = np.ascontiguousarray(values).reshape(-1, width)
        if name == "fp16" and bool((np.abs(rows[np.isfinite(rows)]) > _LARGEST_FP16).any()):
            raise CommandError("rows hold a value beyond the range of float16")
        return get_format(name).encode(rows).reshape(-1)


class Rows(Protocol):
    """Rows ``[start, end)`` of one side of a leaf, wherever they are: see ``HeldRows``."""

    @property
    def layer(self) -> int: ...
    @property
    def side(self) -> Side: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

    def until(self, end: int) -> Rows: ...

    def encoded(self, start: int, end: int, leaf: LeafSpec) -> Bytes: ...


@dataclass(frozen=True)
class HeldState:
    """One array of a recurrent slot, or None where there is none; ``raw`` are its bytes."""

    dtype: str
    shape: tuple[int, ...]
    raw: mx.array

    def part(self) -> StatePart:
        if not self.raw.size:
            return StatePart(self.dtype, self.shape, memoryview(b""))
        view = np.ascontiguousarray(shared(self.raw)).data
        return StatePart(self.dtype, self.shape, view.cast("B"))


@dataclass(frozen=True)
class Captured:
    """What is new in the caches of a prompt. ``leaves`` are in their storage formats."""

    slots: list[Slot]
    leaves: list[LeafSpec]
    rows: Sequence[Rows]
    states: dict[int, list[HeldState | None]]

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be scheduled before another thread may have it."""
        states = [one.raw for state in self.states.values() for one in state if one is not None]
        raw = [held.raw for held in self.rows if isinstance(held, HeldRows)]
        return [*{id(one): one for one in raw}.values(), *states]

    @property
    def num_bytes(self) -> int:
        return sum(held.num_bytes for held in self.rows) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Those of the recurrent states."""
        arrays = (one for state in self.states.values() for one in state if one is not None)
        return sum(array.raw.nbytes for array in arrays)

    def state_blobs(self) -> Iterator[tuple[int, bytes]]:
        """The recurrent slots as they are stored."""
        for slot, arrays in self.states.items():
            parts = [None if one is None else one.part() for one in arrays]
            yield slot, encode_parts("ArraysCache", parts)


@dataclass(frozen=True)
class Taken:
    """What a thread has once ``arrays`` are scheduled: ``captured`` gives it, on any thread.

    ``over`` is to be called when it is written, or will not be.
    """

    arrays: list[mx.array]
    captured: Callable[[], Captured]
    num_bytes: int
    over: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Since:
    """From which token on something is new: ``rows`` are not stored from there on.

    ``fresh``: since the caches were restored or last kept. Windows are taken from there:
    rows before ``rows`` may be stored without theirs.
    """

    rows: int = 0
    fresh: int = 0


def capture(
    caches: Sequence[Any], length: int, since: Since, shape: Shape, vquant: str | None
) -> Captured:
    """What is new in caches that hold ``length`` tokens. Schedules nothing, waits for nothing.

    Raises UnsupportedCache for caches that cannot be stored, are of another make than the
    model's, or hold another number of tokens.
    """
    stored = dismantle(caches)
    shape.check(stored.slots, length)
    leaves = storage_leaves(stored.leaves, vquant, 0)
    states = {
        slot: [None if array is None else _held_state(array) for array in arrays]
        for slot, arrays in stored.states.items()
    }
    rows = [
        (part.layer, part.side, part.start, part.array) for part in _new_rows(caches, stored, since)
    ]
    return Captured(stored.slots, leaves, _as_bytes(rows), states)


def captured_of(
    lent: Lent, length: int, since: Since, shape: Shape, vquant: str | None
) -> Captured:
    """``capture`` of caches that were lent. Any thread; makes and evaluates no array.

    Raises UnsupportedCache.
    """
    stored = dismantle(lent.caches)
    shape.check(stored.slots, length)
    leaves = storage_leaves(stored.leaves, vquant, 0)
    states = {
        slot: [None if array is None else _lent_state(array, lent) for array in arrays]
        for slot, arrays in stored.states.items()
    }
    rows = [_lent_rows(part, lent) for part in _new_rows(lent.caches, stored, since)]
    return Captured(stored.slots, leaves, rows, states)


def _lent_rows(part: LeafRows, lent: Lent) -> HeldRows:
    heads, dtype = part.buffer.shape[1], dtype_name(part.buffer.dtype)
    where = (part.layer, part.side, part.start, part.start + part.count)
    place = lent.places[id(part.buffer)]
    first = part.first - place.first_row
    return HeldRows(*where, place.raw, place.first_head, heads, dtype, first)


def _lent_state(array: mx.array, lent: Lent) -> HeldState:
    raw = lent.places[id(array)].raw
    return HeldState(state_dtype(array.dtype), tuple(array.shape), raw)


_Row = tuple[int, Side, int, mx.array]
_Whole = tuple[mx.array, list[_Row]]


def _new_rows(caches: Sequence[Any], stored: StoredCache, since: Since) -> Iterator[LeafRows]:
    """The new rows, as parts of the caches' buffers."""
    windows = window_leaves(stored.slots)
    rings = window_leaves([slot for slot in flat(stored.slots) if window_of(slot) is not None])
    for run in stored.rows:
        if run.layer not in rings:
            known = since.fresh if run.layer in windows else since.rows
            first = max(known - run.start, 0)
            if first < run.count:
                yield run.part(first, run.count)
    if not rings:
        return
    for slot, cache in _slots_with_caches(caches, stored.slots):
        window = window_of(slot)
        if window is None or "arrays" not in slot:
            continue
        for spec in array_specs(slot):
            buffer = cache.keys if spec.side == "k" else cache.values
            yield from _window_rows(spec.layer, spec.side, buffer, cache, window, since)


def _slots_with_caches(caches: Sequence[Any], slots: Sequence[Slot]) -> Iterator[tuple[Slot, Any]]:
    for slot, cache in zip(slots, caches, strict=True):
        if slot["class"] == "CacheList":
            yield from _slots_with_caches(cache.caches, slot["caches"])
        else:
            yield slot, cache


def _window_rows(
    layer: int, side: Side, buffer: mx.array, cache: Any, window: Window, since: Since
) -> Iterator[LeafRows]:
    """What a ring buffer holds, by token position; more than the window after a prefill."""
    for position, first, last in ring_parts(
        int(cache._idx), int(buffer.shape[2]), int(cache.offset), window
    ):
        skipped = max(since.fresh - position, 0)
        if first + skipped < last:
            yield LeafRows(layer, side, position + skipped, buffer, first + skipped, last)


def ring_parts(index: int, length: int, offset: int, window: Window) -> list[tuple[int, int, int]]:
    """``(position, first, last)``: buffer rows ``first:last`` are the tokens from position on.

    The buffer has ``length`` rows, is written at ``index`` next, and has seen ``offset``
    tokens.
    """
    keep = min(window.keep, offset)
    if index == length or index >= offset:  # in temporal order: all of it, or as far as written
        held = min(index, offset)
        if held == offset:
            return [(0, 0, held)]
        parts = [(0, 0, keep), (offset - (held - keep), keep, held)]
    else:  # turned: behind the kept rows the oldest is at ``index``
        older, newer = length - index, index - keep
        parts = [
            (0, 0, keep),
            (offset - newer - older, index, length),
            (offset - newer, keep, index),
        ]
    return [part for part in parts if part[2] > part[1]]


def _held_state(array: mx.array) -> HeldState:
    flat_array = mx.contiguous(array).reshape(-1)
    if flat_array.dtype == mx.bool_:
        flat_array = flat_array.astype(mx.uint8)
    raw = flat_array if flat_array.dtype == mx.uint8 else flat_array.view(mx.uint8)
    return HeldState(state_dtype(array.dtype), tuple(array.shape), raw)


def _as_bytes(rows: list[_Row]) -> list[HeldRows]:
    """The rows as arrays of bytes, still to be computed."""
    copied = computes_on_gpu() or sum(array.nbytes for *_, array in rows) <= SMALL_BYTES
    wholes = _copied_together(rows) if copied else [(row[3], [row]) for row in rows]
    held = []
    for whole, members in wholes:
        raw = whole if whole.dtype == mx.uint8 else whole.view(mx.uint8)
        first = 0
        for layer, side, start, array in members:
            _, heads, count, _ = array.shape
            where = (layer, side, start, start + count)
            held.append(HeldRows(*where, raw, first, heads, dtype_name(array.dtype)))
            first += heads
    return held


def computes_on_gpu() -> bool:
    """Whether MLX copies beside the caller."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def _copied_together(rows: Sequence[_Row]) -> list[_Whole]:
    """New arrays, one for all leaves that have as many rows of the same width."""
    groups: dict[tuple[int, int, mx.Dtype], list[_Row]] = {}
    for row in rows:
        _, _, count, width = row[3].shape
        groups.setdefault((count, width, row[3].dtype), []).append(row)
    return [
        (mx.concatenate([mx.contiguous(group[0][3]), *(row[3] for row in group[1:])], 1), group)
        for group in groups.values()
    ]


def _as_float32(table: Bytes, dtype: str) -> NDArray[np.float32]:
    """``[H, n, D]`` values of their bytes."""
    if dtype == "bfloat16":
        bits = table.view("<u2").astype(np.uint32) << np.uint32(16)
        values: NDArray[np.float32] = bits.view(np.float32)
        return values
    kind = {"float16": "<f2", "float32": "<f4"}[dtype]
    return table.view(kind).astype(np.float32)
