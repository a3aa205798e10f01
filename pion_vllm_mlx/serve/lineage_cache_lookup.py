"""What the two tiers have of a prompt, and its rows out of the store, before it is served.

Runs on the thread beside the one that generates, so that other requests go on meanwhile: the
store is asked, what it has is read and proved, and the restored caches are live ones from
then on, for this request and the next.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.lineage.missed import NOT_RESTORED
from pion_vllm_mlx.cache.live_restored import keep_restored
from pion_vllm_mlx.cache.live_unwritten import UnwrittenTier
from pion_vllm_mlx.serve.lineage_cache_plan import Plan

MAX_JOURNALS = 10_000


@dataclass(eq=False)
class Tiers:
    """The live caches and the store of one model."""

    store: LineageStore
    live: UnwrittenTier
    recurrent: bool
    _journals: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look_up(self, plan: Plan) -> None:
        """Completes a plan by what is stored; reads it where that is more than memory has."""
        plan.tiers = self
        plan.near = self.live.nearest(plan.ids)
        plan.borrow(self.live)
        held = plan.held
        if plan.journal and self._is_new(plan.journal):
            self._match_resumed(plan)
        least = self.store.options.min_gain
        if not plan.resume and plan.size - 1 - held >= least:
            match = self.store.match(plan.ids)
            plan.stored_common, plan.stored_why = match.common, match.why
            plan.nearest = match.nearest
            if match.withheld > held:
                plan.why = match.why
            if match.length >= held + least:
                plan.match = match
            unwritten = self.live.lost(plan.ids)
            if unwritten >= max(held, match.length) + least:
                plan.why = self.store.not_yet(unwritten)
        else:
            plan.asked = bool(plan.resume)
            self.store.recheck(plan.ids)
        if plan.match is not None and not self._restore(plan, held):
            plan.resume, plan.why = [], NOT_RESTORED

    # -- inside -----------------------------------------------------------------

    def _is_new(self, journal: str) -> bool:
        """Whether this process has not seen to that reply itself."""
        with self._lock:
            if journal in self._journals:
                return False
            self._journals[journal] = None
            if len(self._journals) > MAX_JOURNALS:
                self._journals.popitem(last=False)
        return True

    def _match_resumed(self, plan: Plan) -> None:
        """Continues the reply of a process that was killed, if all that it takes is stored."""
        noted = self.store.load_journal(plan.journal)
        if not noted:
            return
        match = self.store.match([*plan.tokens, *noted])
        if match.length == plan.size + len(noted) - 1:
            plan.match, plan.resume = match, noted
        else:
            self.store.drop_journal(plan.journal)

    def _restore(self, plan: Plan, held: int) -> bool:
        assert plan.match is not None
        restored = self.store.restore(plan.match)
        if restored is None or restored.length <= held:
            return False
        if plan.resume and restored.length != plan.size + len(plan.resume) - 1:
            return False
        plan.restored = restored
        tokens = [*plan.tokens, *plan.resume]
        keep_restored(tokens, restored, plan.match, self.live)
        return True
