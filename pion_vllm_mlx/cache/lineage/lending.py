"""Handing live caches to another thread, for it to take out of them what is new.

``lend`` runs on MLX's thread and costs a few calls an array, whatever their size: no row is
sliced, copied or looked at there. The other thread gets views of its own, as bytes, and reads
them by the buffer protocol alone: it needs no stream, and no array that anybody else uses.

Only for caches that nobody writes to any more: a live one that is lent would be copied whole
by MLX before the next token is written into it. Under CUDA, where looking at an array moves all
of it to the host, ``lend_copies`` has the new rows copied, and the copies are looked at.

``lend_copies`` is done in steps, between which others may have their next token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from pion_vllm_mlx.cache.layers import cache_arrays

#: of one step, at most.
ARRAYS_A_STEP = 16

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Something that is done a bounded amount at a time, and what comes of it."""

Schedule = Callable[[Sequence[mx.array], Callable[[], None]], None]
"""Has arrays computed on this thread, and calls something when all are scheduled."""


def at_once(arrays: Sequence[mx.array], then: Callable[[], None]) -> None:
    """Schedules all arrays now."""
    mx.async_eval(list(arrays))  # type: ignore[no-untyped-call]
    then()


def done_now(steps: Steps[T]) -> T:
    """All steps, one after the other."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


@dataclass(frozen=True)
class Place:
    """Where the bytes of an array are: in ``raw``, from a head and a row on."""

    raw: mx.array
    first_head: int = 0
    first_row: int = 0


@dataclass(frozen=True)
class Lent:
    """Cache objects of one's own, and where the bytes of each of their arrays are, by its id.

    Not all rows of an array have to be there.
    """

    caches: list[Any]
    places: dict[int, Place]

    @property
    def raw(self) -> list[mx.array]:
        """What has to be scheduled before another thread may look at it."""
        return list({id(place.raw): place.raw for place in self.places.values()}.values())

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.raw)


def can_be_lent() -> bool:
    """Whether looking at an array leaves it where it is."""
    return bool(mx.default_device().type == mx.DeviceType.cpu or mx.metal.is_available())


def lend(caches: Sequence[Any]) -> Lent:
    """What another thread needs of ``caches``.

    It may look at it when all of ``raw`` has been scheduled on this thread.
    """
    own = list(_shells(caches))
    return Lent(own, {id(array): Place(bytes_of(array)) for array in cache_arrays(own)})


def lend_copies(caches: Sequence[Any], rows: int) -> Steps[Lent]:
    """``lend``, of copies: of plain rows only those from token ``rows`` on, of others all.

    Lazy too. The rows of like layers are copied in one go: what counts is the number of calls.
    """
    lent = Lent(list(_shells(caches)), {})
    alike: dict[tuple[int, int, mx.Dtype], list[tuple[int, mx.array]]] = {}
    count = 0
    for cache in lent.caches:
        plain = type(cache) in (KVCache, QuantizedKVCache)
        for array in cache_arrays([cache]):
            if count and count % ARRAYS_A_STEP == 0:
                yield
            count += 1
            if not plain:
                lent.places[id(array)] = Place(bytes_of(mx.contiguous(array)))
            elif rows < cache.offset:
                new = array[:, :, rows : cache.offset]
                kind = (cache.offset, array.shape[3], array.dtype)
                alike.setdefault(kind, []).append((id(array), new))
    if count > ARRAYS_A_STEP:
        yield
    for group in alike.values():
        first, *others = (new for _, new in group)
        raw = bytes_of(mx.concatenate([mx.contiguous(first), *others], axis=1))
        head = 0
        for name, new in group:
            lent.places[name] = Place(raw, head, rows)
            head += new.shape[1]
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
