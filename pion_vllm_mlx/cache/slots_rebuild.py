"""Cache objects out of their metadata, rows and states: the inverse of ``slots``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.leaf import ArraySpec, Side, dtype_of
from pion_vllm_mlx.cache.slots_state import StateArrays
from pion_vllm_mlx.errors import DamagedData

SlotMeta = dict[str, Any]

Fetch = Callable[[int, Side, int, int], mx.array]
"""``fetch(layer, side, start, end) -> [H, n_pad, D]`` with ``n_pad >= end - start``.

Rows past ``end - start`` are spare: a buffer that already has room for the next
tokens saves the copy that mlx-lm would otherwise make at the first append. A raw
leaf may come as its own dtype or as bytes.
"""

_SPARE = 256


class SlotSource:
    """Where the rows and states of one stored cache come from."""

    def __init__(self, fetch: Fetch, states: Mapping[int, StateArrays]) -> None:
        self._fetch = fetch
        self.states = states

    def buffers(self, meta: SlotMeta) -> list[tuple[mx.array, int]]:
        """Per array of the slot ``([1, H, n_pad, D], n)``, in the order of its metadata."""
        ranges = [(int(start), int(end)) for start, end in meta["ranges"]]
        count = sum(end - start for start, end in ranges)
        if count != _num_rows(meta) or max((b for _, b in ranges), default=0) != meta["offset"]:
            raise DamagedData(f"metadata of a {meta['class']} slot: not the rows of its tokens")
        specs = [ArraySpec.from_json(spec) for spec in meta["arrays"]]
        fetched = {
            index: self._buffer(spec, ranges)
            for index, spec in enumerate(specs)
            if spec.dim and count
        }
        # mlx-lm looks at the length of the keys alone: all buffers of a slot have one length.
        length = min((a.shape[2] for a in fetched.values()), default=count + -count % _SPARE)
        length = length or _SPARE
        return [
            (_cut(fetched[index], length) if index in fetched else _zeros(spec, length), count)
            for index, spec in enumerate(specs)
        ]

    def _buffer(self, spec: ArraySpec, ranges: list[tuple[int, int]]) -> mx.array:
        dtype = dtype_of(spec.dtype)
        if len(ranges) == 1:
            rows = self._rows(spec, dtype, *ranges[0])
            # as mlx-lm's own buffers are strided: kernel plans are looked up by strides
            return rows.reshape(1, *rows.shape)
        exact = [self._rows(spec, dtype, a, b)[:, : b - a, :] for a, b in ranges]
        return mx.concatenate(exact, axis=1)[None]

    def _rows(self, spec: ArraySpec, dtype: mx.Dtype, start: int, end: int) -> mx.array:
        rows = self._fetch(spec.layer, spec.side, start, end)
        if rows.dtype == mx.uint8 and dtype != mx.uint8:
            rows = rows.view(dtype)
        heads, length, dim = rows.shape
        if rows.dtype != dtype or (heads, dim) != (spec.heads, spec.dim) or length < end - start:
            raise DamagedData(
                f"leaf {spec.layer} {spec.side}: rows {rows.dtype} {rows.shape} where "
                f"{spec.dtype} [{spec.heads}, {end - start}, {spec.dim}] were stored"
            )
        return rows


def _num_rows(meta: SlotMeta) -> int:
    """How many rows a slot holds: all, those of its window, or those of its chunks."""
    offset = int(meta["offset"])
    return min(offset, int(meta.get("max_size", offset))) - int(meta.get("start_position", 0))


def _cut(array: mx.array, length: int) -> mx.array:
    return array if array.shape[2] == length else array[:, :, :length, :]


def _zeros(spec: ArraySpec, length: int) -> mx.array:
    return mx.zeros((1, spec.heads, length, spec.dim), dtype_of(spec.dtype))


def put(meta: SlotMeta, source: SlotSource) -> Any:
    """The cache object of one slot's metadata.

    Raises DamagedData for metadata that does not describe a cache.
    """
    try:
        if meta.get("offset") and "arrays" not in meta:
            raise DamagedData(f"metadata of a {meta['class']} slot: tokens without rows")
        return _PUT[meta["class"]](meta, source)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DamagedData(f"metadata of a {meta.get('class')} slot: {error!r}") from error


def new(name: str, *args: Any, **settings: Any) -> Any:
    """A new cache object of mlx-lm by the name of its class."""
    from mlx_lm.models import cache

    return vars(cache)[name](*args, **settings)


def _put_plain(meta: SlotMeta, source: SlotSource) -> Any:
    cache = new("KVCache")
    cache.offset = int(meta["offset"])
    if "arrays" in meta:
        (cache.keys, _), (cache.values, _) = source.buffers(meta)
    return cache


def _put_concatenated(meta: SlotMeta, source: SlotSource) -> Any:
    cache = new("ConcatenateKVCache")
    cache.offset = int(meta["offset"])
    if "arrays" in meta:
        cache.keys, cache.values = (a[:, :, :n, :] for a, n in source.buffers(meta))
    return cache


def _put_quantized(meta: SlotMeta, source: SlotSource) -> Any:
    cache = new("QuantizedKVCache", group_size=int(meta["group_size"]), bits=int(meta["bits"]))
    cache.offset = int(meta["offset"])
    if "arrays" in meta:
        arrays = [array for array, _ in source.buffers(meta)]
        cache.keys, cache.values = tuple(arrays[0::2]), tuple(arrays[1::2])
    return cache


def _put_rotating(meta: SlotMeta, source: SlotSource) -> Any:
    size, keep = int(meta["max_size"]), int(meta["keep"])
    cache = new("RotatingKVCache", max_size=size, keep=keep)
    cache.offset, cache._idx = int(meta["offset"]), int(meta["index"])
    if "arrays" in meta:
        cache.keys, cache.values = (_ring(a, n, meta) for a, n in source.buffers(meta))
    return cache


def _ring(array: mx.array, count: int, meta: SlotMeta) -> mx.array:
    """The ring buffer of ``count`` rows in temporal order, turned to its old index.

    Spare rows past the window would be taken for the oldest tokens: they are cut.
    """
    size, keep, index = int(meta["max_size"]), int(meta["keep"]), int(meta["index"])
    if count < size or index == count:
        return array[:, :, : max(count, min(array.shape[2], size)), :]
    newest = count - (index - keep)
    parts = [array[:, :, :keep, :], array[:, :, newest:count, :], array[:, :, keep:newest, :]]
    return mx.concatenate(parts, axis=2)


def _put_chunked(meta: SlotMeta, source: SlotSource) -> Any:
    cache = new("ChunkedKVCache", int(meta["chunk_size"]))
    cache.offset, cache.start_position = int(meta["offset"]), int(meta["start_position"])
    if "arrays" in meta:
        capacity = int(meta["capacity"])
        cache.keys, cache.values = (_sized(a, capacity) for a, _ in source.buffers(meta))
    return cache


def _sized(array: mx.array, capacity: int) -> mx.array:
    missing = capacity - array.shape[2]
    if missing <= 0:
        return array[:, :, :capacity, :]
    shape = (*array.shape[:2], missing, array.shape[3])
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=2)


def _put_arrays(meta: SlotMeta, source: SlotSource) -> Any:
    size, present = int(meta["size"]), meta["present"]
    if size != len(present) or any(present) != (meta["slot"] in source.states):
        raise DamagedData(f"recurrent state of slot {meta['slot']}: other entries are present")
    cache = new("ArraysCache", size)
    for key in ("left_padding", "lengths"):
        if meta[key] is not None:
            values, dtype = meta[key]
            setattr(cache, key, mx.array(values, dtype_of(dtype)))
    if any(present):
        arrays = source.states[int(meta["slot"])]
        if [a is not None for a in arrays] != present:
            raise DamagedData(f"recurrent state of slot {meta['slot']}: other entries are present")
        cache.cache = list(arrays)
    return cache


_PUT: dict[str, Callable[[SlotMeta, SlotSource], Any]] = {
    "KVCache": _put_plain,
    "ConcatenateKVCache": _put_concatenated,
    "QuantizedKVCache": _put_quantized,
    "RotatingKVCache": _put_rotating,
    "ChunkedKVCache": _put_chunked,
    "ArraysCache": _put_arrays,
}
