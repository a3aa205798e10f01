"""PionPrefixCache: a layer's cache whose prefix may be elsewhere.

============  =====================================================================
lane          ``update_and_fetch`` returns
============  =====================================================================
in-process    prefix and suffix, from a cache of mlx-lm's own that holds both
sparse        the suffix for one token, else both; the prefix of this process is apart
wire          the suffix; the prefix is at the server
============  =====================================================================

Arrays that do not hold the prefix are known by identity: attention over them is the prefix's
attention too, whichever cache the model hands along, and never that of the suffix alone.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from pion_vllm_mlx.cache.attend_client import IN_PROCESS
from pion_vllm_mlx.errors import PionMlxCompatError, StoreUnavailable
from pion_vllm_mlx.kernels.api import Prefix
from pion_vllm_mlx.patch.remote import RemotePrefix
from pion_vllm_mlx.patch.seam import SEAM
from pion_vllm_mlx.patch.sparse import checked_mode, selection
from pion_vllm_mlx.patch.windows import Causal, Limits, checked_window, windowed


class NotForFiles:
    """Stands in the state of a cache that mlx-lm 0.32's save_prompt_cache refuses by this text."""

    def __str__(self) -> str:
        return "a PionPrefixCache is no file: save_prompt_cache takes what get_or_prefill returns"


_NOT_FOR_FILES = NotForFiles()
#: mlx-lm 0.31, whose files have a ``meta_state`` a cache, and whose models take ``state`` apart
_META_STATE = any("meta_state" in vars(base) for base in KVCache.__mro__)


class PrefixGroup:
    """What the layers of one cache share: the prefix, and whether a forward went wrong."""

    def __init__(  # noqa: PLR0913  (two of them for one caller)
        self,
        prompt_cache: Any,
        namespace: str,
        prefix_len: int,
        *,
        shares: bool = False,
        foreign: int = 0,
    ) -> None:
        """``shares``: layers may attend to another layer's K and V, at the right positions.

        ``foreign``: so many layers of a prefix without a completion record will do, too.
        """
        self.namespace, self.prefix_len, self.shares = namespace, prefix_len, shares
        self.pc = prompt_cache
        self._foreign = foreign
        self._remote: RemotePrefix | None = None
        source = prompt_cache.source
        self.local: list[Any] | None = (
            source.local(namespace, prefix_len) if source is not None and prefix_len > 0 else None
        )
        self.fused: bool = not prompt_cache.attend_unfused
        self.waiting: PionPrefixCache | None = None
        self.broken: str | None = None

    @property
    def remote(self) -> RemotePrefix:
        """The prefix at the server. Raises ValueError where there is none that fits."""
        if self._remote is None:
            self._remote = RemotePrefix(
                self.pc, self.namespace, self.prefix_len, self._foreign
            )
        return self._remote

    @property
    def lane(self) -> str:
        """Where attention over the prefix is computed: ``in-process``, ``binary`` or ``resp``."""
        return IN_PROCESS if self.local is not None else self.remote.lane

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixGroup:
        """That of a copied cache: the same prefix, forwards of its own."""
        made = object.__new__(PrefixGroup)
        made.__dict__.update(self.__dict__)
        made.local = None if self.local is None else []  # the copied caches hold their own
        if self.waiting is not None:
            made.waiting = None
            made.broken = f"layer {self.waiting.layer_idx}, before it was copied"
        return made

    def check(self) -> None:
        """Raises where the numbers to come would be wrong."""
        if self.broken is not None:
            raise StoreUnavailable(f"begin with a new cache: an attention failed ({self.broken})")
        if not SEAM.installed():
            raise PionMlxCompatError("install_pion_attention_patch() is not in place")
        if self.waiting is not None:
            layer = self.waiting.layer_idx
            raise PionMlxCompatError(f"layer {layer}: the model bypasses mlx-lm's attention")


