"""The prompt cache of mlx-lm's server in two tiers: live caches, and the lineage store.

It stands in the place of ``LRUPromptCache``.  A request is planned first (``plan``, where its
prompt is tokenized): both tiers are asked, without loading anything, and the prefill's cuts
follow.  ``fetch_nearest_cache`` then carries the plan out.  All of it runs on the thread that
owns MLX, apart from ``stats``.

Between tokens of other requests nothing waits: ``insert_cache`` hands rows to the store's
background thread.  What a fetch may cost them is bounded: the store is left alone where a
restore would, by what was measured here, take longer than the prefill that it spares; a
store that does not answer costs its deadline once, and is then not asked for a while.
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    LRUPromptCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from pion_vllm_mlx.cache.completion import token_ids
from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore, Match
from pion_vllm_mlx.cache.lineage.types import KEEP_KINDS, KeepKind
from pion_vllm_mlx.cache.vllm_mlx_backend_live import MAX_CHECKPOINTS, LiveTier
from pion_vllm_mlx.errors import UnsupportedCache
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, Rate

log = logging.getLogger("pion_vllm_mlx.serve")

UNBOUNDED_BYTES = 1 << 62
MAX_JOURNALS = 10_000
MODEL_CHANGE_SECONDS = 2.0
#: nothing between two tokens of other requests should take longer.
BLOCKING_MS = 2.0
#: what mlx-lm's server calls the cache at the end of a reply.
REPLY = "assistant"

T = TypeVar("T")


class PlainCache(LRUPromptCache):
    """mlx-lm's own cache, which leaves the last token of an exact repeat to compute."""

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, Any]:
        """As mlx-lm's, but the rest is never empty: that would end the generation thread."""
        caches, rest = super().fetch_nearest_cache(model, tokens)
        if caches is None or rest:
            return caches, rest
        if not can_trim_prompt_cache(caches):
            return None, tokens
        trim_prompt_cache(caches, 1)
        return caches, tokens[-1:]


@dataclass(frozen=True)
class CacheLimits:
    """mlx-lm's own limits of its prompt cache: entries, and bytes (None: none)."""

    entries: int = 10
    num_bytes: int | None = None


