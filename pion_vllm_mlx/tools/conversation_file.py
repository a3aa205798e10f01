"""Conversations as files of mlx-lm, and back; and branches. Needs MLX, and no model.

The file is what mlx-lm's ``save_prompt_cache`` of the installed version writes. Its metadata
keeps the conversation's key, its token ids and a checksum of every array: the completion record
of the whole. Under that key, and no other, an import stores it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from mlx_lm.models.cache import load_prompt_cache

from pion_vllm_mlx.cache.completion import CompletionRecord, Run, StateSum, TokenIds
from pion_vllm_mlx.cache.lanes_codec import encode_rows, layout_of
from pion_vllm_mlx.cache.layers import StoredCache, dismantle
from pion_vllm_mlx.cache.lineage.branching import Branching
from pion_vllm_mlx.cache.lineage.capture import Since, capture
from pion_vllm_mlx.cache.lineage.counters import Counters
from pion_vllm_mlx.cache.lineage.index import Found, Index, Names
from pion_vllm_mlx.cache.lineage.matching import Rules, match_of
from pion_vllm_mlx.cache.lineage.model_key import NATIVE, names_of
from pion_vllm_mlx.cache.lineage.reader import Reader
from pion_vllm_mlx.cache.lineage.shape import Shape
from pion_vllm_mlx.cache.lineage.types import LineageOptions, Match
from pion_vllm_mlx.cache.lineage.writer import Job, Writer
from pion_vllm_mlx.cache.slots_state import encode_state
from pion_vllm_mlx.config import ClientSwitches
from pion_vllm_mlx.errors import ConfigError, DamagedData
from pion_vllm_mlx.tools.lineage_access import Shelf
from pion_vllm_mlx.tools.prompt_file import difference, read_file, write_file

NO_BUDGET = 0
"""What is brought in by hand throws nothing out; the next store of serve keeps its budget."""


@dataclass(frozen=True)
class Whole:
    """A conversation, restored: ``caches`` hold exactly ``tokens``."""

    identity: dict[str, Any]
    tokens: TokenIds
    caches: list[Any]


@dataclass(frozen=True)
class Imported:
    """Where a file's conversation is now; ``new``: it was not there."""

    conversation: str
    tokens: int
    new: bool


def restore(shelf: Shelf, conversation: str) -> Whole:
    """All of a conversation; every byte verified.

    Raises ConfigError where there is no such conversation, or not all of it can be restored;
    DamagedData, NewerFormat, StoreUnavailable.
    """
    chain, names = shelf.chain(conversation), shelf.names_of(conversation)
    identity = _identity(shelf, names)
    tokens = Index(shelf.client, names).tokens_of(chain)
    size = int(tokens.size)
    blob = shelf.client.record(names.namespace(chain[-1].number))
    if blob is None:
        raise DamagedData(f"{conversation}: its completion record is gone")
    shape = Shape(CompletionRecord.decode(blob).slots)
    match = _match(Found(chain, size), tokens, names, shape)
    if match.length < size:
        raise ConfigError(
            f"{conversation}: only {match.length} of {size} tokens can be restored: {match.why}"
        )
    reader = Reader(shelf.client, shape, ClientSwitches.from_environment(), Counters())
    loaded = reader.load(match, identity, 1)
    if loaded is None or loaded.length != size:
        raise ConfigError(f"{conversation}: its {size} tokens cannot be restored any more")
    return Whole(identity, tokens, loaded.caches)


def export(shelf: Shelf, conversation: str, path: Path) -> int:
    """Writes a conversation to a file, which is complete or not there; its tokens.

    Raises UnsupportedCache where mlx-lm cannot keep it, OSError, and as ``restore``.
    """
    whole = restore(shelf, conversation)
    stored = dismantle(whole.caches)
    if not write_file(path, conversation, _record(whole, stored), whole.caches):
        raise DamagedData(f"{conversation}: what was restored changed while it was written")
    return int(whole.tokens.size)


