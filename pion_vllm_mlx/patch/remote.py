"""A prefix at the server, as the layers of one cache attend to it.

Of a prefix with a completion record, model and tokens are compared first, and its slots have
a session id made of both: whatever is resident under it is this very prefix, whoever warmed
it. A foreign prefix is what was stored under ``<namespace>_attn`` by hand: only its number of
tokens can be compared, and it is attended only by who asks for it as that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache.attend_client import AttendClient, is_missing
from pion_vllm_mlx.cache.attend_methods import even_head_map
from pion_vllm_mlx.cache.attend_request import Query, Slot, Sparse, Whole
from pion_vllm_mlx.cache.attend_stored import StoredPrefix, attention_session
from pion_vllm_mlx.errors import ColdMiss, CommandError, StoreUnavailable

Floats = NDArray[np.float32]
T = TypeVar("T")


class RemotePrefix:
    """The slots of a namespace. Opening it asks the server; not thread-safe.

    ``shapes``: of each layer its heads, and the dimensions of K and V.
    """

    def __init__(
        self, prompt_cache: Any, namespace: str, num_tokens: int, foreign: int = 0
    ) -> None:
        """``foreign``: so many layers of a prefix without a completion record will do, too.

        Raises ValueError where nothing that fits is stored, and what the client raises.
        """
        self._pc = prompt_cache
        self._client: AttendClient = prompt_cache.attention
        self.namespace, self.num_tokens = namespace, num_tokens
        self._stored = self._find()
        if self._stored is not None:
            self.sid, self.shapes = self._stored.sid, self._stored.shapes
            return
        self.sid = attention_session(namespace)
        self._refuse_foreign(foreign)
        self.shapes = tuple(self._foreign_shapes(foreign))

    @property
    def lane(self) -> str:
        """How a fused query would travel now: ``binary`` or ``resp``."""
        return self._client.lane

    def fused(self, layer: int, q: Floats, keys: Floats, values: Floats, window: int) -> Floats:
        """``[H_q, M, D]`` over prefix and suffix, causal within it; window 0 sees all."""
        query = self._query(q, keys, values, window)
        return self._ask(layer, keys, lambda slot: self._client.fused(slot, query))

    def sparse(
        self, layer: int, q: Floats, keys: Floats, values: Floats, chosen: Sparse
    ) -> Floats:
        """``[H_q, 1, D]`` over the best blocks, the tail, and the whole suffix."""
        query = self._query(q, keys, values, 0)
        with self._client.telling_sparse(self._slot(layer)):
            return self._ask(layer, keys, lambda slot: self._client.sparse(slot, query, chosen))

    def prefixes(
        self, layer: int, asked: Sequence[tuple[Floats, int]]
    ) -> list[tuple[Floats, Floats]]:
        """Queries ``[H_kv, M, D]`` over the prefix within a window each: out and LSE."""
        return self._ask(layer, asked[0][0], lambda slot: self._client.prefixes(slot, asked))

    # -- inside -------------------------------------------------------------------

    def _refuse_foreign(self, layers: int) -> None:
        """Raises ValueError where a prefix without a completion record is not to be attended."""
        name, source = self.namespace, self._pc.source
        if layers <= 0:
            raise ValueError(
                f"nothing to attend to is stored under namespace {name}: it has no completion "
                "record (foreign=True takes what attend_store_layer put there, unproved)"
            )
        if self._pc.strict:
            raise ValueError(f"namespace {name} has no completion record, and strict is on")
        if source is not None and source.asked(name):
            raise ValueError(
                f"namespace {name} has no completion record, and is to hold the tokens that "
                "get_or_prefill was asked for: a foreign prefix is not known to be those"
            )

    def _foreign_shapes(self, layers: int) -> Iterator[tuple[int, int, int]]:
        """Raises ValueError for a layer that is not there, or of another number of tokens."""
        found = self._client.shapes(self.namespace, self.sid, layers)
        for layer, (state, heads, tokens, dim) in enumerate(found):
            if state == "MISS":
                raise ValueError(
                    f"nothing to attend to is stored under namespace {self.namespace}: "
                    f"layer {layer} of {layers} is not there"
                )
            if tokens != self.num_tokens:
                raise ValueError(
                    f"namespace {self.namespace} holds {tokens} tokens in layer {layer}, "
                    f"{self.num_tokens} were asked for"
                )
            yield heads, dim, dim

    def _query(self, q: Floats, keys: Floats, values: Floats, window: int) -> Query:
        return Query(q, keys, values, even_head_map(q.shape[0], keys.shape[0]), window)

    def _slot(self, layer: int) -> Slot:
        return Slot(self.namespace, self.sid, layer)

    def _ask(self, layer: int, like: Floats, call: Callable[[Slot], T]) -> T:
        """What ``call`` returns; ``like`` is ``[H_kv, …, D]``. Once more after warming.

        Raises ColdMiss where others take the room of this layer as soon as it is warm.
        """
        slot, heads, dim = self._slot(layer), like.shape[0], like.shape[2]
        try:
            return call(slot)
        except CommandError as error:
            cold = isinstance(error, ColdMiss)
            if not cold and not is_missing(error):
                raise
            self._client.cold_misses += cold
            if self._stored is None and not cold:
                raise
            self._warm(slot, heads, dim, error)
        return self._client.last_try(slot, lambda: call(slot))

    def _warm(self, slot: Slot, heads: int, dim: int, because: CommandError) -> None:
        """Makes a layer resident from its stored rows. Raises ``because`` where that fails.

        That layer alone: a server that holds fewer than a model has would lose the others of
        this forward, and those of other models, each time.
        """
        if self._stored is None:
            if self._client.has_record(self.namespace):
                raise because  # its rows are those of another prefix
            self._client.warm_again(slot, heads, dim, because, Whole(self.num_tokens))
        elif self._warm_stored(self._stored, slot, heads, dim) <= 0:
            raise because

    def _warm_stored(self, known: StoredPrefix, slot: Slot, heads: int, dim: int) -> int:
        """As ``warm``, of this very prefix: the server compares the record while it reads.

        Once more where the same prefix was stored again since. Raises StoreUnavailable where
        another one took its place.
        """
        try:
            return self._client.warm(slot, heads, dim, known.whole)
        except CommandError:
            again = self._same_as_before()
            if again.whole == known.whole:
                raise
        self._stored = again
        return self._client.warm(slot, heads, dim, again.whole)

    def _find(self) -> StoredPrefix | None:
        source = self._pc.source
        if source is None:
            if self._client.has_record(self.namespace):
                raise ValueError(
                    f"namespace {self.namespace} holds a prefix of one model: only "
                    "PionPromptCache(model) can tell whether it is this one's"
                )
            return None
        found: StoredPrefix | None = source.stored(self.namespace, self.num_tokens)
        return found

    def _same_as_before(self) -> StoredPrefix:
        """What the namespace holds by now. Raises StoreUnavailable for another prefix."""
        try:
            found = self._find()
        except ValueError as error:
            raise StoreUnavailable(f"the prefix was replaced: {error}") from error
        if found is None or found != self._stored:
            raise StoreUnavailable(f"the prefix of namespace {self.namespace} is gone")
        return found
