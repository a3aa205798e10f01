"""The key a hit must match: everything that the K/V of a prefix depends on.

Named fields, plain JSON, so that a miss can say which one differs. Two processes
that loaded the same weights from different paths get the same identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.identity_code import code_digest
from pion_vllm_mlx.cache.identity_walk import (
    Walk,
    canonical_json,
    held_objects,
    same_objects,
    walk,
)
from pion_vllm_mlx.cache.identity_weights import array_digest
from pion_vllm_mlx.cache.layers import supported
from pion_vllm_mlx.cache.leaf import dtype_name

Identity = dict[str, Any]


def identity_digest(identity: Mapping[str, Any]) -> str:
    """32 hex digits that address an identity; they do not prove it."""
    return _digest(canonical_json(identity))


class ModelIdentity:
    """The identity of one model object, computed when first asked for and then kept.

    The weights are read once. Replaced arrays (an adapter, ``model.update``), replaced
    modules and changed settings are noticed at the next call, and new arrays are read;
    a weight array that is assigned into in place is not noticed: call ``forget`` then.
    ``extra`` are key parts that the caller knows: tokenizer, adapter, tenant.
    """

    def __init__(
        self, model: Any, *, vquant: str | None = None, extra: Mapping[str, str] | None = None
    ) -> None:
        self._model = model
        parts = {key: str(value) for key, value in (extra or {}).items()}
        self._asked: Identity = {**parts, "format": vquant or "native"}
        self._held: list[Any] = []
        self._digests: dict[int, tuple[mx.array, bytes]] = {}
        self._fields: Identity = {}

    def fields(self) -> Identity:
        """The named fields. Raises UnsupportedCache for a cache class that is not known."""
        held = held_objects(self._model)
        if not self._fields or not same_objects(held, self._held):
            self._fields = {**self._read(), **self._asked}
            self._held = held
        return self._fields

    def forget(self) -> None:
        """Reads everything again at the next call."""
        self._fields, self._held, self._digests = {}, [], {}

    def _read(self) -> Identity:
        found = walk(self._model)
        return {
            "weights": self._weights(found),
            "dtypes": sorted({dtype_name(array.dtype) for _, array in found.arrays}),
            "structure": _digest("\n".join(found.scalars)),
            "args": json.loads(canonical_json(_arguments(vars(self._model).get("args")))),
            "code": code_digest(found.classes),
            "cache": json.loads(canonical_json(supported(self._model))),
        }

    def _weights(self, found: Walk) -> str:
        known, self._digests = self._digests, {}
        total = hashlib.blake2b(digest_size=16)
        for path, array in found.arrays:
            entry = known.get(id(array)) or (array, array_digest(array))
            self._digests[id(array)] = entry
            total.update(f"{len(path)}:{path}".encode() + entry[1])
        return total.hexdigest()


def _arguments(args: Any) -> Any:
    if is_dataclass(args) and not isinstance(args, type):
        return asdict(args)
    return args


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
