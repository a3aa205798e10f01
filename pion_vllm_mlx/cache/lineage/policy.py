"""Where checkpoints are taken, and which ones stay. Pure functions.

==========  ==================================================================
kind        taken
==========  ==================================================================
guard       16 tokens before the end of the prompt, if at least 256 are new; before
            what the next prompt will not have of that end (``endings``), if that gains 256
anchor      at the end of system prompt and tools
divergence  where the prompt leaves what is stored, if that gains 256 tokens
final       at the end of what was computed
==========  ==================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pion_vllm_mlx.cache.lineage.endings import Ending
from pion_vllm_mlx.cache.lineage.types import Checkpoint, Cut, CutKind

GUARD_TOKENS = 16
LEAST_NEW_TOKENS = 256
MOST_CHECKPOINTS = 4
ANCHOR_SLACK_TOKENS = 2
MOST_ANCHORS = 16
MOST_ANCHOR_BYTES = 16 * 10**9
NO_ENDING = Ending()

_RANK: dict[CutKind, int] = {"anchor": 0, "divergence": 1, "guard": 2}


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many items two sequences have in common from their start."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def anchor_length(rendered: Sequence[int], prompt: Sequence[int]) -> int:
    """Where the anchor of a prompt lies: the common prefix with ``rendered``, less 2 tokens.

    ``rendered`` are the leading system messages and tools through the chat template, with another
    user's text behind them or in their turn. 0 where there is none.
    """
    return max(0, common_prefix(rendered, prompt) - ANCHOR_SLACK_TOKENS)


def cuts(
    total: int, restored: int, common: int, anchor: int | None, ending: Ending = NO_ENDING
) -> list[Cut]:
    """Where a prompt of ``total`` tokens is cut, of which ``restored`` need no prefill.

    The next prompt is expected to leave this one where its ``ending`` begins.
    """
    wanted: list[Cut] = []
    if anchor:
        wanted.append(Cut(anchor, "anchor"))
    if common - restored >= LEAST_NEW_TOKENS:
        wanted.append(Cut(common, "divergence"))
    if total - restored >= LEAST_NEW_TOKENS:
        wanted += [Cut(position, "guard") for position in _guards(total, restored, ending)]
    best: dict[int, Cut] = {}
    for cut in sorted(wanted, key=lambda cut: _RANK[cut.kind], reverse=True):
        if restored < cut.position < total:
            best[cut.position] = cut
    return [best[position] for position in sorted(best)]


def with_anchor(found: Sequence[Cut], position: int) -> list[Cut]:
    """The cuts, and an anchor at ``position``, which comes before any other cut there."""
    others = [cut for cut in found if cut.position != position]
    return sorted([*others, Cut(position, "anchor")], key=lambda cut: cut.position)


def _guards(total: int, restored: int, ending: Ending) -> list[int]:
    """Before the ending where that is of use; and near the end unless that surely is of none."""
    usual = total - GUARD_TOKENS
    early = usual - ending.tokens
    if ending.tokens <= GUARD_TOKENS or early - restored < LEAST_NEW_TOKENS:
        return [usual]
    return [early] if ending.sure else [early, usual]


def thinned(
    checkpoints: Iterable[Checkpoint],
    behind: Sequence[Checkpoint] = (),
    forks: Collection[Checkpoint] = (),
    most: int = MOST_CHECKPOINTS,
) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """What stays of a conversation's checkpoints and what goes, both by length.

    Old guards go first, then those ``behind``, which earlier versions of it left, in their
    order but for the last; then the oldest turn boundaries; then the oldest divergences; the
    latest of all stays, anchors always do. Turn boundaries of ``forks``, from which others went
    on, go after those that none did, and after guards before them, but before the latest two.
    """
    stay = sorted(checkpoints, key=lambda one: one.length)
    left = list(behind)
    gone: list[Checkpoint] = []
    while True:
        held, older = _counted(stay), _counted(left)
        if len(held) + len(older) <= most:
            return [*stay, *left], sorted(gone, key=lambda one: one.length)
        victim = _least_useful(held, older, forks)
        (left if victim in older else stay).remove(victim)
        gone.append(victim)


def _counted(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    return [one for one in checkpoints if one.kind != "anchor"]


def _least_useful(
    held: Sequence[Checkpoint], behind: Sequence[Checkpoint], forks: Collection[Checkpoint]
) -> Checkpoint:
    """``held`` is sorted by length; both together have more than one entry."""
    older = held[:-1]
    guards = [one for one in held if one.kind == "guard"]
    finals = [one for one in older if one.kind == "final"]
    divergences = [one for one in older if one.kind == "divergence"]
    passed = [one for one in finals[:-1] if one not in forks]
    last_fork = max((one.length for one in finals if one in forks), default=0)
    spent = [one for one in guards if one.length < last_fork]
    turns = passed or spent or finals
    first = guards[:-1] or list(behind[:-1]) or turns or divergences or list(behind)
    return (first or list(older))[0]


def restore_point(
    checkpoints: Iterable[Checkpoint], limit: int, exact_only: int | None = None
) -> Checkpoint | None:
    """The longest checkpoint of at most ``limit`` tokens; with ``exact_only`` the final there."""
    usable = [one for one in checkpoints if one.length <= limit]
    if exact_only is not None:
        usable = [one for one in usable if one.kind == "final" and one.length == exact_only]
    return max(usable, key=lambda one: one.length, default=None)