def read_key(path: Path) -> tuple[CompletionRecord, Names]:
    """What a file says of itself, after all of it was proved.

    Raises ConfigError for one that is no exported conversation; DamagedData, NewerFormat.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    conversation, record, _ = read_file(path)
    try:
        names = names_of(record.identity)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no exported conversation: its key lacks {error}") from error
    if conversation.rpartition(":")[0] != names.mid:
        raise ConfigError(
            f"{path} is no exported conversation, or its key was changed: "
            f"it is of {conversation!r}, and its key is that of {names.mid}"
        )
    return record, names


def bring_in(shelf: Shelf, path: Path) -> Imported:
    """Stores the conversation of a file under its own key. Raises as ``read_key``, PionError."""
    record, names = read_key(path)
    caches: list[Any] = list(load_prompt_cache(str(path)))  # type: ignore[no-untyped-call]
    fault = difference(record, dismantle(caches))
    if fault is not None:
        raise DamagedData(f"{path}: {fault}")
    size = int(record.ids.size)
    captured = capture(caches, size, Since(), Shape(record.slots), _vquant(record.identity))
    job = Job(record.ids, "final", captured, record.identity, names)
    written = Writer(shelf.client, NO_BUDGET, Counters()).write(job)
    for namespace in written:
        shelf.client.publish(namespace)
    found = Index(shelf.client, names).find(record.ids, whole=False)
    if found.leaf is None or found.common < size:
        raise DamagedData(f"{path}: the store does not find what it was given")
    return Imported(names.member(found.leaf.number), size, bool(written))


def branch(shelf: Shelf, conversation: str, length: int | None) -> tuple[str, int]:
    """A new conversation of the first ``length`` tokens (None: of all); its id and tokens.

    Raises ConfigError for a length that it has not, DamagedData, StoreUnavailable.
    """
    leaf, names = shelf.chain(conversation)[-1], shelf.names_of(conversation)
    least = LineageOptions().min_gain
    if length is not None and length < least:
        raise ConfigError(f"a branch of {length} tokens is never restored: at least {least}")
    length = leaf.end if length is None else length
    branching = Branching(shelf.client, names, _identity(shelf, names))
    try:
        number = branching.branch(leaf, length)
    except ValueError as error:
        raise ConfigError(f"{conversation}: {error}") from error
    shelf.client.publish(names.namespace(number))
    return names.member(number), length


# -- inside ---------------------------------------------------------------------


def _identity(shelf: Shelf, names: Names) -> dict[str, Any]:
    """The key of a model, checked against the names that were made of it."""
    identity = shelf.identity(names.mid)
    try:
        proved = names_of(identity).mid == names.mid
    except (KeyError, TypeError):
        proved = False
    if not proved:
        raise DamagedData(f"the key of model {names.mid} is not what its name was made of")
    return identity


def _match(found: Found, tokens: TokenIds, names: Names, shape: Shape) -> Match:
    """The match of all ``tokens``: of a prompt that goes on after them."""
    longer = np.append(tokens, np.uint32(0)).astype("<u4")
    return match_of(found, longer, names, Rules(shape, min_gain=1, checkpoints=True))


def _vquant(identity: dict[str, Any]) -> str | None:
    form = identity["format"]
    return None if form == NATIVE else str(form)


def _record(whole: Whole, stored: StoredCache) -> CompletionRecord:
    """The completion record of a cache in its own dtypes."""
    leaves = {leaf.layer: leaf for leaf in stored.leaves}
    runs = []
    for rows in stored.rows:
        leaf = leaves[rows.layer]
        form = (leaf.format_of(rows.side), layout_of(leaf, rows.side))
        crc = crc32c(encode_rows(rows, leaf))
        runs.append(Run(rows.layer, rows.side, rows.start, rows.count, *form, crc))
    states = []
    for slot, arrays in stored.states.items():
        blob = encode_state("ArraysCache", arrays)
        states.append(StateSum(slot, crc32c(blob), len(blob)))
    shown = [leaf.as_json() for leaf in stored.leaves]
    return CompletionRecord(whole.identity, whole.tokens, stored.slots, shown, runs, states)
