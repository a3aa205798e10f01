"""The recurrent states of a conversation: stored, and thinned out over its whole chain.

A conversation that is edited again and again is a chain of segments, and no segment with a child
is evicted. What is left behind of its earlier versions counts with it, and goes first, but for
the latest state there: with that the version before the last edit can be gone on with. A state
that another segment stands on was not left behind: it counts with what went on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crc32c import crc32c

from pion_vllm_mlx.cache.completion import COMPLETION_LAYER, CompletionRecord, StateSum
from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.lineage.index import Segment
from pion_vllm_mlx.cache.lineage.plan import Job, Target
from pion_vllm_mlx.cache.lineage.policy import thinned
from pion_vllm_mlx.cache.lineage.records import checkpoint_sid, link
from pion_vllm_mlx.cache.lineage.types import Checkpoint


@dataclass(frozen=True)
class StoredState:
    """A segment with its new state, and the sids of those that are given up for that.

    ``own`` are the segment's, ``above`` those of others, each with its segment's number. Each
    takes about ``num_bytes``.
    """

    segment: Segment
    num_bytes: int = 0
    own: Sequence[str] = ()
    above: Sequence[tuple[int, str]] = ()


def store_state(client: LineageClient, job: Job, target: Target, namespace: str) -> StoredState:
    """The states at the end of the job, if they belong here; and what is thinned for them."""
    segment, length = target.segment, job.length
    if not target.owns_state(job):
        return StoredState(segment)
    sid = checkpoint_sid(namespace, length)
    sums, blobs = [], []
    for slot, blob in job.captured.state_blobs():
        sums.append(StateSum(slot, crc32c(blob), len(blob)))
        blobs.append((slot, blob, sums[-1].crc))
    sent = client.store_states_at(namespace, sid, blobs)
    record = CompletionRecord(
        link(job.identity, job.tokens, segment.base),
        job.tokens[segment.base :],
        job.captured.slots,
        [leaf.as_json() for leaf in job.captured.leaves],
        states=sums,
    ).encode()
    sent += client.store_states_at(namespace, sid, [(COMPLETION_LAYER, record, crc32c(record))])
    others = [one for one in segment.checkpoints if one.length != length]
    own = [*others, Checkpoint(length, job.kind, sid)]
    above, beside = chain_states(target.above)
    _, gone = thinned([*above, *own], beside, forks([*target.above, (segment, target.end)]))
    holders = {one.sid: upper.number for upper, _ in target.above for one in upper.checkpoints}
    stay = tuple(sorted((one for one in own if one not in gone), key=lambda one: one.length))
    return StoredState(
        replace(segment, checkpoints=stay),
        sent,
        [one.sid for one in gone if one.sid not in holders],
        [(holders[one.sid], one.sid) for one in gone if one.sid in holders],
    )


def chain_states(
    above: Sequence[tuple[Segment, int]],
) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """The states on the way through segments that are left at an end, and those left behind.

    The latter, the oldest segment's first, only where most of what ends there is shared, the
    system prompt left out: then it is an earlier version of the conversation, else another one;
    and only those that no other conversation stands on. Each of other ones is longer than all
    that comes before it, again without the system prompt, so that they are few in any chain.
    """
    way: list[Checkpoint] = []
    behind: list[Checkpoint] = []
    anchor = 0
    for segment, end in above:
        mine = [one for one in segment.checkpoints if one.length <= end]
        way += mine
        anchor = max([anchor, *(one.length for one in mine if one.kind == "anchor")])
        if segment.end - end <= end - anchor:
            stood_on = max([end, *(kid.base for kid in segment.kids)])
            left = [one for one in segment.checkpoints if one.length > stood_on]
            behind += sorted(left, key=lambda one: one.length)
    return way, behind


def forks(chain: Sequence[tuple[Segment, int]]) -> list[Checkpoint]:
    """The states that others went on from, of those on the way through a chain."""
    found: list[Checkpoint] = []
    mine = {segment.number for segment, _ in chain}
    for segment, end in chain:
        bases = [kid.base for kid in segment.kids if kid.number not in mine]
        bases += [end] * (end < segment.end)
        for base in bases:
            before = [one for one in segment.checkpoints if one.length <= min(base, end)]
            found += [max(before, key=lambda one: one.length)] if before else []
    return found
