"""What a prompt cache knows about the prefix under a namespace: for attention where it lives.

A wrong prefix is never attended: what this process holds is found by namespace, key and
tokens, what the server holds by its completion record, and a session id made of both.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pion_vllm_mlx.cache import inproc
from pion_vllm_mlx.cache.attend_methods import attention_session
from pion_vllm_mlx.cache.completion import CompletionRecord, TokenIds
from pion_vllm_mlx.cache.identity import ModelIdentity, identity_digest
from pion_vllm_mlx.cache.store_client import StoreClient

_MOST_NAMESPACES = 4096


@dataclass(frozen=True)
class StoredPrefix:
    """A prefix that the server has entirely, of this model; ``sid`` names its content.

    ``record`` is the SHA-256 of its completion record: of the same content, stored again,
    another one. ``shapes``: of each layer its heads, and the dimensions of K and V.
    """

    sid: str
    num_tokens: int
    record: str = field(compare=False)
    shapes: tuple[tuple[int, int, int], ...] = field(default=(), compare=False)


class AttendSource:
    """The prefixes of one model, by namespace. Not thread-safe: its owner holds a lock."""

    def __init__(self, client: StoreClient, identity: ModelIdentity, *, no_inproc: bool) -> None:
        self._client = client
        self._identity = identity
        self._no_inproc = no_inproc
        self._asked: OrderedDict[str, TokenIds] = OrderedDict()

    @property
    def digest(self) -> str:
        """What addresses the key of the model; where it can have none raises UnsupportedCache."""
        return identity_digest(self._identity.fields())

    def note(self, namespace: str, ids: TokenIds) -> None:
        """These tokens were asked for under the namespace: no others will do from now on."""
        self._asked.pop(namespace, None)
        self._asked[namespace] = ids
        if len(self._asked) > _MOST_NAMESPACES:
            self._asked.popitem(last=False)

    def local(self, namespace: str, num_tokens: int) -> list[Any] | None:
        """A fresh cache over the prefix in this process, or None where it has none.

        Raises ValueError where another number of tokens was asked for under the namespace.
        """
        ids = self._asked.get(namespace)
        if ids is None or self._no_inproc:
            return None
        _check_length(namespace, ids.size, num_tokens)
        digest = identity_digest(self._identity.fields())
        return inproc.PROCESS.get((namespace, digest, ids.tobytes()))

    def stored(self, namespace: str, num_tokens: int) -> StoredPrefix | None:
        """What the server has under the namespace; None for nothing, or a foreign prefix.

        Raises ValueError for a prefix of another model, of other tokens, or of another
        number, DamagedData and NewerFormat as records do, and what the client raises.
        """
        blob = self._client.record(namespace)
        if blob is None:
            return None
        record = CompletionRecord.decode(blob)
        identity = self._identity.fields()
        why = record.mismatch(identity, self._asked.get(namespace, record.ids))
        if why is not None:
            raise ValueError(f"namespace {namespace}: {why}")
        _check_length(namespace, record.ids.size, num_tokens)
        ids = np.ascontiguousarray(record.ids, "<u4").tobytes()
        content = hashlib.sha256(identity_digest(identity).encode() + ids).hexdigest()
        sid = f"{attention_session(namespace)}:{content}"
        shapes = tuple(_shape(leaf) for leaf in record.leaves)
        return StoredPrefix(sid, num_tokens, hashlib.sha256(blob).hexdigest(), shapes)

    def shape(self, namespace: str) -> tuple[int, int] | None:
        """Heads and dimension of the first layer's keys, as they are stored; None if unknown."""
        blob = self._client.record(namespace)
        leaves = [] if blob is None else CompletionRecord.decode(blob).leaves
        if not leaves:
            return None
        return _shape(leaves[0])[:2]


def _shape(leaf: dict[str, Any]) -> tuple[int, int, int]:
    heads = max(1, int(leaf["heads"]))
    return heads, int(leaf["k"]) // heads, int(leaf["v"]) // heads


def _check_length(namespace: str, held: int, wanted: int) -> None:
    if held != wanted:
        raise ValueError(f"namespace {namespace} holds {held} tokens, {wanted} were asked for")
