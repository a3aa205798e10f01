"""One slot of a model's cache: what its metadata says and how it is taken apart.

A slot is a cache object of mlx-lm that is not a CacheList. Its metadata is plain
JSON for the completion record: the class, its counters and, per array, the leaf
that holds the rows. ``offset`` is the number of tokens the slot has seen,
``ranges`` the half-open token ranges whose rows exist. Both supported versions
of mlx-lm keep these in the same attributes, so no version is asked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.leaf import LeafBuilder, Turned, dtype_name
from pion_vllm_mlx.cache.slots_state import StateArrays, storable_dtype
from pion_vllm_mlx.errors import UnsupportedCache

SlotMeta = dict[str, Any]
Part = tuple[int, int, int]


class SlotBuilder:
    """Takes slots apart, one after the other, in flattened order."""

    def __init__(self) -> None:
        self.rows = LeafBuilder()
        self.states: dict[int, StateArrays] = {}
        self._slots = 0

    def take(self, cache: Any, path: str) -> SlotMeta:
        """The metadata of one slot; its rows and states are collected."""
        name = type(cache).__name__
        meta: SlotMeta = {"class": name, "slot": self._slots}
        self._slots += 1
        meta.update(_TAKE[name](self, cache, f"{name} in slot {path}"))
        return meta

    def keep(self, arrays: StateArrays) -> None:
        """Keeps the recurrent state of the slot that is being taken apart."""
        self.states[self._slots - 1] = arrays

    def pairs(self, meta: SlotMeta, pairs: Sequence[Buffers], parts: Sequence[Part]) -> SlotMeta:
        """Adds the K/V pairs of a slot, and the ranges their rows cover."""
        opaque = len(pairs) > 1
        arrays = [self.rows.add(k, v, parts, opaque=opaque) for k, v in pairs]
        meta["arrays"] = [side.as_json() for pair in arrays for side in pair]
        meta["ranges"] = _merged([(start, start + last - first) for start, first, last in parts])
        return meta


Pair = tuple[mx.array, mx.array]
Buffers = tuple[mx.array | Turned, mx.array | Turned]
Take = Callable[[SlotBuilder, Any, str], SlotMeta]


def classes() -> set[type]:
    """The slot classes that can be stored: exact types."""
    from mlx_lm.models import cache

    return {vars(cache)[name] for name in _TAKE}


def geometry(cache: Any) -> SlotMeta:
    """The settings of an empty slot that its K/V depend on."""
    name = type(cache).__name__
    return {"class": name, **{key: vars(cache)[key] for key in _SETTINGS[name]}}


_SETTINGS: dict[str, tuple[str, ...]] = {
    "KVCache": (),
    "ConcatenateKVCache": (),
    "QuantizedKVCache": ("group_size", "bits"),
    "RotatingKVCache": ("max_size", "keep"),
    "ChunkedKVCache": ("chunk_size",),
    "ArraysCache": (),
}


def _take_plain(builder: SlotBuilder, cache: Any, where: str) -> SlotMeta:
    if cache.keys is None:
        return {"offset": _count(cache.offset, where)}
    pair = _pair(cache.keys, cache.values, where)
    offset = _count(cache.offset, where)
    _require(offset <= pair[0].shape[2], f"{where}: offset {offset} lies past its buffer")
    return builder.pairs({"offset": offset}, [pair], [(0, 0, offset)])


def _take_concatenated(builder: SlotBuilder, cache: Any, where: str) -> SlotMeta:
    if cache.keys is None:
        return {"offset": _count(cache.offset, where)}
    pair = _pair(cache.keys, cache.values, where)
    meta = {"offset": _count(cache.offset, where)}
    return builder.pairs(meta, [pair], [(0, 0, pair[0].shape[2])])


def _take_quantized(builder: SlotBuilder, cache: Any, where: str) -> SlotMeta:
    offset = _count(cache.offset, where)
    meta: SlotMeta = {"offset": offset, "group_size": cache.group_size, "bits": cache.bits}
    if cache.keys is None:
        return meta
    _require(len(cache.keys) == len(cache.values) == 3, f"{where}: not three arrays a side")
    pairs = [_pair(k, v, where) for k, v in zip(cache.keys, cache.values, strict=True)]
    _require(offset <= pairs[0][0].shape[2], f"{where}: offset {offset} lies past its buffer")
    return builder.pairs(meta, pairs, [(0, 0, offset)])


def _take_rotating(builder: SlotBuilder, cache: Any, where: str) -> SlotMeta:
    offset, keep, size = _count(cache.offset, where), int(cache.keep), int(cache.max_size)
    meta: SlotMeta = {"offset": offset, "keep": keep, "max_size": size}
    if cache.keys is None:
        return {**meta, "index": _count(cache._idx, where)}
    buffers = _pair(cache.keys, cache.values, where)
    index, length = _count(cache._idx, where), buffers[0].shape[2]
    pieces = _temporal(index, length, offset, keep)
    held, wanted = sum(last - first for first, last in pieces), min(offset, size)
    _require(wanted <= held and (held <= offset), f"{where}: the window does not fit its offset")
    rotated = length == size and index < length and offset > index
    meta["index"] = index if rotated else wanted
    k, v = (Turned(buffer, pieces) for buffer in buffers)
    if wanted == offset:
        return builder.pairs(meta, [(k, v)], [(0, 0, offset)])
    tail = size - keep
    parts = [(0, 0, keep)] if keep else []
    parts.append((offset - tail, held - tail, held))
    return builder.pairs(meta, [(k, v)], parts)


def _take_chunked(builder: SlotBuilder, cache: Any, where: str) -> SlotMeta:
    offset, start = _count(cache.offset, where), _count(cache.start_position, where)
    meta: SlotMeta = {"offset": offset, "chunk_size": cache.chunk_size, "start_position": start}
    if cache.keys is None:
        return meta
    pair = _pair(cache.keys, cache.values, where)
    # mlx-lm 0.31 trims by the size of the buffer: continuing needs the very same one.
    meta["capacity"] = pair[0].shape[2]
    fits = 0 <= offset - start <= pair[0].shape[2]
    _require(fits, f"{where}: start {start} and offset {offset} do not fit its buffer")
    return builder.pairs(meta, [pair], [(start, 0, offset - start)])


def _take_arrays(builder: SlotBuilder, cache: Any, where: str) -> SlotMeta:
    arrays: StateArrays = list(cache.cache)
    for entry in arrays:
        if entry is None:
            continue
        _require(isinstance(entry, mx.array), f"{where} holds a {type(entry).__name__}")
        _require(storable_dtype(entry.dtype), f"{where} holds {entry.dtype}")
        _require(entry.ndim == 0 or entry.shape[0] == 1, f"{where} has batch size {entry.shape[0]}")
    meta: SlotMeta = {"size": len(arrays), "present": [a is not None for a in arrays]}
    for key in ("left_padding", "lengths"):
        vector = vars(cache).get(key)
        _require(vector is None or vector.size == 1, f"{where} has a batch size other than 1")
        meta[key] = None if vector is None else [vector.tolist(), dtype_name(vector.dtype)]
    if any(meta["present"]):
        builder.keep(arrays)
    return meta


_TAKE: dict[str, Take] = {
    "KVCache": _take_plain,
    "ConcatenateKVCache": _take_concatenated,
    "QuantizedKVCache": _take_quantized,
    "RotatingKVCache": _take_rotating,
    "ChunkedKVCache": _take_chunked,
    "ArraysCache": _take_arrays,
}


def _temporal(index: int, length: int, offset: int, keep: int) -> list[tuple[int, int]]:
    """The row ranges of a ring buffer in the order of their tokens."""
    if index == length:
        return [(0, length)]
    if index < offset:
        return [(0, keep), (index, length), (keep, index)]
    return [(0, index)]


def _merged(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1][1] = end
        elif end > start:
            merged.append([start, end])
    return merged


def _pair(k: Any, v: Any, where: str) -> Pair:
    for array in (k, v):
        _require(isinstance(array, mx.array), f"{where} holds a {type(array).__name__}")
        _require(array.ndim == 4, f"{where} holds an array of {array.ndim} axes, not 4")
        _require(array.shape[0] == 1, f"{where} has batch size {array.shape[0]}, only 1 is stored")
    _require(k.shape[2] == v.shape[2], f"{where} has keys and values of different length")
    return k, v


def _count(value: Any, where: str) -> int:
    _require(isinstance(value, int) and value >= 0, f"{where} counts tokens by {value!r}")
    return int(value)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UnsupportedCache(f"cannot store {sentence}")
