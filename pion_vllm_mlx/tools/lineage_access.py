"""Conversations of all models in a store, without a model: who they belong to, how they begin.

The key of a model is kept beside its lineages as JSON: it says which caches the model has, so
that no weights are needed to look at, copy or restore what is stored under it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.by_blocks import is_unknown
from pion_vllm_mlx.cache.lineage.client import (
    LineageClient,
    as_int,
    as_text,
    connect,
    no_lineages,
    pairs_of,
)
from pion_vllm_mlx.cache.lineage.conversations import ends_here
from pion_vllm_mlx.cache.lineage.index import (
    LRU_KEY,
    SIZES_KEY,
    Index,
    Names,
    Segment,
    parse_tokens,
)
from pion_vllm_mlx.cache.lineage.types import LineageOptions
from pion_vllm_mlx.cache.store_client_endpoint import parse_url
from pion_vllm_mlx.config import data_dir
from pion_vllm_mlx.errors import CommandError, ConfigError, DamagedData, StoreUnavailable
from pion_vllm_mlx.tools.store_access import advising, url_of

#: the store that ``serve`` has where nothing else is named.
DEFAULT_URL = "embedded:"
DEADLINE_SECONDS = 10.0
#: segments read in one round trip.
_BATCH = 256


@dataclass(frozen=True)
class Listed:
    """One conversation: ``own_tokens`` of its ``tokens`` are its last segment's."""

    id: str
    model: str
    tenant: str
    tokens: int
    own_tokens: int
    num_bytes: int
    last_used: float
    pinned: bool
    anchor: bool
    segments: int
    checkpoints: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``bytes`` are those of its last segment."""
        fields = {**vars(self), "checkpoints": list(self.checkpoints), "bytes": self.num_bytes}
        del fields["num_bytes"]
        return fields


@contextmanager
def lineages(options: argparse.Namespace, *, create: bool = False) -> Iterator[LineageClient]:
    """A client of the store that the options name. Raises StoreUnavailable with advice.

    ``create``: an embedded one may begin in a folder that is not there yet.
    """
    url = url_of(options)
    place = parse_url(url)
    if place.embedded and not create:
        folder = Path(place.folder).expanduser() if place.folder else data_dir()
        if not folder.exists():
            raise StoreUnavailable(f"there is no store: {folder} does not exist")
    client = connect(LineageOptions(url=url, deadline_seconds=options.deadline))
    try:
        with advising():
            yield client
    finally:
        client.close()


class Shelf:
    """The conversations of one store. For one thread; every method raises StoreUnavailable."""

    def __init__(self, client: LineageClient) -> None:
        self.client = client
        self._identities: dict[str, dict[str, Any]] = {}

    def all(self) -> list[Listed]:
        """Every conversation, and every pinned beginning of others, the latest used first."""
        used: dict[str, float] = {}
        size: dict[str, int] = {}
        asked = [("ZRANGE", LRU_KEY, 0, -1, "WITHSCORES"), ("HGETALL", SIZES_KEY)]
        for ranked, sizes in self.client.everywhere(asked):
            used |= {as_text(name): float(as_text(score)) for name, score in pairs_of(ranked)}
            size |= {as_text(name): as_int(as_text(value), 0) for name, value in pairs_of(sizes)}
        if not used:
            self._require_lineages()
        found = {name: one for name, one in self._segments(list(used)).items() if is_shown(one)}
        return [
            self._listed(name, found[name], size.get(name, 0), used[name])
            for name in sorted(found, key=lambda name: used[name], reverse=True)
        ]

    def names_of(self, conversation: str) -> Names:
        """The keys of the model that a conversation belongs to. Raises ConfigError."""
        mid, _, number = conversation.rpartition(":")
        plain = number.isascii() and number.isdigit() and str(int(number)) == number
        if not mid or not plain or not mid.isalnum():
            raise ConfigError(
                f"{conversation!r} is no conversation: their ids are listed by "
                "pion-vllm-mlx conversations"
            )
        return Names(mid)

    def chain(self, conversation: str) -> tuple[Segment, ...]:
        """The segments of a conversation from its root on. Raises ConfigError, DamagedData."""
        index = Index(self.client, self.names_of(conversation))
        (leaf,) = index.segments([as_int(conversation.rpartition(":")[2])])
        if leaf is None:
            raise ConfigError(f"{conversation}: there is no such conversation")
        above = index.segments([number for number, _ in leaf.up])
        if None in above:
            raise DamagedData(f"{conversation}: what it stands on is gone")
        return (*(one for one in above if one is not None), leaf)

    def tokens(self, conversation: str) -> TokenIds:
        """All token ids of a conversation. Raises ConfigError, DamagedData."""
        chain = self.chain(conversation)
        return Index(self.client, self.names_of(conversation)).tokens_of(chain)

    def own_tokens(self, conversations: Sequence[str], most: int) -> list[TokenIds]:
        """The first tokens of the last segment of each."""
        found: list[TokenIds] = []
        for name in conversations:
            names, number = self.names_of(name), as_int(name.rpartition(":")[2])
            (raw,) = self.client.demand(names.route, [("HGET", names.segment(number), "toks")])
            found.append(parse_tokens(raw)[:most])
        return found

    def identity(self, mid: str) -> dict[str, Any]:
        """The key of a model, {} where the store has lost it."""
        if mid not in self._identities:
            names = Names(mid)
            (raw,) = self.client.demand(names.route, [("GET", names.key("key"))])
            try:
                value = json.loads(as_text(raw))
            except ValueError:
                value = None
            self._identities[mid] = value if isinstance(value, dict) else {}
        return self._identities[mid]

    def standing_on(self, conversation: str) -> list[str]:
        """The segments that continue a conversation, or leave it somewhere."""
        names, leaf = self.names_of(conversation), self.chain(conversation)[-1]
        return [names.member(kid.number) for kid in leaf.kids]

    # -- inside ---------------------------------------------------------------

    def _require_lineages(self) -> None:
        """Raises StoreUnavailable where a server cannot have any."""
        names = Names("0")
        (reply,) = self.client.pipeline(names.route, [("KV.PREFIX.LONGEST", names.index, b"")])
        if isinstance(reply, CommandError) and not is_unknown(reply):
            raise no_lineages(reply)

    def _segments(self, members: list[str]) -> dict[str, Segment]:
        """The segments that the keys over all models name."""
        by_model: dict[str, list[int]] = {}
        for name in members:
            mid, _, number = name.rpartition(":")
            by_model.setdefault(mid, []).append(as_int(number))
        found: dict[str, Segment] = {}
        for mid, numbers in by_model.items():
            names = Names(mid)
            for first in range(0, len(numbers), _BATCH):
                for segment in Index(self.client, names).segments(numbers[first : first + _BATCH]):
                    if segment is not None:
                        found[names.member(segment.number)] = segment
        return found

    def _listed(self, name: str, segment: Segment, size: int, used: float) -> Listed:
        identity = self.identity(name.rpartition(":")[0])
        return Listed(
            id=name,
            model=model_name(identity),
            tenant=str(identity.get("tenant", "")),
            tokens=segment.end,
            own_tokens=segment.end - segment.base,
            num_bytes=size,
            last_used=used,
            pinned=segment.pinned,
            anchor=segment.kind == "anchor",
            segments=len(segment.up) + 1,
            checkpoints=tuple(one.length for one in segment.checkpoints),
        )


def model_name(identity: dict[str, Any]) -> str:
    """What a key says of its model: its type and the beginning of its weights' hash."""
    args = identity.get("args")
    kind = args.get("model_type") if isinstance(args, dict) else None
    weights = str(identity.get("weights", ""))[:8]
    return "-".join(part for part in (str(kind or ""), weights) if part) or "?"


def may_be_of(config: dict[str, Any], identity: dict[str, Any]) -> bool:
    """Whether a key may be that of the model with this ``config.json``: for what is shown only."""
    args = identity.get("args")
    if not isinstance(args, dict):
        return False
    known = [name for name in args if name in config]
    return bool(known) and all(
        json.dumps(args[name], sort_keys=True) == json.dumps(config[name], sort_keys=True)
        for name in known
        if not isinstance(config[name], dict | list)
    )


def is_shown(segment: Segment) -> bool:
    """Whether a conversation ends in a segment, or it can be unpinned."""
    return ends_here(segment) or segment.pinned or segment.kind == "anchor"
