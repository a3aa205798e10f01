"""Why a prompt was not a longer hit: the nearest stored prefix, and what differs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.identity_names import first_difference
from pion_vllm_mlx.cache.lineage.client import LineageClient, as_text
from pion_vllm_mlx.cache.lineage.index import Found, Index, Names
from pion_vllm_mlx.cache.lineage.matching import Rules, match_of
from pion_vllm_mlx.cache.lineage.model_key import Key
from pion_vllm_mlx.cache.lineage.types import Explanation
from pion_vllm_mlx.errors import PionError

_MOST_MODELS = 64
_AROUND_TOKENS = 16
NOT_TOLD = "(not told)"


@dataclass(frozen=True)
class _Nearest:
    names: Names
    found: Found


def explain(
    client: LineageClient, key: Key, tokens: TokenIds, rules: Rules, then: Found | None = None
) -> Explanation:
    """Compares a prompt with what is stored, under this key and under others.

    A tenant is told nothing of what is not its own, not even that it is there; whoever has no
    key is told which field differs, but never whose it is.  With ``then`` it is compared with
    what was found of it then.  Raises StoreUnavailable, and DamagedData where that has been
    given up since.
    """
    own = Index(client, key.names).find(tokens, whole=True) if then is None else then
    match = match_of(own, tokens, key.names, rules)
    other = _nearest_of_others(client, key, tokens)
    if other is not None and other.found.common > own.common:
        return _other_key(client, key, other, match.length)
    return _own_key(client, key.names, own, tokens, (match.length, match.why))


def _own_key(
    client: LineageClient, names: Names, found: Found, tokens: TokenIds, match: tuple[int, str]
) -> Explanation:
    leaf = found.leaf
    if leaf is None:
        return Explanation(0, 0, 0, sentence=match[1])
    stored = Index(client, names).tokens_of(found.chain)
    return difference(tokens, stored, found.common, match)


def difference(tokens: TokenIds, stored: TokenIds, at: int, match: tuple[int, str]) -> Explanation:
    """Where a prompt leaves the nearest prefix, which begins with ``at`` tokens of it.

    ``match``: how many of them are restorable, and why not more.
    """
    restorable, why = match
    there = int(stored[at]) if at < stored.size else None
    asked = int(tokens[at]) if at < tokens.size else None
    around = tuple(stored[max(0, at - _AROUND_TOKENS) : at + _AROUND_TOKENS].tolist())
    if there is None or asked is None:
        sentence = f"the first {at} tokens are stored, and no more of this prompt"
    else:
        sentence = f"token {at} is {asked} where the nearest stored prefix has {there}"
    sentence = f"{sentence}; {why}" if why else sentence
    position = None if there is None and asked is None else at
    return Explanation(
        at, restorable, int(stored.size), position, there, asked, sentence=sentence,
        stored_tokens=around,
    )  # fmt: skip


def _other_key(client: LineageClient, key: Key, other: _Nearest, restorable: int) -> Explanation:
    """The nearest prefix is another model's or user's: which field of the key differs."""
    stored = _identity(client, other.names)
    field = first_difference(stored, key.identity)
    common = other.found.common
    leaf = other.found.leaf
    return Explanation(
        common=common,
        restorable=restorable,
        stored=leaf.end if leaf is not None else 0,
        key_field=field,
        stored_key=NOT_TOLD if field == "tenant" else _at(stored, field),
        asked_key=_at(key.identity, field),
        sentence=f"{common} tokens are stored under another key: {field} differs",
    )


def _may_know(client: LineageClient, asking: Key, names: Names) -> bool:
    """Whether what is stored under ``names`` is the asking tenant's; without one, always."""
    tenant = asking.identity.get("tenant")
    return tenant is None or _at(_identity(client, names), "tenant") == tenant


def _identity(client: LineageClient, names: Names) -> Any:
    """The key of another model as it was stored."""
    (raw,) = client.demand(names.route, [("GET", names.key("key"))])
    try:
        return json.loads(as_text(raw))
    except ValueError:
        return {}


def _nearest_of_others(client: LineageClient, own: Key, tokens: TokenIds) -> _Nearest | None:
    keys = [name for (some,) in client.everywhere([("KEYS", "pps:*:key")]) for name in some or ()]
    best: _Nearest | None = None
    for name in keys[:_MOST_MODELS]:
        names = Names(as_text(name).split(":")[1])
        try:
            if names == own.names or not _may_know(client, own, names):
                continue
            found = Index(client, names).find(tokens, whole=False)
        except PionError:
            continue
        if found.common and (best is None or found.common > best.found.common):
            best = _Nearest(names, found)
    return best


def _at(value: Any, path: str | None) -> Any:
    """The part of a key that a dotted path names; None where it has none."""
    for step in (path or "").replace("[", ".").replace("]", "").split("."):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
