"""What the lineage store takes and gives: options, matches, cuts, restored caches.

Plain values; nothing here knows a server or touches an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.config import GIGABYTE
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.formats import storage_format

if TYPE_CHECKING:
    from pion_vllm_mlx.cache.lineage.index import Found

CutKind = Literal["guard", "anchor", "divergence"]
KeepKind = Literal["guard", "anchor", "divergence", "final"]

KEEP_KINDS: tuple[KeepKind, ...] = ("guard", "anchor", "divergence", "final")


@dataclass(frozen=True)
class LineageOptions:
    """Settings of a lineage store.

    ``budget_bytes`` caps what all lineages of the server, or of a worker of it, hold together
    (0: the server's own limits only). A prefix of fewer than ``min_gain`` tokens is neither kept
    nor restored. ``vquant`` is a storage format, in upper or lower case, None the cache's own
    dtype. ``key_parts`` are further parts of the key: tokenizer, template, adapter, API key or
    tenant.
    ``checkpoints=False`` gives exact-prefix behaviour. ``resume=False`` keeps no journal,
    ``preload_bytes`` of the conversations that were used last are read into memory at the start.
    ``durable`` has every store flushed to stable storage. ``queue_bytes`` caps what waits to be
    written. ``kv_bits`` and ``kv_group_size`` say that the engine quantizes its KV caches, from
    the first token on where ``quantized_kv_start`` is 0. From a later one on it has plain caches
    first and rewrites them at a boundary that the step of its prefill sets: nothing is stored.
    """

    url: str = "embedded:"
    budget_bytes: int = 4 * GIGABYTE
    min_gain: int = 16
    vquant: str | None = None
    deadline_seconds: float = 2.0
    username: str | None = None
    password: str | None = None
    key_parts: Mapping[str, str] = field(default_factory=dict)
    checkpoints: bool = True
    resume: bool = True
    durable: bool = False
    preload_bytes: int = 0
    queue_bytes: int = 2 * GIGABYTE
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0

    def __post_init__(self) -> None:
        if min(self.budget_bytes, self.preload_bytes) < 0 or self.queue_bytes < 1:
            raise ConfigError("a budget is no negative number, and a queue not empty")
        if self.min_gain < 1:
            raise ConfigError("min_gain must be at least 1")
        if not 0 < self.deadline_seconds <= 86_400:
            raise ConfigError("deadline_seconds lies between 0 and 86,400")
        if self.vquant is not None:
            object.__setattr__(self, "vquant", storage_format(self.vquant))


@dataclass(frozen=True)
class Checkpoint:
    """A recurrent state at one token boundary of a lineage; ``sid`` is its place."""

    length: int
    kind: KeepKind
    sid: str


@dataclass(frozen=True)
class Piece:
    """One segment of a chain as far as a prompt agrees with it.

    Its rows ``[0, end - base)`` are the tokens ``[base, end)`` of the prompt.
    """

    segment: int
    namespace: str
    base: int
    end: int


@dataclass(frozen=True)
class Match:
    """The longest stored prefix of a prompt, and how much of it can be restored.

    ``common`` tokens agree with something stored; ``length`` of them, at most all but the
    last of the prompt, can be restored, 0 for none. ``why`` says why it is not more, "" where
    nothing is missing; ``withheld`` tokens might be had but for that: there was no store, no room
    for them, or its server evicted them. ``nearest`` is what the index had like it, for
    ``explain``. ``chain`` runs from the root to the leaf, which ends at ``stored`` tokens.
    """

    tokens: TokenIds
    common: int = 0
    length: int = 0
    why: str = ""
    chain: tuple[Piece, ...] = ()
    checkpoint: Checkpoint | None = None
    stored: int = 0
    withheld: int = 0
    nearest: Found | None = field(default=None, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.length > 0


@dataclass(frozen=True)
class Restored:
    """A cache out of the store: exactly the types that ``make_prompt_cache`` builds.

    ``caches`` hold ``length`` tokens, which may be fewer than the match promised. ``lane``
    says how the rows came (mapped, stored, range), ``num_bytes`` how many, ``ms`` how long
    it took. With a draft model its caches follow those of the model.
    """

    caches: list[Any]
    length: int
    lane: str
    num_bytes: int
    ms: float


@dataclass(frozen=True)
class Cut:
    """Where an engine has to hand over its cache while it prefills."""

    position: int
    kind: CutKind


@dataclass(frozen=True)
class Conversation:
    """A leaf of a lineage: ``tokens`` from its root on, ``num_bytes`` of its own segment."""

    id: str
    tokens: int
    num_bytes: int
    last_used: float
    pinned: bool
    segments: int
    checkpoints: tuple[Checkpoint, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Why a prompt is not a longer hit.

    ``common`` tokens of the prompt are those of the nearest stored prefix, which has
    ``stored`` tokens; at ``position`` the first of them differs: ``stored_token`` there
    against ``asked_token`` (None past an end). ``key_field`` names the first field of the key
    that differs where the nearest prefix is another model's or user's, with both values.
    """

    common: int
    restorable: int
    stored: int
    position: int | None = None
    stored_token: int | None = None
    asked_token: int | None = None
    key_field: str | None = None
    stored_key: Any = None
    asked_key: Any = None
    sentence: str = ""
    stored_tokens: tuple[int, ...] = ()
