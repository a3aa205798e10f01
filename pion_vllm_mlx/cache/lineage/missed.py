"""Why a request was not a longer hit, as things were when it was looked up.

A moment later its prompt is stored itself, and nothing is missing any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.explain import difference
from pion_vllm_mlx.cache.lineage.index import Found
from pion_vllm_mlx.cache.lineage.store import LineageStore
from pion_vllm_mlx.cache.lineage.types import Explanation

NOT_RESTORED = "what is stored could not be restored"


@dataclass(frozen=True)
class Missed:
    """A prompt of which more than the last token was computed, and what was like it then.

    ``near`` is what memory had: how many tokens agree, and its tokens. ``nearest`` is what the
    store had, None where it was not asked or did not answer.
    """

    ids: TokenIds
    reused: int
    why: str
    near: tuple[int, Any] = (0, ())
    nearest: Found | None = None

    def explained(self, store: LineageStore) -> Explanation:
        """What differed from the nearest prefix of either tier; asks the store for its tokens."""
        found = Explanation(0, 0, 0, sentence=self.why)
        if self.nearest is not None:
            found = store.explain(self.ids, self.nearest)
        common, tokens = self.near
        if common and common >= found.common:
            found = difference(self.ids, tokens, common, (self.reused, ""))
        return replace(found, restorable=self.reused)


def why_not_more(
    reused: int, common: int, stored_common: int, stored_why: str, unasked: int = 0
) -> str:
    """Why no more than ``reused`` tokens of a prompt were, where some are missing.

    ``common`` tokens agree with something that is kept, ``stored_common`` with what the store
    has, whose own word for what it has not is ``stored_why``, "" where it was not asked.
    Where that is "" although it was asked it has all of them, and they were too few to be read.
    ``unasked``: so many were left that it was not asked for them.
    """
    if not common:
        return stored_why or "nothing is kept that begins like this prompt"
    if stored_why and reused < common == stored_common:
        return stored_why
    if reused < common == stored_common:
        more = common - reused
        return f"the store has {common} tokens, {more} more: fewer than --pion-min-gain"
    if reused < common:
        return f"{common} tokens agree, but nothing is kept with which to go on between"
    if unasked:
        kept = f"memory has {reused} tokens"
        return f"{kept}, and the store is not asked for {unasked} more: fewer than --pion-min-gain"
    return f"the prompt leaves what is kept at token {common}"
