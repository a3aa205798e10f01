"""Conversations: where lineages end, to list, pin and delete them.

The id of a conversation is ``<mid>:<segment>``, the segment in which it ends. One ends in
each segment but those that only lead to their children.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from crc32c import crc32c

from pion_vllm_mlx.cache.completion import COMPLETION_LAYER, CompletionRecord, TokenIds
from pion_vllm_mlx.cache.lineage.client import LineageClient, as_int, as_text, pairs_of
from pion_vllm_mlx.cache.lineage.index import LRU_KEY, SIZES_KEY, WAY, Index, Names, Segment
from pion_vllm_mlx.cache.lineage.locks import held
from pion_vllm_mlx.cache.lineage.publish import Publisher
from pion_vllm_mlx.cache.lineage.types import Conversation

HARDLY_OWN = 8
"""A conversation of which less than that part is its own is hardly one beside the others."""


class Conversations:
    """The conversations of one model. For one thread at a time.

    Every method raises StoreUnavailable; those that name one raise KeyError for one that
    is not there.
    """

    def __init__(self, client: LineageClient, names: Names) -> None:
        self._client = client
        self._names = names
        self._index = Index(client, names)

    def all(self) -> list[Conversation]:
        """Every conversation, the latest used first."""
        used, size = self._used_and_sizes()
        return [
            Conversation(
                id=(name := self._names.member(segment.number)),
                tokens=segment.end,
                num_bytes=size.get(name, 0),
                last_used=used[name],
                pinned=segment.pinned,
                segments=len(segment.up) + 1,
                checkpoints=segment.checkpoints,
            )
            for segment in filter(ends_here, self._segments(used))
        ]

    def latest(self, most_bytes: int, most: int) -> list[TokenIds]:
        """The tokens of the conversations that were used last, the latest first.

        At most ``most``, and together at most ``most_bytes``: each with the rows of all that it
        stands on, as it would be in memory. Passed over is one that is larger than what is left,
        or of which hardly anything is its own: a reply that was given up, say.
        """
        used, size = self._used_and_sizes()
        segments = {one.number: one for one in self._segments(used)}
        found: list[TokenIds] = []
        leading: dict[int, int] = {}
        for segment in filter(ends_here, segments.values()):
            if len(found) == most:
                break
            if (segment.end - _shared_with(leading, segment)) * HARDLY_OWN < segment.end:
                continue
            needed = 0.0
            for number, length in _lengths(segment):
                if number in segments:
                    held = segments[number].end - segments[number].base
                    needed += size.get(self._names.member(number), 0) * min(1, length / held)
            if needed <= most_bytes:
                most_bytes -= int(needed)
                found.append(self._index.tokens_up_to(segment))
                for number, length in _lengths(segment):
                    leading[number] = max(length, leading.get(number, 0))
        return found

    def tokens_of(self, conversation: str) -> list[int]:
        """All tokens of a conversation."""
        return [int(token) for token in self._index.tokens_up_to(self.segment(conversation))]

    def pin(self, conversation: str) -> None:
        """Pins a conversation and all it stands on."""
        segment = self.segment(conversation)
        for upper in self._index.segments([number for number, _ in segment.up]):
            if upper is not None and not upper.pinned:
                self._set_pin(upper.number, True, under=True)
        self._set_pin(segment.number, True)

    def unpin(self, conversation: str) -> list[str]:
        """Takes the pin of a conversation, and of what only leads to it.

        Anchors, and other conversations that it left, keep one of their own.
        Returns what is pinned and goes on from it: then it stays pinned itself, as long as that.
        """
        segment = self.segment(conversation)
        if pinned := self._pinned_kids(segment):
            if segment.pinned:
                self._set_pin(segment.number, True, under=True)
            return [self._names.member(number) for number in pinned]
        for number in [segment.number, *self._pinned_for(segment)]:
            self._set_pin(number, False)
        return []

    def _pinned_for(self, segment: Segment) -> list[int]:
        """What a segment stands on and nothing else keeps pinned, the nearest first."""
        found: list[int] = []
        below = segment.number
        for upper in reversed(self._index.segments([number for number, _ in segment.up])):
            if upper is None or set(self._pinned_kids(upper)) - {below}:
                break
            if not upper.pinned_under and (upper.kind == "anchor" or ends_here(upper)):
                break
            found.append(upper.number)
            below = upper.number
        return found

    def drop(self, conversation: str) -> int:
        """Deletes a conversation, and what it alone stands on; how many segments went.

        Where others left it in its last segment, that one only ends earlier: its tokens and
        states behind that go at once, the rows, which nothing names any more, with the segment,
        and that with the last of the others.
        """
        leaf = self.segment(conversation)
        publisher = Publisher(self._client, self._names)
        gone = 0
        pinned = self._pinned_for(leaf) if self._alone_pinned(leaf) else []
        segment: Segment | None = leaf
        while segment is not None:
            tokens = self._index.tokens_up_to(segment)
            if segment.kids:
                if _last_left(segment) >= segment.end:
                    if not gone:
                        raise KeyError(conversation)
                else:
                    self._shorten(segment, tokens)
                    self._unpin_all(pinned)
                break
            if not publisher.remove(segment, tokens):
                break
            gone += 1
            self._unpin_all(pinned)
            base, parent = segment.base, segment.parent
            segment = self._index.segments([parent])[0] if parent >= 0 else None
            if segment is not None and segment.kind != WAY and _stays(segment, base):
                break
        return gone

    def _shorten(self, segment: Segment, tokens: TokenIds) -> None:
        """Lets a segment end where its last child leaves it, as it does not yet."""
        end = _last_left(segment)
        if self._alone_pinned(segment):
            self._set_pin(segment.number, False)
        namespace = self._names.namespace(segment.number)
        with held(self._client, self._names, tokens) as lock:
            Publisher(self._client, self._names).shorten(segment, tokens, end, lock)
            blob = self._client.record(namespace)
            if blob is None:
                return
            record = CompletionRecord.decode(blob)
            shorter = replace(record, ids=record.ids[: end - segment.base]).encode()
            self._client.store_states(namespace, [(COMPLETION_LAYER, shorter, crc32c(shorter))])

    def segment(self, conversation: str) -> Segment:
        """The segment in which a conversation ends."""
        number = self._number_of(conversation)
        (segment,) = self._index.segments([number if number is not None else -1])
        if segment is None:
            raise KeyError(conversation)
        return segment

    # -- inside ---------------------------------------------------------------

    def _used_and_sizes(self) -> tuple[dict[str, float], dict[str, int]]:
        """When each segment was last used, the latest first, and how many bytes it takes."""
        ranked, sizes = self._client.demand(
            self._names.route,
            [("ZRANGE", LRU_KEY, 0, -1, "REV", "WITHSCORES"), ("HGETALL", SIZES_KEY)],
        )
        used = {as_text(name): float(as_text(score)) for name, score in pairs_of(ranked)}
        size = {as_text(name): as_int(as_text(value), 0) for name, value in pairs_of(sizes)}
        return used, size

    def _segments(self, members: Iterable[str]) -> list[Segment]:
        """The segments of this model among ``members``, in their order."""
        numbers = [number for number in map(self._number_of, members) if number is not None]
        return [segment for segment in self._index.segments(numbers) if segment is not None]

    def _alone_pinned(self, segment: Segment) -> bool:
        """Whether a segment is pinned, and nothing that goes on from it is."""
        return segment.pinned and not self._pinned_kids(segment)

    def _unpin_all(self, numbers: list[int]) -> None:
        """Takes the pins of segments, once."""
        while numbers:
            self._set_pin(numbers.pop(0), False)

    def _set_pin(self, number: int, pinned: bool, *, under: bool = False) -> None:
        """``under``: only since something that goes on from it is pinned."""
        fields = {"pin": "1" if pinned else "0", "under": "1" if under else "0"}
        Publisher(self._client, self._names).set_fields(number, fields)
        word = "KV.PREFIX.PIN" if pinned else "KV.PREFIX.UNPIN"
        # past the server's cap of pins ours still holds against our own budget
        self._client.pipeline(self._names.route, [(word, self._names.namespace(number))])

    def _pinned_kids(self, segment: Segment) -> list[int]:
        """The children of a segment that are pinned: all that they stand on stays so."""
        kids = self._index.segments([kid.number for kid in segment.kids])
        return [kid.number for kid in kids if kid is not None and kid.pinned]

    def _number_of(self, member: str) -> int | None:
        mid, _, number = member.rpartition(":")
        return as_int(number) if mid == self._names.mid else None


def _lengths(leaf: Segment) -> list[tuple[int, int]]:
    """The segments from the root to ``leaf``, each with the tokens of it that lead there."""
    chain = [*leaf.up, (leaf.number, leaf.base)]
    ends = [base for _, base in chain[1:]] + [leaf.end]
    return [(number, end - base) for (number, base), end in zip(chain, ends, strict=True)]


def _shared_with(leading: Mapping[int, int], leaf: Segment) -> int:
    """How many tokens of a conversation lead to others, which use so many of each segment."""
    shared = 0
    for number, length in _lengths(leaf):
        shared += min(length, leading.get(number, 0))
        if leading.get(number, 0) < length:
            break
    return shared


def _last_left(segment: Segment) -> int:
    """Where the last of its children leaves a segment."""
    return max(kid.base for kid in segment.kids)


def _stays(segment: Segment, left: int) -> bool:
    """Whether a segment is more than the way to the child that left it at ``left``."""
    return bool(segment.kids or segment.pinned or segment.kind) or segment.end > left


def ends_here(segment: Segment) -> bool:
    """Whether a segment is the end of a conversation, and not only the way to others."""
    return not any(kid.base == segment.end for kid in segment.kids)