class PionPrefixCache:
    """The cache of one slot of a model; ``offset`` counts prefix and suffix.

    ``keys`` and ``values`` are what the lane holds here: the suffix, or all of it.
    """

    def __init__(  # noqa: PLR0913  (the published signature)
        self,
        layer_idx: int,
        namespace: str,
        prompt_cache: Any,
        prefix_len: int,
        fa_window: int | None = None,
        sparse_mode: dict[str, Any] | None = None,
        *,
        group: PrefixGroup | None = None,
        native: Any = None,
    ) -> None:
        self.layer_idx, self.namespace, self.prefix_len = layer_idx, namespace, prefix_len
        self.prompt_cache, self.fa_window = prompt_cache, checked_window(fa_window)
        self.sparse_mode = checked_mode(sparse_mode)
        self.group = group or PrefixGroup(prompt_cache, namespace, prefix_len)
        own: Any = native
        if native is None and self.group.local is not None:
            own = windowed(self.group.local[layer_idx], self.fa_window)
        self.selection = selection(self.sparse_mode)
        self.rows: Prefix | None = None
        if own is not None and self.selection is not None and type(own) is not RotatingKVCache:
            self._refuse_sparse(own)
            keys, values = (a[..., :prefix_len, :] for a in (own.keys, own.values))
            self._part: tuple[mx.array, mx.array] = keys, values
            self.rows = Prefix(keys[0], values[0], prefix_len)
        #: prefix and suffix, or the suffix alone where the prefix is apart
        self.whole = own is not None and self.rows is None
        self.store: Any = own if self.whole else _new_cache()
        self.ring: int | None = own.max_size if type(own) is RotatingKVCache else self.fa_window
        self._handed: tuple[mx.array, mx.array] | None = None

    # -- what models and mlx-lm use -------------------------------------------------

    @property
    def offset(self) -> int:
        return int(self.store.offset) + (0 if self.whole else max(self.prefix_len, 0))

    @property
    def keys(self) -> Any:
        return self.store.keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        """Models order evaluation by this; where the prefix is elsewhere it is refused."""
        self._only_whole()
        self.store.keys = keys

    @property
    def values(self) -> Any:
        return self.store.values

    @values.setter
    def values(self, values: Any) -> None:
        self._only_whole()
        self.store.values = values

    @property
    def state(self) -> Any:
        """What is to be evaluated; of a prefix elsewhere, the suffix alone."""
        found = self.store.state if self.whole else self._handed or ()
        return found if _META_STATE else (*found, _NOT_FOR_FILES)

    @property
    def meta_state(self) -> Any:
        """Raises PionMlxCompatError: only files ask for it."""
        raise PionMlxCompatError(str(_NOT_FOR_FILES))

    @property
    def lane(self) -> str:
        """Where attention over the prefix is computed: ``in-process``, ``binary`` or ``resp``."""
        return self.group.lane

    def __repr__(self) -> str:
        lane = IN_PROCESS if self.group.local is not None else "at the server"
        return (
            f"<PionPrefixCache layer {self.layer_idx} of {self.namespace!r}: {self.prefix_len} "
            f"tokens {lane}, {self.offset - self.prefix_len} after them>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PionPrefixCache:
        """Another conversation behind the same prefix; copied in one list, they stay one cache."""
        made = object.__new__(PionPrefixCache)
        memo[id(self)] = made
        made.__dict__.update(self.__dict__)
        made.group = copy.deepcopy(self.group, memo)
        made.store = copy.deepcopy(self.store, memo)
        made._handed = None
        return made

    def __copy__(self) -> PionPrefixCache:
        """As a deep copy: two caches on one store would count each other's tokens."""
        return copy.deepcopy(self)

    def keys_and_values(self) -> Any:
        """What the last ``update_and_fetch`` returned, for layers that share it."""
        return self.store.keys_and_values() if self.whole else self._handed

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Appends ``[1, H_kv, M, D]``. Raises where a forward before went wrong."""
        self.group.check()
        if keys.shape[0] != 1:
            raise NotImplementedError(f"a prefix of batch size 1, and a batch of {keys.shape[0]}")
        if not self.whole and keys.shape[3] != values.shape[3]:
            raise PionMlxCompatError(
                f"layer {self.layer_idx}: keys of {keys.shape[3]} and values of {values.shape[3]} "
                "are attended in this process only"
            )
        found = self.store.update_and_fetch(keys, values)
        if self.whole:
            return found[0], found[1]
        if self.rows is not None and keys.shape[2] > 1:
            # without a single query there is nothing to choose blocks by
            pairs = zip(self._part, found, strict=True)
            joined = [mx.concatenate([first, last], axis=2) for first, last in pairs]
            self._handed = joined[0], joined[1]
            return self._handed
        HANDED.hand(self, found[0])
        self._handed = found[0], found[1]
        self.group.waiting = self
        return self._handed

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask for N new tokens; without its prefix, a window that it carries along."""
        self.group.check()
        if self.whole:
            return self.store.make_mask(N, return_array=return_array, window_size=window_size)
        if return_array and N > 1:
            return create_causal_mask(N, self.offset, window_size=window_size)
        if N == 1 and window_size is None:
            return None
        return Causal(window_size or self.ring)  # as a ring of mlx-lm's own does it

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """As the cache in this process does it, prefix and all.

        Raises PionMlxCompatError where the prefix is elsewhere: it is kept as it was stored.
        """
        if not self.whole:
            raise PionMlxCompatError(
                f"kv_bits={bits} over a prefix that is elsewhere: it is attended as it was stored; "
                "PionPromptCache(vquant=…) and --attend-dtype say how that is"
            )
        return self.store.to_quantized(group_size=group_size, bits=bits)

    def is_trimmable(self) -> bool:
        return bool(self.store.is_trimmable())

    def trim(self, n: int) -> int:
        """Takes back ``n`` tokens of those after the prefix.

        Raises ValueError for more: callers of mlx-lm's own do not ask how many it was.
        """
        after = self.offset - max(self.prefix_len, 0)
        if n > after:
            raise ValueError(
                f"namespace {self.namespace}: {n} tokens cannot be trimmed, {after} are behind the "
                f"prefix of {self.prefix_len}, which stays whole"
            )
        self._handed = None
        return int(self.store.trim(n))

    def size(self) -> int:
        return int(self.store.size()) if self.whole else self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        part = 0 if self.rows is None else self.rows.nbytes
        return part + (0 if self.store.keys is None else int(self.store.nbytes))

    def __getattr__(self, name: str) -> Any:
        """What a cache of mlx-lm's own has besides, where one holds prefix and suffix."""
        own = self.__dict__
        if name.startswith("__") or not own.get("whole"):
            raise AttributeError(f"PionPrefixCache has no {name!r} where its prefix is elsewhere")
        return getattr(own["store"], name)

    # -- what the patch uses --------------------------------------------------------

    def is_handed(self, keys: mx.array, values: mx.array | None = None) -> bool:
        """Whether these are the very arrays that a layer was given last."""
        if self._handed is None or self._handed[0] is not keys:
            return False
        return values is None or self._handed[1] is values

    def has_handed(self, values: mx.array) -> bool:
        """Whether these are the values that a layer was given last, in any type."""
        return self._handed is not None and _is_cast(values, self._handed[1])

    def is_cast(self, keys: mx.array, values: mx.array) -> bool:
        """Whether these are what a layer was given last, in another type; compares them."""
        if self._handed is None or self.rows is not None:
            return False
        return _is_cast(keys, self._handed[0]) and _is_cast(values, self._handed[1])

    def _only_whole(self) -> None:
        if not self.whole:
            raise PionMlxCompatError(
                f"layer {self.layer_idx}: the model sets the rows of a cache whose prefix is "
                "elsewhere"
            )

    def _refuse_sparse(self, own: Any) -> None:
        """Raises PionMlxCompatError for a cache whose rows do not lie as blocks are chosen."""
        if type(own) is not KVCache:
            raise PionMlxCompatError(
                f"layer {self.layer_idx}: sparse_full_layers over a {type(own).__name__}; without "
                "it the layer is attended densely"
            )

    def limits(self, mask: Any, num_queries: int) -> Limits:
        """The windows of a query under a mask of ``make_mask``."""
        return Limits(mask.window if isinstance(mask, Causal) else None, self.ring)


class Handed:
    """Which cache handed out which keys of a suffix."""

    def __init__(self) -> None:
        self._owners: dict[int, weakref.ref[PionPrefixCache]] = {}
        self._last: weakref.WeakKeyDictionary[PionPrefixCache, int] = weakref.WeakKeyDictionary()

    def hand(self, owner: PionPrefixCache, keys: mx.array) -> None:
        """Remembers the keys; those handed out before are forgotten."""
        before = self._last.get(owner)
        if before is not None:
            self._owners.pop(before, None)
        self._last[owner] = id(keys)
        self._owners[id(keys)] = weakref.ref(owner)

    def owner(self, keys: Any) -> PionPrefixCache | None:
        """The cache that handed out these very keys, None for any other array."""
        if not self._owners:
            return None
        found = self._owners.get(id(keys))
        cache = found() if found is not None else None
        return cache if cache is not None and cache.is_handed(keys) else None


HANDED = Handed()


def _is_cast(array: mx.array, handed: mx.array) -> bool:
    if array is handed:
        return True
    if array.shape != handed.shape:
        return False
    return bool(mx.array_equal(array, handed.astype(array.dtype)).item())


def _new_cache() -> Any:
    make: Any = KVCache
    return make()
