"""The lineage index: which segments there are, and which of them a prompt agrees with.

=============================  ==================================================
key                            content
=============================  ==================================================
``pps:<mid>:layout``           layers, KV heads, head width, dtype, encoding
``pps:<mid>:key``              the model's key as JSON, for ``explain``
``pps:<mid>:nextseg``          counter of segment ids
``pps:<mid>:seg:<n>``          hash: the fields of ``Segment``
``pps:<mid>:blk``              hash: chained block hash → ``<segment>:<end>``
``pps:<mid>:roots``            hash: hash of the first 16 tokens → root
``pps:<mid>:loose``            zset: namespaces that no segment names (yet), by time
``pps:<mid>:lock:<x>``         who writes to the tree whose root is at field ``x``
``pps:<mid>:jr:<key>``         journal of a reply
``pps:<mid>:rates``            hash: machine → prompt tokens a second
``pps:lru``, ``pps:sizes``     zset and hash over all models: last use, bytes
``pps:anchors``                zset over all models: anchors by last use
=============================  ==================================================

What is read here only addresses: the completion records prove.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.blocks import common_tokens, root_field
from pion_vllm_mlx.cache.lineage.by_blocks import is_unknown, segments_by_blocks
from pion_vllm_mlx.cache.lineage.client import (
    LineageClient,
    as_int,
    as_text,
    no_lineages,
    require_array,
)
from pion_vllm_mlx.cache.lineage.coverage import Ranges, Window, from_text
from pion_vllm_mlx.cache.lineage.types import KEEP_KINDS, Checkpoint, KeepKind, Piece
from pion_vllm_mlx.errors import CommandError, DamagedData

log = logging.getLogger(__name__)

LRU_KEY, SIZES_KEY, ANCHORS_KEY = "pps:lru", "pps:sizes", "pps:anchors"
WAY = "way"
"""The kind of a segment whose own conversation was deleted: it only leads to its children."""
FIELDS = ("parent", "base", "len", "up", "kids", "ckpts", "win", "kind", "pin", "under")
_MOST_STEPS = 64


@dataclass(frozen=True)
class Names:
    """The keys and namespaces of one model's lineages."""

    mid: str

    @property
    def index(self) -> str:
        return f"pps:{self.mid}"

    @property
    def route(self) -> str:
        """The namespace by which a client finds the worker of this index."""
        return self.namespace(1)

    def key(self, name: str) -> str:
        return f"pps:{self.mid}:{name}"

    def segment(self, number: int) -> str:
        return f"pps:{self.mid}:seg:{number}"

    def namespace(self, number: int) -> str:
        return f"pps{self.mid}s{number}"

    def member(self, number: int) -> str:
        """The name of a segment in the keys over all models."""
        return f"{self.mid}:{number}"


def model_digest(key_digest: str, vquant: str) -> str:
    """The ``mid`` of a model key: 12 hex digits, an address."""
    text = f"{key_digest!r}|{vquant}"
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Kid:
    """A child of a segment: where it leaves its parent, and by which token."""

    number: int
    base: int
    first: int


