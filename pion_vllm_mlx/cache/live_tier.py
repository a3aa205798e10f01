"""The in-process tier: live caches of this process by their exact tokens.

An entry is a list of mlx-lm caches of batch size 1 that hold exactly its tokens.  A lookup
takes the entry with the longest usable prefix: attention caches give any shorter length down
to their ``floor`` (0 where every row is held; their own length once a window has wrapped),
recurrent states only the length at which they were taken.  Arrays are shared, never copied:
MLX arrays do not change, and whoever gets an entry gets cache objects of its own.  Entries of
one conversation share the rows of its longest, so that another state costs a state, not rows.

Keys are big-endian token ids, so that byte order is the order of token sequences and the
entry with the longest common prefix is a neighbour in a sorted list.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from pion_vllm_mlx.cache.common_prefix import common_bytes
from pion_vllm_mlx.cache.layers import cache_arrays, refuse_unknown
from pion_vllm_mlx.errors import UnsupportedCache

#: a list of token ids, or an array of them
Tokens = Sequence[int] | Any
TOKEN_BYTES = 4
#: restore points of one conversation; a turn adds up to three: guard, end of prompt, reply.
MAX_CHECKPOINTS = 8


@dataclass(frozen=True)
class LiveHit:
    """A usable prefix of ``length`` tokens in the entry ``key``."""

    key: bytes
    length: int


@dataclass(frozen=True)
class Entry:
    """Caches of ``length`` tokens, which give any prefix of at least ``floor``."""

    caches: tuple[Any, ...]
    length: int
    floor: int
    kind: str

    @functools.cached_property
    def arrays(self) -> list[mx.array]:
        return cache_arrays(self.caches)


class _Ledger:
    """The bytes of arrays that entries share, each counted once."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._holders: dict[int, int] = {}

    def add(self, arrays: Iterable[mx.array]) -> None:
        for one in arrays:
            holders = self._holders.get(id(one), 0)
            self._holders[id(one)] = holders + 1
            self.nbytes += 0 if holders else one.nbytes

    def drop(self, arrays: Iterable[mx.array]) -> None:
        for one in arrays:
            self._holders[id(one)] -= 1
            if not self._holders[id(one)]:
                del self._holders[id(one)]
                self.nbytes -= one.nbytes


