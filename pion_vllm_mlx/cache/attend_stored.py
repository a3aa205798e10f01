"""Under which session ids the prefix of a namespace is attended. Needs no MLX.

``<namespace>_attn`` holds what somebody put there by hand. ``<namespace>_attn:<content>``
holds one prefix of one model: whatever is resident under it is that very prefix, whoever
made it resident, and another prefix of the same namespace has another id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.attend_request import Ancestor, Whole
from pion_vllm_mlx.cache.completion import CompletionRecord, TokenIds


def attention_session(namespace: str) -> str:
    """The session id of slots that are filled by hand."""
    return f"{namespace}_attn"


def content_session(namespace: str, identity: Mapping[str, Any], ids: TokenIds) -> str:
    """The session id of the slots of these tokens, of the model with this key."""
    key = json.dumps(identity, sort_keys=True, separators=(",", ":"), default=str)
    content = hashlib.sha256(key.encode() + b"\n")
    content.update(np.ascontiguousarray(ids, "<u4").tobytes())
    return f"{attention_session(namespace)}:{content.hexdigest()}"


@dataclass(frozen=True)
class StoredPrefix:
    """A prefix that the server has entirely; ``sid`` names its content.

    ``record`` is the SHA-256 of its completion record: of the same content, stored again,
    another one. ``shapes``: of each layer its heads, and the dimensions of K and V. ``chain``:
    the namespaces whose rows it begins with, where it is one of a lineage.
    """

    sid: str
    num_tokens: int
    record: str = field(compare=False)
    shapes: tuple[tuple[int, int, int], ...] = field(default=(), compare=False)
    chain: tuple[Ancestor, ...] | None = field(default=None, compare=False)

    @property
    def whole(self) -> Whole:
        """What WARM is to find of it."""
        return Whole(self.num_tokens, self.record, self.chain)

    @classmethod
    def of(cls, namespace: str, blob: bytes, record: CompletionRecord) -> StoredPrefix:
        """What ``blob``, decoded as ``record``, says is stored under the namespace."""
        shapes = tuple(shape_of(leaf) for leaf in record.leaves)
        sid = content_session(namespace, record.identity, record.ids)
        return cls(sid, int(record.ids.size), hashlib.sha256(blob).hexdigest(), shapes)


def shape_of(leaf: dict[str, Any]) -> tuple[int, int, int]:
    """Heads, and the dimensions of K and V, of a leaf in a record."""
    heads = max(1, int(leaf["heads"]))
    return heads, int(leaf["k"]) // heads, int(leaf["v"]) // heads
