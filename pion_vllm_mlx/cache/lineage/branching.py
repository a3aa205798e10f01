"""A conversation of its own for the beginning of another one.

The branch is a segment with a copy of the last token's rows, on top of what it shares: that
stays as long as the branch does, whatever becomes of the conversation it came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from crc32c import crc32c

from pion_vllm_mlx.cache.completion import (
    COMPLETION_LAYER,
    CompletionRecord,
    Run,
    StateSum,
    TokenIds,
)
from pion_vllm_mlx.cache.lanes_codec import run_bytes
from pion_vllm_mlx.cache.leaf import LeafSpec
from pion_vllm_mlx.cache.lineage.client import LineageClient, as_text
from pion_vllm_mlx.cache.lineage.coverage import clipped
from pion_vllm_mlx.cache.lineage.index import Index, Names, Segment
from pion_vllm_mlx.cache.lineage.locks import held
from pion_vllm_mlx.cache.lineage.plan import RECORD_BYTES, TOKEN_BYTES
from pion_vllm_mlx.cache.lineage.publish import Change, Publisher
from pion_vllm_mlx.cache.lineage.records import Claim, checkpoint_sid, link, proved
from pion_vllm_mlx.cache.lineage.types import Checkpoint
from pion_vllm_mlx.cache.store_client import Registration
from pion_vllm_mlx.errors import DamagedData, PionError

Identity = dict[str, Any]


class Branching:
    """Makes branches of one model's conversations. For one thread at a time."""

    def __init__(self, client: LineageClient, names: Names, identity: Identity) -> None:
        self._client = client
        self._names = names
        self._identity = identity

    def branch(self, segment: Segment, length: int) -> int:
        """A segment of its own for the first ``length`` tokens of a conversation; its number.

        Raises ValueError for a length beyond the conversation, DamagedData, StoreUnavailable.
        """
        if not 1 < length <= segment.end:
            raise ValueError(f"a branch has 2 to {segment.end} tokens, not {length}")
        index = Index(self._client, self._names)
        tokens = index.tokens_up_to(segment)[:length]
        owner = self._owner(index, segment, length - 1)
        record = self._record(owner, tokens)
        up = (*owner.up, (owner.number, owner.base))
        new = Segment(0, owner.number, length - 1, length, up, kind="shared")
        with held(self._client, self._names, tokens) as lock:
            publisher = Publisher(self._client, self._names)
            number = publisher.reserve()
            namespace = self._names.namespace(number)
            try:
                new, size = self._fill(replace(new, number=number), owner, record, tokens)
                (layout,) = self._client.demand(
                    self._names.route, [("GET", self._names.key("layout"))]
                )
                shown = (self._identity, as_text(layout))
                change = Change(new, tokens, new.base, size, *shown, indexed=False)
                publisher.publish(change, [*(n for n, _ in up), number], lock)
            except PionError:
                publisher.free(namespace)
                raise
        return number

    # -- inside ---------------------------------------------------------------

    def _owner(self, index: Index, segment: Segment, position: int) -> Segment:
        """The segment of a chain that has the rows of a position."""
        chain = [one for one in index.segments([n for n, _ in segment.up]) if one is not None]
        (owner,) = [one for one in (*chain, segment) if one.base <= position][-1:]
        return owner

    def _record(self, owner: Segment, tokens: TokenIds) -> CompletionRecord:
        namespace = self._names.namespace(owner.number)
        claim = Claim(link(self._identity, tokens, owner.base), tokens, owner.base, namespace)
        proof = proved(self._client.record(namespace), claim)
        if proof.shared < tokens.size:
            raise DamagedData(f"{namespace}: its record is of other tokens")
        return proof.record

    def _fill(
        self, new: Segment, owner: Segment, record: CompletionRecord, tokens: TokenIds
    ) -> tuple[Segment, int]:
        """Rows, state and record of a branch; the segment with what it got, and its bytes."""
        namespace = self._names.namespace(new.number)
        self._client.drop(namespace)
        leaves = [_leaf(layer, value) for layer, value in enumerate(record.leaves)]
        self._client.register(namespace, Registration.of(leaves))
        rows = list(self._rows(owner, record, new.base))
        sent = self._client.store_rows(namespace, rows)
        windows = {w: clipped(r, new.base, new.end) for w, r in owner.windows.items()}
        new = replace(new, windows=windows)
        key = link(self._identity, tokens, new.base)
        mine = replace(
            record, identity=key, ids=tokens[new.base :], runs=[run for run, _ in rows], states=[]
        )
        known = [one for one in owner.checkpoints if one.length == new.end]
        if known:
            sent += self._copy_state(known[0], namespace, key, tokens[new.base :])
            sid = checkpoint_sid(namespace, new.end)
            new = replace(new, checkpoints=(Checkpoint(new.end, "final", sid),))
        blob = mine.encode()
        self._client.store_states(namespace, [(COMPLETION_LAYER, blob, crc32c(blob))])
        return new, sent + RECORD_BYTES + TOKEN_BYTES

    def _rows(
        self, owner: Segment, record: CompletionRecord, position: int
    ) -> Iterator[tuple[Run, Any]]:
        """The rows of one position, once a leaf and side."""
        namespace, at = self._names.namespace(owner.number), position - owner.base
        for run in record.runs:
            if run.start <= at < run.start + run.rows:
                one = replace(run, start=at, rows=1)
                size = run_bytes(record.leaves[run.layer], one)
                blob = self._client.fetch_range(namespace, one, size)
                if blob is None or blob.nbytes != size:
                    raise DamagedData(f"{namespace}: rows of token {position} are gone")
                yield replace(one, start=0, crc=crc32c(blob.data)), blob

    def _copy_state(self, known: Checkpoint, namespace: str, key: Identity, own: TokenIds) -> int:
        """The states of a checkpoint under a branch of the same length."""
        source = known.sid.partition("@")[0]
        (raw,) = self._client.demand(source, [("SSM.PREFIX.FETCH", known.sid, COMPLETION_LAYER)])
        record = CompletionRecord.decode(raw or b"")
        blobs = []
        for state in record.states:
            (blob,) = self._client.demand(
                source, [("SSM.PREFIX.FETCH", known.sid, state.slot)], state.length
            )
            if blob is None or crc32c(blob) != state.crc:
                raise DamagedData(f"{known.sid}: a state does not verify")
            blobs.append((state.slot, blob, state.crc))
        sid = checkpoint_sid(namespace, known.length)
        sent = self._client.store_states_at(namespace, sid, blobs)
        sums = [StateSum(slot, crc, len(blob)) for slot, blob, crc in blobs]
        mine = replace(record, identity=key, ids=own, states=sums).encode()
        return sent + self._client.store_states_at(
            namespace, sid, [(COMPLETION_LAYER, mine, crc32c(mine))]
        )


def _leaf(layer: int, value: dict[str, Any]) -> LeafSpec:
    """A leaf out of the JSON of a record."""
    return LeafSpec(
        layer=layer,
        heads=int(value["heads"]),
        format=str(value["format"]),
        k_width=int(value["k"]),
        v_width=int(value["v"]),
        v_format=str(value.get("v_format", "")),
    )
