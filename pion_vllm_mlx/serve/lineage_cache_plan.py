"""What is decided about one request before its caches are fetched, and what became of it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, cast

import numpy as np

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.layers import cache_arrays
from pion_vllm_mlx.cache.lineage import Cut, LineageStore, Match, Restored
from pion_vllm_mlx.cache.lineage.index import Found
from pion_vllm_mlx.cache.lineage.journal import ReplyJournal
from pion_vllm_mlx.cache.lineage.missed import why_not_more
from pion_vllm_mlx.cache.live_tier import LiveHit, LiveTier

#: prefills of fewer tokens say nothing about a rate.
LEAST_MEASURED_TOKENS = 64
_NEWEST_WEIGHT = 0.3


@dataclass
class Rate:
    """Tokens a second on this machine, the latest measurements counting most; 0: unknown.

    ``store`` has that of the process before, and keeps it for the next one.
    """

    measured_here: float = 0.0
    store: LineageStore | None = None

    @property
    def tokens_per_second(self) -> float:
        """As it was measured here, or by a process before this one."""
        return self.measured_here or (self.store.prefill_rate if self.store is not None else 0.0)

    def measured(self, tokens: int, seconds: float) -> None:
        """Enters a measurement, unless it is of too few tokens."""
        if tokens < LEAST_MEASURED_TOKENS or seconds <= 0:
            return
        newest = tokens / seconds
        known = self.tokens_per_second or newest
        self.measured_here = known + _NEWEST_WEIGHT * (newest - known)
        if self.store is not None:
            self.store.note_prefill_rate(self.measured_here)

    def ms(self, tokens: int) -> float | None:
        """How long ``tokens`` take; None before the first measurement."""
        rate = self.tokens_per_second
        return tokens / rate * 1000 if rate else None


@dataclass(eq=False)
class Plan:
    """One request: what may be reused, where its prefill is cut, and what came of it.

    ``hit`` is what memory has, and ``lent`` its caches: others may have it given up meanwhile.
    ``match`` is what the store has, None where it was not wanted, ``restored`` what was read of
    it; both until they are used. ``near`` and ``nearest`` say what memory and the store had like
    the prompt, whatever can be used of it. ``tiers`` are those that were asked, ``stored_why``
    is the store's own word for what it has not, ``why`` is about this request. Not ``asked`` is
    the store for fewer tokens than are ever restored.
    ``resume`` are tokens that a killed process had generated already; ``journal`` is the key
    under which those of this one are noted, "" for none, ``noted`` that journal.  ``reused``,
    ``tier`` and ``restore_ms`` are known once the caches were fetched, ``done`` at the end.
    """

    tokens: Sequence[int]
    ids: TokenIds = field(init=False, repr=False)
    tiers: object = None
    stored_common: int = 0
    common: int = 0
    hit: LiveHit | None = None
    lent: list[Any] | None = field(default=None, repr=False)
    near: tuple[int, Any] = field(default=(0, ()), repr=False)
    nearest: Found | None = field(default=None, repr=False)
    match: Match | None = None
    restored: Restored | None = None
    cuts: list[Cut] = field(default_factory=list)
    why: str = ""
    stored_why: str = ""
    asked: bool = True
    single: bool = False
    journal: str = ""
    resume: list[int] = field(default_factory=list)
    noted: ReplyJournal | None = None
    reused: int = 0
    tier: str = "none"
    restore_ms: float = 0.0
    fetched_at: float = 0.0
    alone: bool = True
    done: bool = False

    def __post_init__(self) -> None:
        self.ids = np.frombuffer(array("I", self.tokens), np.uint32)

    @property
    def size(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)

    @property
    def computed(self) -> int:
        """Tokens of the prompt that the model has to see."""
        return len(self.tokens) - self.reused

    @property
    def held(self) -> int:
        """Tokens of the prompt that memory has."""
        return self.hit.length if self.hit is not None else 0

    def borrow(self, live: LiveTier, least: int = 0) -> None:
        """Takes hold of what memory has, if that is more than before and than ``least``."""
        while (hit := live.find(self.ids)) is not None and hit.length > max(self.held, least):
            caches = live.take(hit)
            if caches is not None:  # else it went between the two calls
                arrays = cache_arrays(self.lent or ())
                self.hit, self.lent = hit, caches
                live.discard(arrays)

    def segments(self) -> tuple[list[list[int]], list[str]]:
        """The prompt cut into pieces, and what the cache at the end of each is kept as."""
        tokens = list(self.tokens)
        ends = [cut.position for cut in self.cuts]
        pieces = [tokens[a:b] for a, b in zip([0, *ends], [*ends, len(tokens)], strict=True)]
        return pieces, [*(cut.kind for cut in self.cuts), "final"]

    def fetched(self, reused: int, tier: str, restore_ms: float, alone: bool) -> None:
        """Notes what the fetch gave; ``alone``: no other request was being served."""
        self.reused, self.tier, self.restore_ms = reused, tier, restore_ms
        self.alone, self.fetched_at = alone, time.perf_counter()
        if not self.why and self.computed > 1:
            stored = self.stored_common, self.stored_why
            unasked = 0 if self.asked else self.computed - 1
            self.why = why_not_more(self.reused, self.common, *stored, unasked)

    def receipt(self, rate: Rate) -> dict[str, Any]:
        """What was reused, from where, and the time that spared on this machine."""
        spared = rate.ms(self.reused)
        saved = None if spared is None else round(spared - self.restore_ms, 3) + 0.0  # no -0.0
        return {
            "prompt_tokens": len(self.tokens),
            "reused_tokens": self.reused,
            "computed_tokens": self.computed,
            "tier": self.tier,
            "restore_ms": round(self.restore_ms, 3),
            "saved_ms": saved,
            "resumed_tokens": len(self.resume),
            "why": self.why,
        }

    def line(self) -> str:
        """The request's line in the log."""
        told = f"prompt of {len(self.tokens)} tokens: {self.reused} reused"
        if self.reused:
            told += f" from {self.tier} in {self.restore_ms:.1f} ms"
        told += f", {self.computed} computed"
        if self.resume:
            told += f", reply resumed at token {len(self.resume)}"
        return f"{told}; not more: {self.why}" if self.why else told


class Seen(list[int]):
    """Tokens that a model has seen for a request, with its plan; they grow as mlx-lm has it.

    So do what it takes of them from their start on.
    """

    def __init__(self, tokens: Sequence[int], plan: Plan) -> None:
        super().__init__(tokens)
        self.plan = plan

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice) and not key.start and key.step is None:
            return Seen(cast(list[int], found), self.plan)
        return found


class PlannedPrompt(Seen):
    """The tokens of a prompt, with the plan that was made for them."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.tokens, plan)
