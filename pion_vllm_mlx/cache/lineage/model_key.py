"""The key of a model's lineages, read once and again when the model changes.

Tokenizer and chat template are no parts of it.  What is stored is found by token ids, which are
compared before a hit, and K/V depend on the ids alone: another template or tokenizer gives other
ids, and so a miss from there on, or the same ids, and then the same rows.  As parts of the key
they would take every conversation from who changes a word of the template's closing lines.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from pion_vllm_mlx.cache.identity import ModelIdentity, identity_digest
from pion_vllm_mlx.cache.identity_walk import canonical_json
from pion_vllm_mlx.cache.lineage.index import Names, model_digest
from pion_vllm_mlx.cache.lineage.types import LineageOptions

NATIVE = "native"
"""The format in a key whose rows have the cache's own dtype."""


@dataclass(frozen=True)
class Key:
    """All that the K/V depends on, by name, and the keys it is stored under."""

    identity: dict[str, Any]
    names: Names


class ModelKey:
    """The key of a model, with its draft model. On MLX's thread."""

    def __init__(self, model: Any, draft_model: Any, options: LineageOptions) -> None:
        parts = dict(options.key_parts)
        if options.kv_bits is not None:
            parts["kv"] = f"{options.kv_bits} bits, groups of {options.kv_group_size}"
        self._model = ModelIdentity(model, vquant=options.vquant, extra=parts)
        self._draft = ModelIdentity(draft_model) if draft_model is not None else None
        self._known: tuple[Any, Any, Key] | None = None

    def current(self) -> Key:
        """The key as the model is now. Raises UnsupportedCache."""
        fields = self._model.fields()
        draft = self._draft.fields() if self._draft is not None else None
        if self._known is not None:
            known_fields, known_draft, key = self._known
            if known_fields is fields and known_draft is draft:
                return key
        identity = dict(fields)
        if draft is not None:
            identity["draft"] = identity_digest(draft)
        key = Key(identity, names_of(identity))
        self._known = fields, draft, key
        return key


def names_of(identity: dict[str, Any]) -> Names:
    """The keys under which the lineages of a key are stored. Raises KeyError for half a key."""
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    form = identity["format"]
    return Names(model_digest(digest, ",".join(identity["dtypes"]) if form == NATIVE else form))
