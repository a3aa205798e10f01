"""From what the index found to what can be restored of it."""

from __future__ import annotations

from dataclasses import dataclass

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.coverage import Ranges, Window, joined, latest_point
from pion_vllm_mlx.cache.lineage.index import Found, Names
from pion_vllm_mlx.cache.lineage.policy import restore_point
from pion_vllm_mlx.cache.lineage.shape import Shape
from pion_vllm_mlx.cache.lineage.types import Checkpoint, Match


@dataclass(frozen=True)
class Rules:
    """What decides how much of a prefix may be restored."""

    shape: Shape
    min_gain: int
    checkpoints: bool


def match_of(found: Found, tokens: TokenIds, names: Names, rules: Rules) -> Match:
    """The match of a prompt: at most all but its last token can be restored."""
    if not found.common:
        nothing = "nothing is stored that begins like this prompt"
        if found.gone is None:
            return Match(tokens, why=nothing)
        return Match(tokens, why=found.gone.sentence, withheld=found.gone.end)
    limit = min(found.common, int(tokens.size) - 1)
    length, checkpoint, why = _restorable(found, limit, rules)
    withheld = 0
    if found.gone is not None:
        why = f"{found.gone.sentence}; {why}" if why else found.gone.sentence
        withheld = found.gone.end
    if 0 < length < rules.min_gain:
        why = f"{length} tokens are fewer than the least gain of {rules.min_gain}"
    if length < rules.min_gain:
        why = why or "the prompt is too short"
        return Match(tokens, found.common, why=why, withheld=withheld)
    pieces, stored = found.pieces(names, length), found.leaf.end if found.leaf is not None else 0
    return Match(tokens, found.common, length, why, pieces, checkpoint, stored, withheld)


def _restorable(found: Found, limit: int, rules: Rules) -> tuple[int, Checkpoint | None, str]:
    """Length, checkpoint and why not more."""
    leaf = found.leaf
    assert leaf is not None
    exact = found.common if found.common == leaf.end else -1
    if not rules.checkpoints and exact < 0:
        return 0, None, "only the beginning of a stored prompt fits, and checkpoints are off"
    windows = _windows(found, rules.shape)
    if not rules.shape.stateful:
        length = latest_point(limit, windows)
        lacking = "" if length == limit else "no window is stored for the tokens after that"
        return length, None, lacking
    usable = [one for one in _checkpoints(found) if latest_point(one.length, windows) == one.length]
    point = restore_point(usable, limit, None if rules.checkpoints else exact)
    if point is None:
        return 0, None, "no recurrent state is stored at or before the tokens in common"
    lacking = "" if point.length == limit else "no recurrent state is stored after that"
    return point.length, point, lacking


def _checkpoints(found: Found) -> list[Checkpoint]:
    """The checkpoints of a chain that lie within what agrees."""
    return [
        one
        for segment, end in zip(found.chain, found.ends, strict=True)
        for one in segment.checkpoints
        if segment.base < one.length <= end
    ]


def _windows(found: Found, shape: Shape) -> dict[Window, Ranges]:
    """Which positions of each window have rows in the chain."""
    parts = [
        (segment.windows, segment.base, end)
        for segment, end in zip(found.chain, found.ends, strict=True)
    ]
    covered = joined(parts)
    return {window: covered.get(window, ()) for window in shape.windows}
