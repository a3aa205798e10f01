"""The ``attend_*`` methods of PionPromptCache: attention over the slots of a namespace.

Letters: H_q query heads, H_kv stored heads, N prefix tokens, M query tokens, S suffix tokens, D
head dimension. Arrays are numpy's or MLX's, of floats; answers are numpy's, float32. A slot that
turns out cold is warmed from the stored rows of its layer, once, and asked again.

What ``stage2`` made resident has a session id of its content: the object that asked for the
prefix attends to that one and to no other. An object that asked for none attends to what was put
under ``<namespace>_attn``, by ``attend_store_layer`` say, else to the prefix that the namespace
has at the moment, if that is resident.

Every method raises TypeError naming what is no array of floats, no whole number or no text,
ValueError for an empty namespace and for arrays and numbers that do not fit together,
ServerRefused, a RuntimeError, for what the server refuses, and StoreUnavailable where it does not
answer.
Who asked for nothing takes a namespace at its word: neither model nor tokens are compared.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pion_vllm_mlx.cache.attend_client import AttendClient, is_missing
from pion_vllm_mlx.cache.attend_request import (
    Query,
    Slot,
    Sparse,
    Whole,
    selector_number,
    whole_number,
)
from pion_vllm_mlx.cache.attend_stored import StoredPrefix, attention_session
from pion_vllm_mlx.cache.completion import CompletionRecord
from pion_vllm_mlx.cache.store_client import StoreClient
from pion_vllm_mlx.errors import (
    ColdMiss,
    CommandError,
    DamagedData,
    NewerFormat,
    ServerRefused,
)

log = logging.getLogger("pion_vllm_mlx")

Floats = NDArray[np.float32]
HeadMap = Sequence[int] | bytes | NDArray[np.integer]
T = TypeVar("T")

_UNKNOWN_LENGTH = 1024
_LAYER_ZERO = 0
_MAX_HEAD = 255


class AttendMethods:
    """What PionPromptCache does with attention at the server; needs no model."""

    _client: StoreClient
    _attend: AttendClient
    _attend_tokens: dict[str, int]
    #: session ids of the prefixes that were asked for, by namespace
    _attend_sids: dict[str, str]

    @property
    def attention(self) -> AttendClient:
        """The queries themselves, for slots of any name."""
        return self._attend

    @property
    def attend_query_ms_total(self) -> float:
        return self._attend.query_ms_total

    @property
    def attend_query_calls(self) -> int:
        return sum(self._attend.queries.values())

    @property
    def cold_rehydrates_observed(self) -> int:
        """Answers that a slot was cold."""
        return self._attend.cold_misses

    def attend_store_layer(
        self, namespace: str, layer_id: int, K: ArrayLike, V: ArrayLike
    ) -> None:
        """Makes K and V ``(H_kv, N, D)`` of a layer resident."""
        keys, values = _pair(K, V, "K", "V")
        if keys.shape != values.shape or not keys.size:
            raise ValueError(f"K of shape {keys.shape} and V of shape {values.shape}")
        with _refusals():
            self._attend.store(_slot(namespace, layer_id), keys, values)
        self._attend_sids.pop(namespace, None)  # what was put there by hand is meant from now on
        self._attend_tokens[namespace] = keys.shape[1]

    def attend_query(  # noqa: PLR0913  (the published signature)
        self,
        namespace: str,
        layer_id: int,
        Q: ArrayLike,
        top_k: int = 0,
        with_lse: bool = False,
        fa_window: int | None = None,
    ) -> Floats | tuple[Floats, Floats]:
        """``Q`` ``(H_kv, D)`` or ``(H_kv, M, D)`` over the prefix, in its shape.

        Every query is dense, ``top_k`` only travels along. ``with_lse`` is for M queries:
        the log-sum-exp ``(H_kv, M)`` comes second.
        """
        q = _floats(Q, "Q", 3) if with_lse else _floats(Q, "Q", 2, 3)
        if not q.size:
            raise ValueError(f"Q of shape {q.shape} holds no query: M must be 1 or more")
        top = whole_number(top_k, "top_k")
        if top <= 0:
            top = self._attend_tokens.get(namespace, _UNKNOWN_LENGTH)

        def ask(slot: Slot) -> Floats | tuple[Floats, Floats]:
            if with_lse:
                return self._attend.prefixes(slot, [(q, fa_window)], top)[0]
            return self._attend.prefix(slot, q, top, fa_window)

        return self._asked(_slot(namespace, layer_id), (q.shape[0], q.shape[-1]), ask)

    def attend_query_fused(  # noqa: PLR0913  (the published signature)
        self,
        namespace: str,
        layer_id: int,
        Q: ArrayLike,
        K_suf: ArrayLike,
        V_suf: ArrayLike,
        head_map: HeadMap | None = None,
        fa_window: int | None = None,
    ) -> Floats:
        """``Q`` ``(H_q, M, D)`` over prefix and suffix ``(H_kv, S, D)``, causal within it.

        ``head_map`` None shares the stored heads evenly.
        """
        q, (keys, values) = _floats(Q, "Q", 3), _pair(K_suf, V_suf, "K_suf", "V_suf")
        mapped = even_head_map(q.shape[0], keys.shape[0]) if head_map is None else _map(head_map)
        query = Query(q, keys, values, mapped, fa_window)
        shape = keys.shape[0], q.shape[2]
        return self._asked(
            _slot(namespace, layer_id), shape, lambda slot: self._attend.fused(slot, query)
        )

    def attend_query_sparse_auto(  # noqa: PLR0913  (the published signature)
        self,
        namespace: str,
        layer_id: int,
        Q: ArrayLike,
        B: int,
        K_top: int,
        H_kv: int | None = None,
        head_map: HeadMap | None = None,
        fa_window: int | None = None,
        selector: str = "block_mean",
    ) -> Floats:
        """``Q`` ``(H_q, D)`` over the best ``K_top`` blocks of ``B`` tokens, and the tail.

        ``H_kv`` None is what the slot has, which takes a question more; ``head_map`` None
        shares the stored heads evenly. Raises ServerRefused where no slot says H_kv.
        """
        q, chosen = _floats(Q, "Q", 2), _chosen(B, K_top, selector)
        slot, named = _slot(namespace, layer_id), None if head_map is None else _map(head_map)
        kv_heads = self._stored_heads(slot) if H_kv is None else _given_heads(H_kv)
        nothing = np.empty((kv_heads, 0, q.shape[1]), np.float32)
        mapped = even_head_map(q.shape[0], kv_heads) if named is None else named
        return self._sparse(slot, Query(q[:, None], nothing, nothing, mapped, fa_window), chosen)

    def attend_query_sparse_auto_fused(  # noqa: PLR0913  (the published signature)
        self,
        namespace: str,
        layer_id: int,
        Q: ArrayLike,
        B: int,
        K_top: int,
        K_suf: ArrayLike,
        V_suf: ArrayLike,
        H_kv: int | None = None,
        head_map: HeadMap | None = None,
        fa_window: int | None = None,
        selector: str = "block_mean",
    ) -> Floats:
        """The same and the whole suffix ``(H_kv, S, D)``, which says H_kv."""
        q, (keys, values) = _floats(Q, "Q", 2), _pair(K_suf, V_suf, "K_suf", "V_suf")
        if H_kv is not None and whole_number(H_kv, "H_kv") != keys.shape[0]:
            raise ValueError(f"H_kv is {H_kv}, and the suffix has {keys.shape[0]} heads")
        chosen, slot = _chosen(B, K_top, selector), _slot(namespace, layer_id)
        mapped = even_head_map(q.shape[0], keys.shape[0]) if head_map is None else _map(head_map)
        return self._sparse(slot, Query(q[:, None], keys, values, mapped, fa_window), chosen)

    def attend_drop(self, namespace: str) -> None:
        """Forgets what this object knows of a namespace; no command travels."""
        self._attend_tokens.pop(namespace, None)
        self._attend_sids.pop(namespace, None)

    # -- inside -------------------------------------------------------------------

    def _sparse(self, slot: Slot, query: Query, chosen: Sparse) -> Floats:
        """``(H_q, D)`` for one query token."""
        shape = query.keys.shape[0], query.q.shape[2]
        with self._attend.telling_sparse(slot):
            return self._asked(slot, shape, lambda at: self._attend.sparse(at, query, chosen))[:, 0]

    def _stored_heads(self, slot: Slot) -> int:
        """H_kv of the slot that a query of this namespace and layer is to be answered from.

        Raises ServerRefused where there is none, warm or cold, and no record that tells.
        """
        sid = self._attend_sids.get(slot.namespace)
        with _refusals():
            _, heads, _, _ = self._attend.shape(slot if sid is None else replace(slot, sid=sid))
            stored = None if heads else self._recorded(slot.namespace)
        if stored is not None and slot.layer < len(stored.shapes) and sid in (None, stored.sid):
            heads = stored.shapes[slot.layer][0]
        if not heads:
            raise ServerRefused(
                f"ERR session not found: layer {slot.layer} of namespace {slot.namespace} has no "
                "slot that says H_kv, give it"
            )
        return heads

    def _asked(self, slot: Slot, shape: tuple[int, int], call: Callable[[Slot], T]) -> T:
        """What ``call`` returns for the slot of this namespace and layer; heads, D of ``shape``."""
        with _refusals():
            sid = self._attend_sids.get(slot.namespace)
            if sid is not None:
                return self._asked_of(replace(slot, sid=sid), shape, call)
            try:
                return self._attend.rehydrated(slot, *shape, lambda: call(slot))
            except CommandError as error:
                stored = self._recorded(slot.namespace) if is_missing(error) else None
                if stored is None:
                    raise
            return self._asked_of(replace(slot, sid=stored.sid), shape, call)

    def _asked_of(self, slot: Slot, shape: tuple[int, int], call: Callable[[Slot], T]) -> T:
        """The same of one content: a cold slot is warmed while the namespace still has it."""
        try:
            return call(slot)
        except ColdMiss as cold:
            self._attend.cold_misses += 1
            stored = self._recorded(slot.namespace)
            if stored is None or stored.sid != slot.sid:
                raise
            whole = Whole(stored.num_tokens, stored.record)
            self._attend.warm_again(slot, *shape, cold, whole)
        return self._attend.last_try(slot, lambda: call(slot))

    def _recorded(self, namespace: str) -> StoredPrefix | None:
        """What the namespace has entirely; None for nothing, and for what cannot be read."""
        blob = self._client.record(namespace)
        try:
            record = None if blob is None else CompletionRecord.decode(blob)
            if blob is None or record is None:
                return None
            return StoredPrefix.of(namespace, blob, record)
        except (DamagedData, NewerFormat, LookupError, TypeError, ValueError) as error:
            log.info("the record of namespace %s is not used: %s", namespace, error)
            return None

    def _attention_resident(self, namespace: str) -> bool:
        """Whether all layers are resident; cold ones are warmed, once."""
        sid, stored = self._attend_sids.get(namespace), self._recorded(namespace)
        if stored is None:  # by hand: how many layers there are is known to its owner
            slot = _slot(namespace, _LAYER_ZERO)
            return self._attend.state(slot if sid is None else replace(slot, sid=sid)) == "HIT"
        if sid not in (None, stored.sid):
            return False
        whole = Whole(stored.num_tokens, stored.record)
        states = self._attend.states(namespace, stored.sid, len(stored.shapes))
        if "MISS" in states:
            return False
        for layer, (heads, dim, _) in enumerate(stored.shapes):
            slot = Slot(namespace, stored.sid, layer)
            if states[layer] != "HIT" and self._attend.warm(slot, heads, dim, whole) <= 0:
                return False
        return bool(states)


@contextmanager
def _refusals() -> Iterator[None]:
    """Refusals as the RuntimeErrors that callers of these methods expect."""
    try:
        yield
    except CommandError as error:
        raise ServerRefused(f"{error.code} {error.sentence}") from error


def even_head_map(heads: int, kv_heads: int) -> bytes:
    """The map of grouped queries; raises ValueError where the groups are not alike."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} heads evenly")
    return bytes(head * kv_heads // heads for head in range(heads))


def _given_heads(kv_heads: Any) -> int:
    heads = whole_number(kv_heads, "H_kv")
    if heads < 1:
        raise ValueError(f"H_kv must be 1 or more, not {heads}")
    return heads


def _chosen(block: Any, top: Any, selector: str) -> Sparse:
    most = whole_number(top, "K_top")
    return Sparse(whole_number(block, "B"), most, selector_number(selector))


def _slot(namespace: str, layer_id: int) -> Slot:
    return Slot(namespace, attention_session(namespace), whole_number(layer_id, "layer_id"))


def _pair(keys: Any, values: Any, *names: str) -> tuple[Floats, Floats]:
    """K and V as float32 arrays of three axes. Raises TypeError where their types differ."""
    kinds = [_dtype(array) for array in (keys, values)]
    if None not in kinds and kinds[0] != kinds[1]:
        raise TypeError(
            f"{names[0]} is {kinds[0]} and {names[1]} is {kinds[1]}: give both one type"
        )
    return _floats(keys, names[0], 3), _floats(values, names[1], 3)


def _floats(array: Any, what: str, *num_axes: int) -> Floats:
    """A contiguous float32 array. Raises TypeError for other types, ValueError for other axes."""
    mlx = _mlx()
    if mlx is not None and isinstance(array, mlx.array):
        if not mlx.issubdtype(array.dtype, mlx.floating):
            raise TypeError(f"{what} is an array of floats, not of {_dtype(array)}")
        array = np.array(array.astype(mlx.float32))  # numpy has no bfloat16
    found = np.asarray(array)
    if found.dtype.kind != "f":
        raise TypeError(f"{what} is an array of floats, not of {found.dtype}")
    if found.ndim not in num_axes:
        wanted = " or ".join(map(str, num_axes))
        raise ValueError(f"{what} has {found.ndim} axes, not {wanted}")
    return np.ascontiguousarray(found, "<f4")


def _dtype(array: Any) -> str | None:
    """The name of an array's type, ``float32``; None for lists and the like."""
    mlx = _mlx()
    if not isinstance(array, np.ndarray) and (mlx is None or not isinstance(array, mlx.array)):
        return None
    return str(array.dtype).rpartition(".")[2]


def _mlx() -> Any:
    """MLX, where somebody has imported it: without it there are no arrays of its own."""
    return sys.modules.get("mlx.core")


def _map(head_map: HeadMap) -> bytes:
    heads = [whole_number(head, "a head of head_map") for head in head_map]
    if any(not 0 <= head <= _MAX_HEAD for head in heads):
        raise ValueError(f"head_map names heads of 0 to {_MAX_HEAD}, not {heads}")
    return bytes(heads)