@dataclass
class LiveTier:
    """Caches under a byte budget, the least recently used given up first, anchors last.

    Safe to call from several threads; arrays are only touched by ``put``.  ``whole_only``:
    entries are used at their own length alone, whatever their caches allow.  ``discard`` is
    given the arrays that are held no longer, in a list of its own: freeing much memory takes long,
    and may be done elsewhere.
    """

    budget_bytes: int
    max_entries: int = 1000
    evictions: int = 0
    rejections: int = 0
    discard: Callable[[list[mx.array]], None] = field(default=lambda arrays: None)
    whole_only: bool = False
    most_states: int = MAX_CHECKPOINTS
    _entries: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    _all: list[bytes] = field(default_factory=list)
    _sliceable: list[bytes] = field(default_factory=list)
    _ledger: _Ledger = field(default_factory=_Ledger)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def nbytes(self) -> int:
        """What the arrays of all entries take."""
        return self._ledger.nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Tokens) -> LiveHit | None:
        """The longest usable prefix of ``tokens``, the last token always left to compute."""
        limit = len(tokens) - 1
        key = encode(tokens)
        with self._lock:
            best = self._exact(key[: limit * TOKEN_BYTES])
            for name in _neighbours(self._sliceable, key):
                usable = min(common_tokens(name, key), limit)
                if usable >= max(1, self._entries[name].floor):
                    if best is None or usable > best.length:
                        best = LiveHit(name, usable)
            return best

    def common(self, tokens: Tokens) -> int:
        """The longest common prefix with any entry, usable or not."""
        key = encode(tokens)
        with self._lock:
            near = _neighbours(self._all, key)
            return max((common_tokens(name, key) for name in near), default=0)

    def nearest(self, tokens: Tokens) -> tuple[int, Any]:
        """The longest common prefix with any entry, and that entry's token ids."""
        key = encode(tokens)
        with self._lock:
            near = [(common_tokens(name, key), name) for name in _neighbours(self._all, key)]
        common, name = max(near, default=(0, b""))
        return common, np.frombuffer(name, dtype=">u4")

    def take(self, hit: LiveHit) -> list[Any] | None:
        """Cache objects of the caller's own that hold ``hit.length`` tokens; None if gone."""
        with self._lock:
            entry = self._entries.get(hit.key)
            if entry is None:
                return None
            self._entries.move_to_end(hit.key)
        return [shortened(cache, entry.length - hit.length) for cache in entry.caches]

    def put(
        self,
        tokens: Tokens,
        caches: Sequence[Any],
        kind: str = "final",
        schedule: Callable[[list[mx.array]], object] = mx.async_eval,
    ) -> bool:
        """Keep ``caches``, which hold exactly ``tokens``; whether they (or more) are held now.

        Their arrays are given to ``schedule``, on the calling thread, to be computed.  Raises
        UnsupportedCache for a class that is not known, or a cache of another length.
        """
        refuse_unknown(caches)
        check_length(caches, len(tokens))
        floor = max(restorable_floor(cache) for cache in caches)
        floor = len(tokens) if self.whole_only else min(len(tokens), floor)
        entry = Entry(tuple(shortened(one, 0) for one in caches), len(tokens), floor, kind)
        key = encode(tokens)
        with self._lock:
            if self._covered(key):
                return True
            if sum(one.nbytes for one in entry.arrays) > self.budget_bytes:
                self.rejections += 1
                return False
            self._drop_superseded(key, entry)
            self._insert(key, entry)
            self._shrink(keep=key)
        schedule(entry.arrays)
        return True

    def remove(self, tokens: Tokens) -> bool:
        """Give up the entry of exactly ``tokens``; whether there was one."""
        key = encode(tokens)
        with self._lock:
            if key not in self._entries:
                return False
            self._delete(key)
            return True

    def resize(self, budget_bytes: int) -> None:
        """Give up entries until ``budget_bytes`` hold them, from now on."""
        with self._lock:
            self.budget_bytes = budget_bytes
            self._shrink(keep=b"")

    def clear(self) -> None:
        """Give up everything."""
        with self._lock:
            for key in list(self._entries):
                self._delete(key)

    def _exact(self, probe: bytes) -> LiveHit | None:
        for name in self._prefixes(probe):
            return LiveHit(name, len(name) // TOKEN_BYTES)
        return None

    def _prefixes(self, probe: bytes) -> Iterable[bytes]:
        """Entries that are prefixes of ``probe``, the longest first."""
        while probe:
            index = bisect_right(self._all, probe)
            if index == 0:
                return
            name = self._all[index - 1]
            common = common_tokens(name, probe) * TOKEN_BYTES
            if common == len(name):
                yield name
                common -= TOKEN_BYTES
            probe = probe[:common]

    def _covered(self, key: bytes) -> bool:
        """Whether an entry gives ``key`` already; it counts as used now."""
        length = len(key) // TOKEN_BYTES
        names = [key] if key in self._entries else _neighbours(self._sliceable, key)
        for name in names:
            entry = self._entries[name]
            if name == key or (common_tokens(name, key) == length and entry.floor <= length):
                self._entries.move_to_end(name)
                return True
        return False

    def _drop_superseded(self, key: bytes, entry: Entry) -> None:
        """Give up what the new entry gives as well; the others of its conversation share rows."""
        states = []
        for name in list(self._prefixes(key)):
            if entry.floor <= self._entries[name].floor:
                self._delete(name)
                continue
            self._share_rows(name, entry)
            if self._entries[name].kind != "anchor":
                states.append(name)
        surplus = len(states) + 1 - self.most_states
        if entry.kind != "anchor" and surplus > 0:
            for name in self._least_useful(states[::-1], entry.kind)[:surplus]:
                self._give_up(name)

    def _share_rows(self, name: bytes, longer: Entry) -> None:
        """Have the entry ``name`` use the rows of ``longer``, which continues it."""
        old = self._entries[name]
        surplus = longer.length - old.length
        pairs = zip(old.caches, longer.caches, strict=True)
        caches = tuple(rebased(cache, source, surplus) for cache, source in pairs)
        self._ledger.drop(old.arrays)
        self._entries[name] = replace(old, caches=caches)
        self._ledger.add(self._entries[name].arrays)
        arrays = old.arrays
        del old  # the list has the last references
        self.discard(arrays)

    def _least_useful(self, oldest_first: list[bytes], kind: str) -> list[bytes]:
        """States in the order in which they go: old guards, then old ends of turns.

        Only the newest guard is of use, and more so than an old turn's end.
        """
        guards = [name for name in oldest_first if self._entries[name].kind == "guard"]
        newest = [] if kind == "guard" else guards[-1:]
        others = [name for name in oldest_first if name not in guards]
        return guards[: len(guards) - len(newest)] + others + newest

    def _shrink(self, keep: bytes) -> None:
        while self.nbytes > self.budget_bytes or len(self._entries) > self.max_entries:
            names = [name for name in self._entries if name != keep]
            if not names:
                return
            plain = (name for name in names if self._entries[name].kind != "anchor")
            self._give_up(next(plain, names[0]))
            self.evictions += 1

    def _give_up(self, key: bytes) -> None:
        self._delete(key)

    def _insert(self, key: bytes, entry: Entry) -> None:
        self._entries[key] = entry
        self._ledger.add(entry.arrays)
        insort(self._all, key)
        if entry.floor < entry.length:
            insort(self._sliceable, key)

    def _delete(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._ledger.drop(entry.arrays)
        del self._all[bisect_left(self._all, key)]
        if entry.floor < entry.length:
            del self._sliceable[bisect_left(self._sliceable, key)]
        arrays = entry.arrays
        del entry
        self.discard(arrays)


def encode(tokens: Tokens) -> bytes:
    """The key of a list or array of token ids.

    Raises UnsupportedCache for ids that are not 32 bits.
    """
    try:
        # array.array takes a long list five times as fast as numpy does.
        ids = np.asarray(array("I", tokens) if isinstance(tokens, list) else tokens)
        if ids.dtype != np.uint32 and ids.size and not 0 <= ids.min() <= ids.max() <= 0xFFFFFFFF:
            raise OverflowError
    except OverflowError as error:
        raise UnsupportedCache("token ids outside 32 bits (image tokens) are not cached") from error
    if ids.dtype != np.uint32:
        ids = ids.astype(np.uint32)
    swapped = array("I", ids.tobytes())  # numpy would let Python's lock go meanwhile
    if sys.byteorder == "little":
        swapped.byteswap()
    return swapped.tobytes()


def common_tokens(left: bytes, right: bytes) -> int:
    """The number of leading tokens that two keys share."""
    return common_bytes(left, right) // TOKEN_BYTES


def shortened(cache: Any, surplus: int) -> Any:
    """A cache object of its own over the same arrays, ``surplus`` tokens shorter."""
    from mlx_lm.models.cache import ArraysCache, CacheList

    own = copy.copy(cache)
    if isinstance(cache, CacheList):
        children = [shortened(child, surplus) for child in cache.caches]
        own.caches = type(cache.caches)(children)
    elif isinstance(cache, ArraysCache):
        own.cache = list(cache.cache)
    elif surplus:
        own.trim(surplus)
    return own


def rebased(cache: Any, longer: Any, surplus: int) -> Any:
    """``cache`` over the arrays of ``longer`` where those give its rows too, else itself.

    ``longer`` continues it by ``surplus`` tokens.
    """
    from mlx_lm.models.cache import CacheList

    if isinstance(cache, CacheList):
        own = copy.copy(cache)
        pairs = zip(cache.caches, longer.caches, strict=True)
        own.caches = type(cache.caches)([rebased(one, other, surplus) for one, other in pairs])
        return own
    return shortened(longer, surplus) if restorable_floor(longer) == 0 else cache


def restorable_floor(cache: Any) -> int:
    """The smallest number of tokens to which ``cache`` can be shortened."""
    from mlx_lm.models.cache import (
        ArraysCache,
        CacheList,
        ChunkedKVCache,
        ConcatenateKVCache,
        RotatingKVCache,
    )

    if isinstance(cache, CacheList):
        return max(restorable_floor(child) for child in cache.caches)
    if isinstance(cache, ArraysCache):
        return 1 << 62
    if isinstance(cache, RotatingKVCache):
        return 0 if cache.offset < cache.max_size else int(cache.offset)
    if isinstance(cache, ChunkedKVCache):
        return int(cache.start_position) + 1 if cache.start_position else 0
    if isinstance(cache, ConcatenateKVCache):
        return int(cache.offset)
    return 0


def check_length(caches: Sequence[Any], length: int) -> None:
    """Raises UnsupportedCache unless every cache that counts its tokens counts ``length``."""
    from mlx_lm.models.cache import ArraysCache, CacheList

    for cache in caches:
        if isinstance(cache, CacheList):
            check_length(cache.caches, length)
        elif isinstance(cache, ArraysCache):
            if cache.cache[0] is None:
                raise UnsupportedCache("an empty recurrent state is not kept")
        elif cache.keys is None or cache.offset != length:
            raise UnsupportedCache(
                f"a {type(cache).__name__} holds {cache.offset} tokens, its key has {length}"
            )


def _neighbours(names: list[bytes], key: bytes) -> list[bytes]:
    """The entries before and after ``key`` in order: one has the longest common prefix."""
    index = bisect_left(names, key)
    return names[max(0, index - 1) : index + 1]
