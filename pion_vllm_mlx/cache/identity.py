"""The key a hit must match: everything that the K/V of a prefix depends on.

Named fields, plain JSON, so that a miss can say which one differs. Two processes
that loaded the same weights from different paths get the same identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.identity_buffers import Buffers
from pion_vllm_mlx.cache.identity_code import code_digest
from pion_vllm_mlx.cache.identity_live import LiveCode
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
from pion_vllm_mlx.errors import ConfigError

Identity = dict[str, Any]

_OWN_PARTS = frozenset(
    {"weights", "dtypes", "structure", "args", "code", "functions", "mlx", "cache", "format"}
)


def identity_digest(identity: Mapping[str, Any]) -> str:
    """32 hex digits that address an identity; they do not prove it."""
    return _digest(canonical_json(identity))


class ModelIdentity:
    """The identity of one model object, computed when first asked for and then kept.

    The weights are read once. Replaced arrays (an adapter, ``model.update``), replaced
    modules, functions and changed settings are noticed at the next call, and new arrays are read.
    So are arrays that were assigned into, except under CUDA: call ``forget`` there.
    ``extra`` are key parts that the caller knows: tokenizer, adapter, tenant. Raises
    ConfigError for one that has the name of a part of the model's own.
    """

    def __init__(
        self, model: Any, *, vquant: str | None = None, extra: Mapping[str, str] | None = None
    ) -> None:
        self._model = model
        parts = {key: str(value) for key, value in (extra or {}).items()}
        taken = _OWN_PARTS & parts.keys()
        if taken:
            raise ConfigError(f"key_parts may not replace {', '.join(sorted(taken))}")
        self._asked: Identity = {**parts, "format": vquant or "native"}
        self._held: list[Any] = []
        self._buffers = Buffers()
        self._digests: dict[int, tuple[mx.array, bytes]] = {}
        self._live: LiveCode | None = None
        self._fields: Identity = {}

    def fields(self) -> Identity:
        """The named fields.

        Raises UnsupportedCache for a cache class that is not known, and for code that was
        put in place at run time and is not the same in every process.
        """
        held = held_objects(self._model)
        for array in self._buffers.changed():
            self._digests.pop(id(array), None)
            self._fields = {}
        running = self._live is not None and self._live.unchanged()
        if not (self._fields and running and same_objects(held, self._held)):
            self._fields = {}  # where reading raises, the next call reads again
            found = walk(self._model)
            self._live = LiveCode(found.code)
            self._fields = {**self._read(found, self._live), **self._asked}
            self._held = held
            arrays = [array for array, _ in self._digests.values()]
            self._buffers = Buffers(arrays + self._live.arrays)
        return self._fields

    def forget(self) -> None:
        """Reads everything again at the next call."""
        self._fields, self._held, self._digests, self._buffers = {}, [], {}, Buffers()
        self._live = None

    def _read(self, found: Walk, live: LiveCode) -> Identity:
        return {
            "weights": self._weights(found),
            "dtypes": sorted({dtype_name(array.dtype) for _, array in found.arrays}),
            "structure": _digest("\n".join(found.scalars)),
            "args": _readable(vars(self._model).get("args")),
            "code": code_digest(found.code),
            "functions": live.digest,
            "mlx": str(vars(mx)["__version__"]),
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


def _readable(args: Any) -> Any:
    """The arguments of a model as plain JSON, to name the one that differs."""
    if isinstance(args, Mapping):
        return {str(key): _readable(value) for key, value in args.items()}
    if isinstance(args, list | tuple):
        return [_readable(value) for value in args]
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        return {f.name: _readable(getattr(args, f.name)) for f in dataclasses.fields(args)}
    return json.loads(canonical_json(args))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
