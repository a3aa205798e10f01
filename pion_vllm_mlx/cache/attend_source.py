"""What a prompt cache knows about the prefix under a namespace: for attention where it lives.

A wrong prefix is never attended: what this process holds is found by namespace, key and
tokens, what the server holds by its completion record, and a session id made of both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pion_vllm_mlx.cache import inproc
from pion_vllm_mlx.cache.attend_stored import StoredPrefix, content_session
from pion_vllm_mlx.cache.completion import CompletionRecord, TokenIds
from pion_vllm_mlx.cache.identity import ModelIdentity, identity_digest
from pion_vllm_mlx.cache.store_client import StoreClient

_MOST_NAMESPACES = 4096


class AttendSource:
    """The prefixes of one model, by namespace. Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        client: StoreClient,
        identity: ModelIdentity,
        hold: Callable[[TokenIds, str], None],
        *,
        no_inproc: bool,
    ) -> None:
        """``hold`` has this process keep a stored prefix, if it has room for it."""
        self._client = client
        self._identity = identity
        self._hold = hold
        self._no_inproc = no_inproc
        self._asked: OrderedDict[str, TokenIds] = OrderedDict()
        self._mapped: set[str] = set()

    @property
    def digest(self) -> str:
        """What addresses the key of the model; where it can have none raises UnsupportedCache."""
        return identity_digest(self._identity.fields())

    def note(self, namespace: str, ids: TokenIds, *, mapped: bool = False) -> None:
        """These tokens were asked for under the namespace: no others will do from now on.

        ``mapped``: their rows came from files, so that this process kept no copy of them.
        """
        self._asked.pop(namespace, None)
        self._asked[namespace] = ids
        (self._mapped.add if mapped else self._mapped.discard)(namespace)
        if len(self._asked) > _MOST_NAMESPACES:
            self._mapped.discard(self._asked.popitem(last=False)[0])

    def local(self, namespace: str, num_tokens: int) -> list[Any] | None:
        """A fresh cache over the prefix in this process, or None where it has none.

        Raises ValueError where another number of tokens was asked for under the namespace.
        """
        ids = self._asked.get(namespace)
        if ids is None or self._no_inproc:
            return None
        _check_length(namespace, ids.size, num_tokens)
        key = namespace, identity_digest(self._identity.fields()), ids.tobytes()
        cache = inproc.PROCESS.get(key)
        if cache is None and namespace in self._mapped:
            self._mapped.discard(namespace)
            self._hold(ids, namespace)
            cache = inproc.PROCESS.get(key)
        return cache

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
        return StoredPrefix.of(namespace, blob, record)

    def asked(self, namespace: str) -> bool:
        """Whether tokens were asked for under the namespace."""
        return namespace in self._asked

    def session(self, namespace: str, ids: TokenIds) -> str:
        """The session id of these tokens of the model. Raises UnsupportedCache."""
        return content_session(namespace, self._identity.fields(), ids)


def _check_length(namespace: str, held: int, wanted: int) -> None:
    if held != wanted:
        raise ValueError(f"namespace {namespace} holds {held} tokens, {wanted} were asked for")
