"""Routing of cache layers: a list of mlx-lm caches into storable parts and back.

Rows where rows exist (every attention cache, a sliding window included), one
byte string where only a state exists (recurrent layers). CacheList is flattened
depth-first. A class that is not known by its exact type is refused by name
before anything else is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache import slots_rebuild
from pion_vllm_mlx.cache.leaf import LeafRows, LeafSpec, Side, leaves_json
from pion_vllm_mlx.cache.slots import SlotBuilder, SlotMeta, classes, geometry
from pion_vllm_mlx.cache.slots_rebuild import Fetch, SlotSource
from pion_vllm_mlx.cache.slots_state import StateArrays
from pion_vllm_mlx.errors import UnsupportedCache

__all__ = [
    "Fetch",
    "LeafRows",
    "LeafSpec",
    "Side",
    "StoredCache",
    "cache_arrays",
    "dismantle",
    "leaves_json",
    "rebuild",
    "supported",
]


@dataclass(frozen=True)
class StoredCache:
    """A cache taken apart; arrays are lazy slices of the live cache.

    ``slots`` is JSON for the completion record, a CacheList being
    ``{"class": "CacheList", "caches": [...]}``. ``states`` maps a flattened slot
    index to the arrays of a recurrent slot.
    """

    slots: list[SlotMeta]
    leaves: list[LeafSpec]
    rows: list[LeafRows]
    states: dict[int, StateArrays]


def dismantle(cache: Sequence[Any]) -> StoredCache:
    """Takes a cache of batch size 1 apart without copying its buffers.

    Raises UnsupportedCache naming class and slot, before anything else is done.
    """
    refuse_unknown(cache)
    builder = SlotBuilder()
    slots = [_take(entry, str(index), builder) for index, entry in enumerate(cache)]
    return StoredCache(slots, builder.rows.leaves, builder.rows.rows, builder.states)


def rebuild(
    slots: Sequence[SlotMeta], fetch: Fetch, states: Mapping[int, StateArrays]
) -> list[Any]:
    """Fresh cache objects that continue bit for bit like those taken apart.

    Raises DamagedData where metadata, rows or states do not fit each other.
    """
    source = SlotSource(fetch, states)
    return [_put(meta, source) for meta in slots]


def supported(model: Any) -> list[SlotMeta]:
    """Classes and geometry of the model's cache, nested as its CacheLists are.

    Raises UnsupportedCache naming the first class that cannot be stored.
    """
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    refuse_unknown(cache)
    return [_geometry(entry) for entry in cache]


def refuse_unknown(cache: Sequence[Any]) -> None:
    """Raises UnsupportedCache for the first object that is not of a known exact type."""
    known = classes()
    for path, entry in _flattened(cache):
        if type(entry) not in known:
            kind = type(entry)
            raise UnsupportedCache(
                f"cannot store {kind.__module__}.{kind.__qualname__} in slot {path}: "
                "only the cache classes of mlx-lm itself, at batch size 1, are stored"
            )


def cache_arrays(cache: Sequence[Any]) -> list[mx.array]:
    """Every array that a cache holds, to evaluate them together."""
    found: list[mx.array] = []
    for _, entry in _flattened(cache):
        for value in vars(entry).values():
            if isinstance(value, mx.array):
                found.append(value)
            elif isinstance(value, list | tuple):
                found += _arrays_in(value)
    return found


def _arrays_in(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays_in(item)


def _flattened(cache: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    from mlx_lm.models.cache import CacheList

    for index, entry in enumerate(cache):
        if type(entry) is CacheList:
            yield from _flattened(entry.caches, f"{prefix}{index}.")
        else:
            yield f"{prefix}{index}", entry


def _take(entry: Any, path: str, builder: SlotBuilder) -> SlotMeta:
    if type(entry).__name__ != "CacheList":
        return builder.take(entry, path)
    inner = [_take(item, f"{path}.{i}", builder) for i, item in enumerate(entry.caches)]
    return {"class": "CacheList", "caches": inner}


def _put(meta: SlotMeta, source: SlotSource) -> Any:
    if meta.get("class") != "CacheList":
        return slots_rebuild.put(meta, source)
    return slots_rebuild.new("CacheList", *(_put(item, source) for item in meta["caches"]))


def _geometry(entry: Any) -> SlotMeta:
    if type(entry).__name__ != "CacheList":
        return geometry(entry)
    return {"class": "CacheList", "caches": [_geometry(item) for item in entry.caches]}
