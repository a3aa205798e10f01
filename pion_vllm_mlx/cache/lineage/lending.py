"""Handing live caches to another thread, for it to take out of them what is new.

``lend`` runs on MLX's thread and costs a few calls an array, whatever their size: no row is
sliced, copied or looked at there. The other thread gets views of its own, as bytes, and reads
them by the buffer protocol alone: it needs no stream, and no array that anybody else uses.

Only for caches that nobody writes to any more: a live one that is lent would be copied whole
by MLX before the next token is written into it. Under CUDA, where looking at an array moves all
of it to the host, ``lend_copies`` has the new rows copied, and the copies are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from pion_vllm_mlx.cache.layers import cache_arrays

Schedule = Callable[[Sequence[mx.array], Callable[[], None]], None]
"""Has arrays computed on this thread, and calls something when all are scheduled."""


def at_once(arrays: Sequence[mx.array], then: Callable[[], None]) -> None:
    """Schedules all arrays now."""
    mx.async_eval(list(arrays))  # type: ignore[no-untyped-call]
    then()


@dataclass(frozen=True)
class Lent:
    """Cache objects of one's own, and the bytes of each of their arrays, by its id.

    Where ``first`` names an array, only its rows from that one on.
    """

    caches: list[Any]
    raw: dict[int, mx.array]
    first: dict[int, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.raw.values())


def can_be_lent() -> bool:
    """Whether looking at an array leaves it where it is."""
    return bool(mx.default_device().type == mx.DeviceType.cpu or mx.metal.is_available())


def lend(caches: Sequence[Any]) -> Lent:
    """What another thread needs of ``caches``.

    It may look at it when all of ``raw`` have been scheduled on this thread.
    """
    own = list(_shells(caches))
    return Lent(own, {id(array): bytes_of(array) for array in cache_arrays(own)})


def lend_copies(caches: Sequence[Any], rows: int) -> Lent:
    """``lend``, of copies: of plain rows only those from token ``rows`` on, of others all.

    Lazy too, and as few calls.
    """
    lent = Lent(list(_shells(caches)), {})
    for cache in lent.caches:
        plain = type(cache) in (KVCache, QuantizedKVCache)
        for array in cache_arrays([cache]):
            if not plain:
                lent.raw[id(array)] = bytes_of(mx.contiguous(array))
            elif rows < cache.offset:
                new = mx.contiguous(array[:, :, rows : cache.offset])
                lent.raw[id(array)] = bytes_of(new)
                lent.first[id(array)] = rows
    return lent


def bytes_of(array: mx.array) -> mx.array:
    """A view of an array as bytes, another object in any case; lazy.

    ``[..., n * itemsize]`` for ``[..., n]``; a scalar is of one axis.
    """
    if not array.ndim:
        array = array.reshape(1)
    if array.dtype == mx.uint8:
        array = array.view(mx.int8)
    return array.view(mx.uint8)


def _shells(caches: Sequence[Any]) -> Iterator[Any]:
    """Cache objects that are nobody else's, over the same arrays."""
    for cache in caches:
        shell = object.__new__(type(cache))  # as copy.copy does, at a tenth of the time
        vars(shell).update(vars(cache))
        if isinstance(cache, CacheList):
            shell.caches = type(cache.caches)(_shells(cache.caches))
        elif isinstance(cache, ArraysCache):
            shell.cache = list(cache.cache)
            for name in ("left_padding", "lengths"):  # their numbers are looked at
                vector = vars(cache).get(name)
                setattr(shell, name, None if vector is None else vector + 0)
        yield shell