@dataclass(frozen=True)
class Segment:
    """Tokens ``[base, end)`` of a lineage on top of ``parent`` (-1: none).

    ``up`` are its ancestors from the root on, each with its base. ``windows`` say which
    absolute positions have rows of sliding windows.
    """

    number: int
    parent: int
    base: int
    end: int
    up: tuple[tuple[int, int], ...] = ()
    kids: tuple[Kid, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    windows: Mapping[Window, Ranges] = field(default_factory=dict)
    kind: str = ""
    pinned: bool = False
    pinned_under: bool = False


@dataclass(frozen=True)
class Gone:
    """A segment of the index whose rows the server has no more, and its word for why.

    A prompt agrees with it up to ``end``.
    """

    segment: Segment
    reason: str
    end: int

    @property
    def evicted(self) -> bool:
        return self.reason == "evicted"

    @property
    def sentence(self) -> str:
        """Why a prompt cannot be had from where the segment begins."""
        if self.evicted:
            whose = "the store's server evicted it, whose --disk-budget or --max-sessions is short"
        else:
            whose = f"the store's server has it no more: {self.reason}"
        return f"from token {self.segment.base} on {whose}"


@dataclass(frozen=True)
class Found:
    """``common`` tokens of a prompt agree with the chain, which runs from root to leaf.

    ``gone`` went on from there.
    """

    chain: tuple[Segment, ...] = ()
    common: int = 0
    gone: Gone | None = None

    @property
    def leaf(self) -> Segment | None:
        return self.chain[-1] if self.chain else None

    @property
    def ends(self) -> list[int]:
        """As far as each segment of the chain agrees with the prompt."""
        return [segment.base for segment in self.chain[1:]] + [self.common] * bool(self.chain)

    def pieces(self, names: Names, length: int) -> tuple[Piece, ...]:
        """The chain as far as the first ``length`` tokens need it."""
        return tuple(
            Piece(segment.number, names.namespace(segment.number), segment.base, min(end, length))
            for segment, end in zip(self.chain, self.ends, strict=True)
            if segment.base < length
        )


class Index:
    """Reads the index of one model. Raises StoreUnavailable where the server is none."""

    def __init__(self, client: LineageClient, names: Names) -> None:
        self._client = client
        self.names = names

    def find(self, tokens: TokenIds, *, whole: bool) -> Found:
        """The chain that agrees with the most tokens.

        ``whole`` reads the fields of all of its segments, else only those of the leaf.
        """
        number, common = self._nearest(tokens)
        if number < 0:
            return Found()
        segment, own, why_gone = self._read(number, is_held=common > 0)
        if segment is None:
            return Found()
        common = common or segment.base + common_tokens(own, tokens[segment.base :])
        if common <= segment.base:
            return Found()
        if why_gone:
            return Found(gone=Gone(segment, why_gone, common))
        leaf, common, gone = self._descend(segment, tokens, common)
        return Found((*self._above(leaf, whole), leaf), common, gone)

    def gone(self, segment: Segment) -> Gone | None:
        """The segment, where the server has its rows no more."""
        namespace = self.names.namespace(segment.number)
        (reply,) = self._client.pipeline(self.names.route, [("KV.PREFIX.EXPLAIN", namespace)])
        why = _why_gone(reply)
        return Gone(segment, why, segment.end) if why else None

    def segments(self, numbers: Sequence[int]) -> list[Segment | None]:
        """Several segments in one round trip."""
        commands = [("HMGET", self.names.segment(number), *FIELDS) for number in numbers]
        replies = self._client.demand(self.names.route, commands)
        return [
            parse_segment(self.names, number, require_array(reply, "HMGET"))
            for number, reply in zip(numbers, replies, strict=True)
        ]

    def tokens_of(self, chain: Sequence[Segment]) -> TokenIds:
        """The tokens of a chain from its root on, to the end of its last segment."""
        commands = [("HGET", self.names.segment(one.number), "toks") for one in chain]
        parts = [parse_tokens(reply) for reply in self._client.demand(self.names.route, commands)]
        bounds = [one.base for one in chain[1:]] + [chain[-1].end]
        return np.concatenate(
            [part[: end - one.base] for part, one, end in zip(parts, chain, bounds, strict=True)]
        )

    def tokens_up_to(self, segment: Segment) -> TokenIds:
        """All tokens from the root to the end of a segment. Raises DamagedData."""
        return self.tokens_of([*self._above(segment, whole=True), segment])

    # -- inside ---------------------------------------------------------------

    def _nearest(self, tokens: TokenIds) -> tuple[int, int]:
        """A segment to begin with, and how much of the prompt its chain agrees with.

        Common is 0 where that is not known yet; the segment is -1 where there is none.
        """
        first = root_field(tokens)
        commands: list[Sequence[Any]] = [
            ("KV.PREFIX.LONGEST", self.names.index, tokens.astype("<u4").tobytes())
        ]
        if first is not None:
            commands.append(("HGET", self.names.key("roots"), first))
        longest, *root = self._client.pipeline(self.names.route, commands, tokens.nbytes)
        if isinstance(longest, CommandError):
            if not is_unknown(longest):
                raise no_lineages(longest) from longest
            held = self._held_by_blocks(tokens)
            return (held if held >= 0 or not root else as_int(as_text(root[0]))), 0
        length, namespace, _ = require_array(longest, "KV.PREFIX.LONGEST")
        if namespace is not None and length:
            return as_int(as_text(namespace).rpartition("s")[2]), as_int(length, 0)
        return as_int(as_text(root[0])) if root else -1, 0

    def _held_by_blocks(self, tokens: TokenIds) -> int:
        """The segment of the longest block, of those that are there; -1 where there is none."""
        if not self._client.told_no_longest:
            self._client.told_no_longest = True
            log.warning("the server has no KV.PREFIX.LONGEST: prefixes are found by their blocks")
        numbers = segments_by_blocks(self._client, self.names, tokens)
        held = zip(numbers, self.segments(numbers) if numbers else (), strict=True)
        return next((number for number, segment in held if segment is not None), -1)

    def _read(
        self, number: int, *, is_held: bool = False
    ) -> tuple[Segment | None, TokenIds, str]:
        """A segment, its tokens, and why its rows are gone, "" where they are not.

        ``is_held``: the server has just said that it has them; then without tokens.
        """
        names = FIELDS if is_held else (*FIELDS, "toks")
        commands = [("HMGET", self.names.segment(number), *names)]
        if not is_held:
            commands.append(("KV.PREFIX.EXPLAIN", self.names.namespace(number)))
        reply, *explained = self._client.pipeline(self.names.route, commands)
        if isinstance(reply, CommandError):
            raise reply
        values = require_array(reply, "HMGET")
        own = parse_tokens(None if is_held else values[-1])
        segment = parse_segment(self.names, number, values[: len(FIELDS)])
        return segment, own, _why_gone(*explained) if explained else ""

    def _descend(
        self, segment: Segment, tokens: TokenIds, common: int
    ) -> tuple[Segment, int, Gone | None]:
        """Follows the children that go on where a segment ends to agree, to one that is gone.

        Blocks of 64 cannot tell siblings apart that part within one.
        """
        for _ in range(_MOST_STEPS):
            if common >= tokens.size:
                break
            fits = [
                kid
                for kid in segment.kids
                if kid.base == common and kid.first == int(tokens[common])
            ]
            if not fits:
                break
            kid, own, why_gone = self._read(fits[-1].number)
            if kid is None or kid.base != common or kid.parent != segment.number:
                break
            shared = common_tokens(own, tokens[common:])
            if not shared:
                break
            if why_gone:
                return segment, common, Gone(kid, why_gone, common + shared)
            segment, common = kid, common + shared
        return segment, common, None

    def _above(self, leaf: Segment, whole: bool) -> list[Segment]:
        """The ancestors of a segment from the root on."""
        if not whole:
            bases = [base for _, base in (*leaf.up[1:], (leaf.number, leaf.base))][: len(leaf.up)]
            return [
                Segment(number, -1, base, end)
                for (number, base), end in zip(leaf.up, bases, strict=True)
            ]
        found = self.segments([number for number, _ in leaf.up])
        if any(one is None for one in found):
            raise DamagedData(f"lineage {self.names.mid}: an ancestor of {leaf.number} is gone")
        return [one for one in found if one is not None]


def parse_segment(names: Names, number: int, values: Sequence[Any]) -> Segment | None:
    """A segment out of its fields; None where there is none, or it makes no sense."""
    texts = dict(zip(FIELDS, map(as_text, values), strict=True))
    base, length = as_int(texts["base"]), as_int(texts["len"])
    if base < 0 or length < 1:
        return None
    try:
        kids = [tuple(map(int, item.split(":"))) for item in _items(texts["kids"])]
        up = [tuple(map(int, item.split(":"))) for item in _items(texts["up"])]
        return Segment(
            number=number,
            parent=as_int(texts["parent"]),
            base=base,
            end=base + length,
            up=tuple((a, b) for a, b in up),
            kids=tuple(Kid(*kid) for kid in kids),
            checkpoints=tuple(parse_checkpoints(texts["ckpts"])),
            windows=from_text(texts["win"]),
            kind=texts["kind"],
            pinned=texts["pin"] == "1",
            pinned_under=texts["under"] == "1",
        )
    except (ValueError, TypeError, DamagedData):
        return None


def _why_gone(explained: Any) -> str:
    """What KV.PREFIX.EXPLAIN says of rows that are gone; those of another worker are there."""
    try:
        answer = json.loads(as_text(explained))
    except ValueError:
        return ""
    if not isinstance(answer, dict) or answer.get("verdict") != "miss":
        return ""
    reason = str(answer.get("reason"))
    return "" if "lives on worker" in reason else reason


def parse_checkpoints(text: str) -> list[Checkpoint]:
    """The field ``ckpts``: ``length:kind:sid``, comma-separated. Raises ValueError."""
    found = []
    for item in _items(text):
        length, kind, sid = item.split(":", 2)
        known: dict[str, KeepKind] = {name: name for name in KEEP_KINDS}
        if kind not in known:
            raise ValueError(f"unknown kind of checkpoint {kind!r}")
        found.append(Checkpoint(int(length), known[kind], sid))
    return found


def checkpoints_text(checkpoints: Sequence[Checkpoint]) -> str:
    """The inverse of ``parse_checkpoints``."""
    return ",".join(f"{one.length}:{one.kind}:{one.sid}" for one in checkpoints)


def kids_text(kids: Sequence[Kid]) -> str:
    """The field ``kids``."""
    return ",".join(f"{kid.number}:{kid.base}:{kid.first}" for kid in kids)


def up_text(up: Sequence[tuple[int, int]]) -> str:
    """The field ``up``."""
    return ",".join(f"{number}:{base}" for number, base in up)


def parse_tokens(value: Any) -> TokenIds:
    """The field ``toks``."""
    raw = value if isinstance(value, bytes) else b""
    return np.frombuffer(raw[: len(raw) // 4 * 4], "<u4")


def _items(text: str) -> list[str]:
    return [item for item in text.split(",") if item]
