"""Making segments visible, and taking them away: each at one moment.

A segment is published after its rows, states and completion record are stored. Between
REGISTER and that its namespace is *loose*: a zset names it, and a later sweep drops it if
its writer has died. The same holds for a namespace whose segment was just removed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.identity_walk import canonical_json
from pion_vllm_mlx.cache.lineage.blocks import own_blocks, root_field
from pion_vllm_mlx.cache.lineage.client import (
    Commands,
    LineageClient,
    as_int,
    as_text,
    pairs_of,
)
from pion_vllm_mlx.cache.lineage.coverage import as_text as windows_text
from pion_vllm_mlx.cache.lineage.coverage import clipped
from pion_vllm_mlx.cache.lineage.index import (
    ANCHORS_KEY,
    FIELDS,
    LRU_KEY,
    SIZES_KEY,
    WAY,
    Kid,
    Names,
    Segment,
    checkpoints_text,
    kids_text,
    parse_segment,
    up_text,
)
from pion_vllm_mlx.cache.lineage.locks import TreeLock
from pion_vllm_mlx.errors import PionError

ORPHAN_SECONDS = 3600.0
_MOST_FIELDS = 1000


class Superseded(PionError):
    """What was to be published no longer fits what is there."""


@dataclass(frozen=True)
class Change:
    """A segment as it is to be, of which ``added_bytes`` are new.

    ``was_end`` is its end before, its base for a new one. ``layout`` and ``identity``
    describe the model. ``indexed`` False: its blocks lead to its parent, which has more tokens.
    """

    segment: Segment
    tokens: TokenIds
    was_end: int
    added_bytes: int
    identity: dict[str, Any]
    layout: str
    indexed: bool = True


class Publisher:
    """Changes the index of one model. For one thread: it has transactions."""

    def __init__(self, client: LineageClient, names: Names) -> None:
        self._client = client
        self._names = names

    def reserve(self) -> int:
        """The number of a new segment; its namespace is loose from now on."""
        (number,) = self._ask([("INCR", self._names.key("nextseg"))])
        namespace = self._names.namespace(as_int(number))
        self._ask([("ZADD", self._names.key("loose"), f"{time.time():.3f}", namespace)])
        return as_int(number)

    def publish(self, change: Change, chain: Sequence[int], lock: TreeLock) -> None:
        """Shows a new or changed segment; touches its chain.

        Raises Superseded where the lock, the segment or its parent is gone.
        """
        names, segment = self._names, change.segment
        parent = names.segment(segment.parent)
        own = names.segment(segment.number)
        is_new = change.was_end == segment.base

        def decide(values: Sequence[Any]) -> Commands | None:
            holder, above, there, size = values
            if not lock.held(holder) or bool(there) == is_new:
                return None
            commands = self._segment_commands(change, as_int(as_text(size), 0))
            if is_new and segment.parent >= 0:
                upper = parse_segment(names, segment.parent, above)
                if upper is None or upper.end < segment.base:
                    return None
                kid = Kid(segment.number, segment.base, int(change.tokens[segment.base]))
                kids = kids_text([*upper.kids, kid])
                commands.append(("HSET", parent, "kids", kids))
            return [*commands, *self._touches(chain), *lock.closing()]

        reads = [
            ("GET", lock.key),
            ("HMGET", parent, *FIELDS),
            ("EXISTS", own),
            ("HGET", SIZES_KEY, names.member(segment.number)),
        ]
        done = self._client.transaction(names.route, [lock.key, parent, own], reads, decide)
        if done is None:
            raise Superseded("the lineage changed while it was being extended")
        lock.released = lock.last

    def amend(self, segment: Segment, added_bytes: int, lock: TreeLock) -> None:
        """Publishes new checkpoints and windows of a segment that stays as long as it is.

        Raises Superseded where the lock or the segment is gone.
        """
        names, own = self._names, self._names.segment(segment.number)
        member = names.member(segment.number)

        def decide(values: Sequence[Any]) -> Commands | None:
            holder, there, size = values
            if not lock.held(holder) or not there:
                return None
            fields = {
                "ckpts": checkpoints_text(segment.checkpoints),
                "win": windows_text(segment.windows),
                "kind": segment.kind,
            }
            return [
                ("HSET", own, *_flat(fields.items())),
                ("HSET", SIZES_KEY, member, as_int(as_text(size), 0) + added_bytes),
                *self._anchored(segment),
                *lock.closing(),
            ]

        reads = [("GET", lock.key), ("EXISTS", own), ("HGET", SIZES_KEY, member)]
        if self._client.transaction(names.route, [lock.key, own], reads, decide) is None:
            raise Superseded("a segment went while it was being added to")
        lock.released = lock.last

    def touch(self, chain: Sequence[int]) -> None:
        """Marks a chain as just used: all of it with one time.

        The server goes by that, too, where its own limits make segments leave.
        """
        self._ask(self._touches(chain))

    def set_fields(self, number: int, fields: dict[str, str]) -> None:
        """Changes fields of a segment that exists."""
        key = self._names.segment(number)

        def decide(values: Sequence[Any]) -> Commands | None:
            return [("HSET", key, *_flat(fields.items()))] if values[0] else None

        self._client.transaction(self._names.route, [key], [("EXISTS", key)], decide)

    def delist(self, number: int, sid: str, freed: int = 0) -> bool:
        """Takes a checkpoint of ``freed`` bytes out of a segment, and frees it.

        False where it is not listed.
        """
        key, member = self._names.segment(number), self._names.member(number)

        def decide(values: Sequence[Any]) -> Commands | None:
            now = parse_segment(self._names, number, values[0])
            stay = [] if now is None else [one for one in now.checkpoints if one.sid != sid]
            if now is None or len(stay) == len(now.checkpoints):
                return None
            size = max(0, as_int(as_text(values[1]), 0) - freed)
            return [
                ("HSET", key, "ckpts", checkpoints_text(stay)),
                ("HSET", SIZES_KEY, member, size),
            ]

        reads = [("HMGET", key, *FIELDS), ("HGET", SIZES_KEY, member)]
        done = self._client.transaction(self._names.route, [key], reads, decide)
        if done is not None:
            self._client.drop_states(self._names.namespace(number), sid)
        return done is not None

    def remove(self, segment: Segment, tokens: TokenIds | None, *, with_kids: bool = False) -> bool:
        """Takes a segment out of the index, then frees what it holds; False if it may not go.

        ``tokens`` are all of its chain, to take its blocks out; None where they are not known.
        """
        names = self._names
        own, parent = names.segment(segment.number), names.segment(segment.parent)
        field = root_field(tokens) if tokens is not None and segment.parent < 0 else None

        def decide(values: Sequence[Any]) -> Commands | None:
            mine, above, root = values
            now = parse_segment(names, segment.number, mine)
            if now is not None and now.kids and not with_kids:
                return None
            if now is not None and now.end != segment.end:
                return None  # extended meanwhile: just used
            commands: list[Sequence[Any]] = [
                ("DEL", own),
                ("ZREM", LRU_KEY, names.member(segment.number)),
                ("ZREM", ANCHORS_KEY, names.member(segment.number)),
                ("HDEL", SIZES_KEY, names.member(segment.number)),
                ("ZADD", names.key("loose"), "0", names.namespace(segment.number)),
            ]
            upper = parse_segment(names, segment.parent, above)
            if upper is not None:
                kids = [kid for kid in upper.kids if kid.number != segment.number]
                commands.append(("HSET", parent, "kids", kids_text(kids)))
            if field is not None and as_int(as_text(root)) == segment.number:
                commands.append(("HDEL", names.key("roots"), field))
            return commands

        reads = [
            ("HMGET", own, *FIELDS),
            ("HMGET", parent, *FIELDS),
            ("HGET", names.key("roots"), field or ""),
        ]
        if self._client.transaction(names.route, [own, parent], reads, decide) is None:
            return False
        if tokens is not None:
            self._remove_blocks(segment, tokens, segment.base)
        self.free(names.namespace(segment.number))
        return True

    def shorten(self, segment: Segment, tokens: TokenIds, end: int, lock: TreeLock) -> None:
        """Ends a segment earlier, where its last child leaves it, as the way to its children only.

        It is not extended again, and goes with the last of them. Raises Superseded where the
        lock or the segment is gone, or the segment has grown.
        """
        names, own = self._names, self._names.segment(segment.number)

        def decide(values: Sequence[Any]) -> Commands | None:
            holder, mine = values
            now = parse_segment(names, segment.number, mine)
            if not lock.held(holder) or now is None or now.end != segment.end:
                return None
            stay = [one for one in now.checkpoints if one.length <= end]
            windows = {w: clipped(ranges, 0, end) for w, ranges in now.windows.items()}
            fields = {
                "len": end - segment.base,
                "toks": np.ascontiguousarray(tokens[segment.base : end], "<u4").tobytes(),
                "ckpts": checkpoints_text(stay),
                "win": windows_text(windows),
                "kind": WAY,
            }
            anchor = ("ZREM", ANCHORS_KEY, names.member(segment.number))
            return [("HSET", own, *_flat(fields.items())), anchor]

        reads = [("GET", lock.key), ("HMGET", own, *FIELDS)]
        if self._client.transaction(names.route, [lock.key, own], reads, decide) is None:
            raise Superseded("the conversation changed while it was being deleted")
        self._remove_blocks(segment, tokens, end)
        for one in segment.checkpoints:
            if one.length > end:
                self._client.drop_states(names.namespace(segment.number), one.sid)

    def free(self, namespace: str) -> None:
        """Frees rows, states and records of a loose namespace."""
        self._client.drop(namespace)
        self._ask([("ZREM", self._names.key("loose"), namespace)])

    def sweep(self) -> int:
        """Frees namespaces whose writer died an hour ago, or before it had freed them."""
        oldest = time.time() - ORPHAN_SECONDS
        (found,) = self._ask([("ZRANGE", self._names.key("loose"), 0, -1, "WITHSCORES")])
        orphans = [name for name, score in pairs_of(found) if float(as_text(score)) < oldest]
        for namespace in orphans:
            self.free(as_text(namespace))
        return len(orphans)

    # -- inside ---------------------------------------------------------------

    def _ask(self, commands: Commands) -> list[Any]:
        return self._client.demand(self._names.route, commands)

    def _segment_commands(self, change: Change, size: int) -> list[Sequence[Any]]:
        names, segment, tokens = self._names, change.segment, change.tokens
        own = np.ascontiguousarray(tokens[segment.base : segment.end], "<u4").tobytes()
        fields = {
            "parent": segment.parent,
            "base": segment.base,
            "len": segment.end - segment.base,
            "toks": own,
            "up": up_text(segment.up),
            "ckpts": checkpoints_text(segment.checkpoints),
            "win": windows_text(segment.windows),
            "kind": segment.kind,
        }
        commands: list[Sequence[Any]] = [
            (
                "HSET",
                names.segment(segment.number),
                *(part for pair in fields.items() for part in pair),
            ),
            ("HSET", SIZES_KEY, names.member(segment.number), size + change.added_bytes),
            ("ZREM", names.key("loose"), names.namespace(segment.number)),
            *self._anchored(segment),
        ]
        pairs = [
            (digest, f"{segment.number}:{end}")
            for digest, end in own_blocks(tokens, change.was_end, segment.end)
            if change.indexed
        ]
        for first in range(0, len(pairs), _MOST_FIELDS):
            chunk = pairs[first : first + _MOST_FIELDS]
            commands.append(("HSET", names.key("blk"), *_flat(chunk)))
        if change.was_end == segment.base == 0:
            field = root_field(tokens)
            commands += [("HSET", names.key("roots"), field, segment.number)] if field else []
            commands.append(("SET", names.key("layout"), change.layout))
            commands.append(("SET", names.key("key"), canonical_json(change.identity)))
        return commands

    def _touches(self, chain: Sequence[int]) -> list[Sequence[Any]]:
        now = f"{time.time():.3f}"
        pairs = [part for number in chain for part in (now, self._names.member(number))]
        if not pairs:
            return []
        # GT: by a clock that is behind nothing may get older than what stands on it
        return [("ZADD", LRU_KEY, "GT", *pairs), ("ZADD", ANCHORS_KEY, "XX", "GT", *pairs)]

    def _anchored(self, segment: Segment) -> list[Sequence[Any]]:
        if segment.kind != "anchor":
            return []
        return [("ZADD", ANCHORS_KEY, f"{time.time():.3f}", self._names.member(segment.number))]

    def _remove_blocks(self, segment: Segment, tokens: TokenIds, start: int) -> None:
        """Takes out the blocks behind ``start`` that still lead to a segment."""
        blocks = self._names.key("blk")
        digests = [digest for digest, _ in own_blocks(tokens, start, segment.end)]
        for first in range(0, len(digests), _MOST_FIELDS):
            chunk = digests[first : first + _MOST_FIELDS]
            (values,) = self._ask([("HMGET", blocks, *chunk)])
            mine = [
                digest
                for digest, value in zip(chunk, values, strict=True)
                if as_text(value).partition(":")[0] == str(segment.number)
            ]
            if mine:
                self._ask([("HDEL", blocks, *mine)])


def _flat(pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
    return [part for pair in pairs for part in pair]
