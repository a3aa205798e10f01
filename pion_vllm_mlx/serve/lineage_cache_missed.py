"""Why a request was not a longer hit, as things were when it was looked up.

A moment later its prompt is stored itself, and nothing is missing any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage import Explanation, LineageStore
from pion_vllm_mlx.cache.lineage.explain import difference
from pion_vllm_mlx.cache.lineage.index import Found
from pion_vllm_mlx.serve.lineage_cache_plan import Plan


@dataclass(frozen=True)
class Missed:
    """A prompt of which more than the last token was computed, and what was like it then.

    ``near`` is what memory had: how many tokens agree, and its tokens. ``nearest`` is what the
    store had, None where it was not asked or did not answer.
    """

    ids: TokenIds
    reused: int
    why: str
    near: tuple[int, Any]
    nearest: Found | None

    @classmethod
    def of(cls, plan: Plan) -> Missed:
        """What is to be remembered of a request."""
        return cls(plan.ids, plan.reused, plan.why, plan.near, plan.nearest)

    def explained(self, store: LineageStore) -> Explanation:
        """What differed from the nearest prefix of either tier; asks the store for its tokens."""
        found = Explanation(0, 0, 0, sentence=self.why)
        if self.nearest is not None:
            found = store.explain(self.ids, self.nearest)
        common, tokens = self.near
        if common and common >= found.common:
            found = difference(self.ids, tokens, common, (self.reused, ""))
        return replace(found, restorable=self.reused)
