"""Journals: what a reply had come to when its process ended."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.lineage.index import Names, parse_tokens

KEEP_SECONDS = 86_400


class Journal:
    """The journals of one model. Raises StoreUnavailable, CommandError."""

    def __init__(self, client: LineageClient, names: Names) -> None:
        self._client = client
        self._names = names

    def save(self, key: str, generated: Sequence[int]) -> None:
        """Notes the ids of a reply, for a day."""
        ids = np.asarray(generated, "<u4").tobytes()
        self._ask("SET", self._name(key), ids, "EX", KEEP_SECONDS)

    def load(self, key: str) -> list[int] | None:
        """The ids that were noted, or None."""
        found = self._ask("GET", self._name(key))
        return parse_tokens(found).tolist() if isinstance(found, bytes) and found else None

    def drop(self, key: str) -> None:
        """Forgets a journal."""
        self._ask("DEL", self._name(key))

    def _ask(self, *command: object) -> object:
        return self._client.demand(self._names.route, [command])[0]

    def _name(self, key: str) -> str:
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=12)
        return self._names.key(f"jr:{digest.hexdigest()}")