class LineageCache:
    """See the module's docstring.  ``options`` None: mlx-lm's own cache, and nothing else."""

    def __init__(self, options: LineageOptions | None, limits: CacheLimits) -> None:
        self._options = options
        self._limits = limits
        self._plain = PlainCache(limits.entries)
        self._live = LiveTier(0)
        self._store: LineageStore | None = None
        self._model: Any = None
        self._recurrent = False
        self._counts: Counter[str] = Counter()
        self._longest_ms: dict[str, float] = {}
        self._told: set[str] = set()
        self._pending: Plan | None = None
        self._journals: OrderedDict[str, None] = OrderedDict()
        self._open: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._restoring = Rate()
        self.prefilling = Rate()
        self.last_miss: Sequence[int] | None = None

    # -- the model --------------------------------------------------------------

    def attach(self, model: Any, draft_model: Any) -> None:
        """Serves ``model`` from now on; caches of another one are given up.

        Opens the store: its key is read from all weights.
        """
        if model is self._model:
            return
        self._model = model
        self._live = LiveTier(0)
        self._pending = None
        if self._options is None:
            return
        if self._store is not None:
            self._store.close(MODEL_CHANGE_SECONDS)
        self._store = store = LineageStore(model, self._options, draft_model=draft_model)
        self._recurrent = store.bypass is None and recurrent(make_prompt_cache(model))
        states = MAX_CHECKPOINTS if store.wants_cuts else 1
        self._live.max_entries = max(1, self._limits.entries) * states
        self._live.budget_bytes = self._limits.num_bytes or UNBOUNDED_BYTES

    @property
    def store(self) -> LineageStore | None:
        """The store, None without one: not wanted, or a cache class that it does not know."""
        return None if self._store is None or self._store.bypass else self._store

    def close(self, timeout: float = 10.0) -> None:
        """Writes what waits, and lets the store go."""
        if self._store is not None:
            self._store.close(timeout)

    # -- one request ------------------------------------------------------------

    def plan(self, plan: Plan, anchor: int | None) -> Plan:
        """Completes the plan of a prompt: what is kept of it, and where it is to be cut."""
        store = self.store
        if store is None:
            return plan
        began, tokens = time.perf_counter(), plan.tokens
        plan.common = self._live.common(tokens)
        plan.hit = self._live.find(tokens)
        held = plan.hit.length if plan.hit is not None else 0
        if plan.journal:
            self._plan_resume(plan, store)
        if not plan.resume and len(tokens) - 1 - held >= store.options.min_gain:
            match = store.match(tokens)
            plan.common = max(plan.common, match.common)
            plan.why = match.why
            if match.length >= held + store.options.min_gain and self._worth_restoring(match):
                plan.match = match
        length = plan.match.length if plan.match is not None else held
        known = plan.match or Match(token_ids(tokens))
        plan.cuts = store.cuts(tokens, replace(known, length=length, common=plan.common), anchor)
        self._pending = plan
        self._longest("plan", began)
        return plan

    def fetch_nearest_cache(
        self, model: Any, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, Sequence[int]]:
        """Caches of a prefix of ``tokens`` that are the caller's own, and the rest.

        The rest is never empty.  Without a plan of these tokens: mlx-lm's own cache.
        """
        plan = self.pending(tokens)
        if plan is None:
            return cast(tuple[Any, Any], self._plain.fetch_nearest_cache(model, list(tokens)))
        caches = guarded(lambda: self._fetch(plan), None)
        if caches is None:
            plan.fetched(0, "none", 0.0, self._alone())
        self._open.add(plan)
        if not plan.single:
            self._pending = None  # a plan is open for as long as its request's context lives
        self._counts["requests"] += 1
        self._counts["tokens_prompt"] += len(tokens)
        self._counts["tokens_reused"] += plan.reused
        self._counts[f"hits_{plan.tier}"] += 1
        if plan.computed > 1:
            self.last_miss = plan.tokens
        log.info("%s", plan.line())
        return caches, tokens[plan.reused :]

    def pending(self, tokens: Sequence[int]) -> Plan | None:
        """The plan that was made last, if it is of ``tokens``."""
        plan = self._pending
        return plan if plan is not None and plan.tokens == tokens else None

    def single(self, rest: Sequence[int]) -> Plan | None:
        """The plan of the request that is not batched and begins now, with ``rest`` to compute."""
        plan, self._pending = self._pending, None
        if plan is None or not plan.single or list(plan.tokens[plan.reused :]) != list(rest):
            return None
        return plan

    def insert_cache(
        self, model: Any, tokens: list[int], caches: list[Any], *, cache_type: str = REPLY
    ) -> None:
        """Keeps ``caches``, which hold ``tokens``; never raises, never waits for the store."""
        if self.store is None or min(tokens, default=0) < 0:  # images have negative ids
            kind = cache_type if cache_type in ("system", "user") else REPLY
            self._plain.insert_cache(model, tokens, caches, cache_type=kind)
            return
        began = time.perf_counter()
        guarded(lambda: self._insert(tokens, caches, cache_type), None)
        self._longest("insert", began)

    # -- the rest of mlx-lm's interface --------------------------------------------

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Gives up live caches until they fit."""
        if self.store is None:
            self._plain.trim_to(n_sequences=n_sequences, n_bytes=n_bytes)
        elif n_bytes is not None:
            self._live.resize(max(0, n_bytes))

    def __len__(self) -> int:
        return len(self._plain) + len(self._live)

    @property
    def nbytes(self) -> int:
        """What the live caches take."""
        return int(self._plain.nbytes) + self._live.nbytes

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """As mlx-lm's log wants it."""
        return {"live": {"n_sequences": len(self), "n_bytes": self.nbytes}}

    def count(self, name: str) -> None:
        """Counts something that happened to a request."""
        self._counts[name] += 1

    def stats(self) -> dict[str, Any]:
        """Counters of both tiers, flat.  Any thread."""
        if self._options is None:
            return {"pion": "disabled"}
        stored = self._store.stats() if self._store is not None else {}
        return {
            **stored,
            **self._counts,
            "restores": stored.get("hits", 0),
            "resumes": self._counts["resumes"],
            "live_bytes": self.nbytes,
            "live_entries": len(self),
            "live_evictions": self._live.evictions,
            "longest_ms": dict(self._longest_ms),
            "prefill_tokens_per_second": round(self.prefilling.tokens_per_second, 1),
        }

    # -- inside -----------------------------------------------------------------

    def _plan_resume(self, plan: Plan, store: LineageStore) -> None:
        """Continues the reply of a process that was killed, if all that it takes is stored."""
        if plan.journal in self._journals:  # this process has seen to that reply itself
            return
        self._journals[plan.journal] = None
        if len(self._journals) > MAX_JOURNALS:
            self._journals.popitem(last=False)
        noted = store.load_journal(plan.journal)
        if not noted:
            return
        match = store.match([*plan.tokens, *noted])
        if match.length == len(plan.tokens) + len(noted) - 1:
            plan.match, plan.resume = match, noted
        else:
            store.drop_journal(plan.journal)

    def _fetch(self, plan: Plan) -> list[Any] | None:
        alone, held = self._alone(), plan.hit.length if plan.hit is not None else 0
        began = time.perf_counter()
        if plan.match is not None:
            caches = self._restore(plan, held, alone)
            if caches is not None:
                return caches
            plan.why = "what is stored could not be restored"
        caches = self._live.take(plan.hit) if plan.hit is not None else None
        if caches is None:
            return None
        plan.fetched(held, "memory", (time.perf_counter() - began) * 1000, alone)
        return copy.deepcopy(caches)  # handles of its own: mlx-lm writes into arrays in place

    def _restore(self, plan: Plan, held: int, alone: bool) -> list[Any] | None:
        assert self._store is not None and plan.match is not None
        restored = self._store.restore(plan.match)
        if restored is None or restored.length <= held:
            plan.resume = []
            return None
        self._restoring.measured(restored.length, restored.ms / 1000)
        if plan.resume and restored.length != len(plan.tokens) + len(plan.resume) - 1:
            plan.resume = []
            return None
        reused = min(restored.length, len(plan.tokens) - 1)
        plan.fetched(reused, restored.lane, restored.ms, alone)
        caches = list(restored.caches)
        self._put([*plan.tokens, *plan.resume][: restored.length], copy.deepcopy(caches), "final")
        return caches

    def _worth_restoring(self, match: Match) -> bool:
        """Whether a restore holds up others for no longer than the prefill would."""
        if self._alone():
            return True
        restore, prefill = self._restoring.ms(match.length), self.prefilling.ms(match.length)
        return restore is None or prefill is None or restore <= prefill

    def _alone(self) -> bool:
        return all(plan.done for plan in self._open)

    def _insert(self, tokens: list[int], caches: list[Any], cache_type: str) -> None:
        reply = cache_type not in KEEP_KINDS
        kind = "final" if reply else cast(KeepKind, cache_type)
        tokens, caches = settled(tokens, caches)
        if not tokens:
            return
        self._note_progress(tokens, reply)
        if not self._put(tokens, caches, kind):
            return
        # A reply's recurrent state would be a second state a turn: it stays in this process.
        if self._store is not None and not (reply and self._recurrent):
            self._store.keep(tokens, caches, kind)

    def _put(self, tokens: Sequence[int], caches: list[Any], kind: str) -> bool:
        """Keeps live caches; False, and said once, for those that cannot be kept at all."""
        try:
            self._live.put(tokens, caches, kind)
        except UnsupportedCache as reason:
            self._tell(f"not kept: {reason}")
            return False
        return True

    def _note_progress(self, tokens: list[int], reply: bool) -> None:
        """Measures a prefill that ended here, or closes the request."""
        for plan in list(self._open):
            size = len(plan.tokens)
            if plan.done or len(tokens) < size - 1 or tokens[: size - 1] != plan.tokens[: size - 1]:
                continue
            if reply:
                plan.done = True
            elif plan.alone and self._only(plan) and not plan.single:
                elapsed = time.perf_counter() - plan.fetched_at
                self.prefilling.measured(plan.computed - 1, elapsed)
            return

    def _only(self, plan: Plan) -> bool:
        return all(one.done or one is plan for one in self._open)

    def _longest(self, name: str, began: float) -> None:
        """How long a call held up the generation thread, the longest of each kind."""
        elapsed = (time.perf_counter() - began) * 1000
        self._longest_ms[name] = max(self._longest_ms.get(name, 0.0), round(elapsed, 3))
        self._counts[f"{name}s_over_2_ms"] += elapsed > BLOCKING_MS

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning("%s", sentence)


def guarded(call: Callable[[], T], otherwise: T) -> T:
    """What ``call`` gives; ``otherwise`` if it fails: generation goes on without the cache."""
    try:
        return call()
    except Exception:  # noqa: BLE001  (whatever it is, it must not end the generation thread)
        log.exception("the prompt cache failed; the request goes on without it")
        return otherwise


def settled(tokens: list[int], caches: list[Any]) -> tuple[list[int], list[Any]]:
    """Tokens and caches that agree: speculative decoding leaves some caches a few tokens short.

    The caches are shortened in place; where they cannot be, they come back as they are.
    """
    if not can_trim_prompt_cache(caches):
        return tokens, caches
    lengths = [int(cache.offset) for cache in caches if not isinstance(cache, CacheList)]
    held = min([len(tokens), *lengths])
    for cache in caches:
        if not isinstance(cache, CacheList) and cache.offset > held:
            cache.trim(cache.offset - held)
    return tokens[:held], caches


def recurrent(caches: Iterable[Any]) -> bool:
    """Whether there is a state among the caches that exists only where it was taken."""
    return any(
        recurrent(cache.caches) if isinstance(cache, CacheList) else isinstance(cache, ArraysCache)
        for cache in caches
    )
