"""The prompt cache of mlx-lm's server in two tiers: live caches, and the lineage store.

It stands in the place of ``LRUPromptCache``.  What a request may reuse is looked up before it
is served (``look_up``, on the thread of its HTTP connection): the store is asked and read on a
thread beside the one that generates.  ``plan``, where its prompt reaches that thread, looks
once more at what is live by then, and sets the prefill's cuts; ``fetch_nearest_cache`` hands
the caches over.

Between tokens of other requests nothing waits for the store: ``insert_cache`` gives it views
of the arrays, which are computed along with the next tokens (``spread``), and who takes them
apart is its background thread.  What a call costs the thread that generates depends on the
number of arrays, not on that of rows; ``stats`` says how long each kind took.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.cache.beside import BUSY, MOST_DEADLINES, Beside, Blocking, waited
from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.handles import owned
from pion_vllm_mlx.cache.layers import cache_arrays
from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore, Match
from pion_vllm_mlx.cache.lineage.client import CONNECT_SECONDS, LineageClient, connect
from pion_vllm_mlx.cache.lineage.missed import Missed
from pion_vllm_mlx.cache.lineage.tokens import token_ids
from pion_vllm_mlx.cache.lineage.types import KEEP_KINDS, KeepKind
from pion_vllm_mlx.cache.live_tier import MAX_CHECKPOINTS
from pion_vllm_mlx.cache.live_unwritten import UnwrittenTier
from pion_vllm_mlx.cache.read_ahead import ReadAhead
from pion_vllm_mlx.cache.spread import Spread
from pion_vllm_mlx.errors import UnsupportedCache
from pion_vllm_mlx.serve.lineage_cache_handles import recurrent, settled
from pion_vllm_mlx.serve.lineage_cache_limits import CacheLimits, PlainCache
from pion_vllm_mlx.serve.lineage_cache_lookup import Tiers
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, Rate, Seen

__all__ = ["BUSY", "CacheLimits", "LineageCache", "guarded"]

log = logging.getLogger("pion_vllm_mlx.serve")

MODEL_CHANGE_SECONDS = 2.0
#: what mlx-lm's server calls the cache at the end of a reply.
REPLY = "assistant"
#: what is told from the start on, as nothing.
COUNTED = ("requests", "tokens_prompt", "tokens_reused", "tokens_looked_up", "read_ahead")

T = TypeVar("T")


class LineageCache:
    """See the module's docstring.  ``options`` None: mlx-lm's own cache, and nothing else."""

    def __init__(self, options: LineageOptions | None, limits: CacheLimits) -> None:
        self._options = options
        self._limits = limits
        self._plain = PlainCache(limits.plain_entries)
        self._live = UnwrittenTier(0)
        self._store: LineageStore | None = None
        self._tiers: Tiers | None = None
        self._model: Any = None
        self._counts: Counter[str] = Counter()
        self._told: set[str] = set()
        self._pending: Plan | None = None
        self._open: weakref.WeakSet[Plan] = weakref.WeakSet()
        self.spread = Spread()
        self._beside = Beside(self.spread.pace)
        self._ahead = ReadAhead(self._beside)
        self.blocking = Blocking()
        self.prefilling = Rate()
        self.last_miss: Missed | None = None
        #: gives what is to be called when the caches that are handed over now have been kept.
        self.on_insert: Callable[[], Callable[[], None]] = lambda: _nothing
        self._connect_by = time.monotonic() + CONNECT_SECONDS
        self._door: LineageClient | None = None
        if options is not None:  # while the weights are read
            self._door = connect(options)
            weakref.finalize(self, self._door.close)
            self._beside.ask(partial(self._door.reach, CONNECT_SECONDS))

    # -- the model --------------------------------------------------------------

    def attach(self, model: Any, draft_model: Any) -> None:
        """Serves ``model`` from now on; caches of another one are given up.

        Opens the store: its key is read from all weights.
        """
        if model is self._model:
            return
        self.spread.finish()  # what is of the model before goes to its own tiers
        self._ahead.stop()
        self._model, self._tiers, self._pending = model, None, None
        self.prefilling = Rate()
        self._live.clear()
        self._live = UnwrittenTier(0)
        self._beside.ask(mx.clear_cache)  # behind what is freed there
        if self._options is None:
            return
        if self._store is not None:
            self._store.close(MODEL_CHANGE_SECONDS)
        self._store = store = LineageStore(model, self._options, draft_model=draft_model)
        if store.bypass is not None:
            return
        states = MAX_CHECKPOINTS if store.wants_cuts else 1
        self._live = UnwrittenTier(
            self._limits.live_bytes(),
            self._limits.live_entries(states),
            discard=self._beside.drop,
            whole_only=store.whole_only,
            aside_bytes=self._options.queue_bytes,
        )
        self.prefilling = Rate(store=store)
        self._tiers = Tiers(store, self._live, recurrent(make_prompt_cache(model)))
        left = max(store.options.deadline_seconds, self._connect_by - time.monotonic())
        self._beside.ask(partial(store.connect, left))  # every look-up is behind it
        self._ahead = ReadAhead(self._beside)
        self._ahead.begin(store, self._live)

    @property
    def store(self) -> LineageStore | None:
        """The store, None without one: not wanted, or a cache class that it does not know."""
        tiers = self._tiers
        return None if tiers is None else tiers.store

    @property
    def bypass(self) -> str:
        """Why nothing of this model is stored, "" where something is, or nothing is to be."""
        return (self._store.bypass or "") if self._store is not None else ""

    def close(self, timeout: float = 10.0) -> None:
        """Writes what waits, and lets the store go."""
        if self._store is not None:
            self._store.close(timeout)
            self._beside.ask(partial(self._store.close, 0.0))  # what it was just connecting, too
        if self._door is not None:
            self._beside.ask(self._door.close)
        self._beside.close()

    # -- one request, before it is served -----------------------------------------

    def look_up(self, plan: Plan, meanwhile: Callable[[], T]) -> T:
        """Has the store asked for a prompt, and read.  Any thread; waits for it.

        Gives what ``meanwhile`` gives, which this thread does before it waits.  Whatever goes
        wrong in the store, the request goes on: with what the generation thread finds live.
        """
        tiers = self._tiers
        if tiers is None:
            return meanwhile()
        self._ahead.stop()
        done = self._beside.ask(lambda: guarded(lambda: tiers.look_up(plan), None))
        found = meanwhile()
        if not waited(done, MOST_DEADLINES * tiers.store.options.deadline_seconds):
            plan.tiers, plan.why = tiers, BUSY
        return found

    def beside(self, call: Callable[[], T]) -> T:
        """What ``call`` gives on the thread that asks the store."""
        return self._beside.ask(call).result()

    # -- one request, on the generation thread ------------------------------------

    def plan(self, plan: Plan, anchor: int | None) -> Plan:
        """Completes the plan of a prompt: what is kept of it, and where it is to be cut."""
        tiers = self._tiers
        if tiers is not None:
            with self.blocking.measured("plan"):
                self._complete(plan, tiers, anchor)
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
        with self.blocking.measured("fetch"):
            caches = guarded(lambda: self._fetch(plan), None)
        if caches is None:
            plan.fetched(0, "none", 0.0, self._alone())
        self._open.add(plan)
        if not plan.single:
            self._pending = None  # a plan is open for as long as its request's context lives
        self._count(plan)
        log.info("%s", plan.line())
        return caches, tokens[plan.reused :]

    def pending(self, tokens: Sequence[int]) -> Plan | None:
        """The plan that was made last, if it is of ``tokens``."""
        plan = self._pending
        if plan is None:
            return None
        mine = tokens.plan is plan if isinstance(tokens, Seen) else plan.tokens == tokens
        return plan if mine else None

    def single(self, rest: Sequence[int]) -> Plan | None:
        """The plan of the request that is not batched and begins now, with ``rest`` to compute."""
        self.spread.finish()
        plan, self._pending = self._pending, None
        if plan is None or not plan.single or list(plan.tokens[plan.reused :]) != list(rest):
            return None
        return plan

    def insert_cache(
        self, model: Any, tokens: list[int], caches: list[Any], *, cache_type: str = REPLY
    ) -> None:
        """Keeps ``caches``, which hold ``tokens`` and are nobody else's from now on.

        Never raises, never waits for the store.
        """
        told, tiers = self.on_insert(), self._tiers

        def insert() -> None:
            with self.blocking.measured("insert"):
                if tiers is None or not self._take(tiers, tokens, caches, cache_type):
                    kind = cache_type if cache_type in ("system", "user") else REPLY
                    self._plain.insert_cache(model, tokens, caches, cache_type=kind)
            told()

        if tiers is None or not isinstance(tokens, Seen) or tokens.plan.single:
            self.spread.finish()
            insert()
            self.spread.finish()  # nobody else is served: no step would carry it
        else:
            self.spread.soon(insert, of=tokens.plan, ending=cache_type not in KEEP_KINDS)

    # -- the rest of mlx-lm's interface --------------------------------------------

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Gives up live caches until they fit."""
        if self._tiers is None:
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
        waiting = self.spread.waiting  # first: what is done goes on to wait for the store
        stored = self._store.stats() if self._store is not None else {}
        return {
            **dict.fromkeys(COUNTED, 0),
            **stored,
            **self._counts,
            "waiting": waiting + stored.get("waiting", 0),
            "restores": stored.get("hits", 0),
            "resumes": self._counts["resumes"],
            "reading_ahead": not self._ahead.done,
            "live_bytes": self.nbytes,
            "live_entries": len(self),
            **self._live.told(),
            "uncopied_bytes": self.spread.waiting_bytes,
            "allocator_bytes": mx.get_cache_memory(),
            "generation_thread": self.blocking.as_dict(),
            "prefill_tokens_per_second": round(self.prefilling.tokens_per_second, 1) or None,
        }

    # -- inside -----------------------------------------------------------------

    def _complete(self, plan: Plan, tiers: Tiers, anchor: int | None) -> None:
        if plan.tiers is not tiers:  # the first of a model: nobody else is being served
            self.look_up(plan, _nothing)
        plan.common = max(plan.stored_common, tiers.live.common(plan.ids))
        restored = plan.restored.length if plan.restored is not None else 0
        plan.borrow(tiers.live, min(restored, plan.size - 1))
        if plan.held > min(restored, plan.size - 1) and not plan.resume:
            plan.restored = None
        length = plan.held if plan.restored is None else restored
        known = replace(plan.match or Match(plan.ids), length=length, common=plan.common)
        plan.cuts = tiers.store.cuts(plan.ids, known, anchor)
        self._pending = plan

    def _fetch(self, plan: Plan) -> list[Any] | None:
        restored, plan.restored = plan.restored, None
        lent, plan.lent = plan.lent, None
        if restored is not None:
            arrays, lent = cache_arrays(lent or ()), None  # the list has the last references
            self._beside.drop(arrays)
            reused = min(restored.length, plan.size - 1)
            plan.fetched(reused, restored.lane, restored.ms, self._alone())
            return list(restored.caches)
        began = time.perf_counter()
        if lent is None or plan.hit is None:
            return None
        caches = owned(lent)
        elapsed_ms = (time.perf_counter() - began) * 1000
        plan.fetched(plan.hit.length, "memory", elapsed_ms, self._alone())
        return caches

    def _count(self, plan: Plan) -> None:
        self._counts["requests"] += 1
        self._counts["tokens_prompt"] += plan.size
        self._counts["tokens_reused"] += plan.reused
        self._counts[f"hits_{plan.tier}"] += 1
        if plan.computed > 1:
            self.last_miss = Missed(plan.ids, plan.reused, plan.why, plan.near, plan.nearest)

    def _alone(self) -> bool:
        return all(plan.done for plan in self._open)

    def _take(self, tiers: Tiers, tokens: list[int], caches: list[Any], cache_type: str) -> bool:
        """Keeps caches in the two tiers; False for those of images, which have other ids."""
        ids, _ = token_ids(list(tokens))  # a plain list is read ten times as fast
        if ids is None:
            return False
        plan = tokens.plan if isinstance(tokens, Seen) else None
        guarded(lambda: self._keep(tiers, ids, caches, cache_type, plan), None)
        return True

    def _keep(
        self, tiers: Tiers, ids: TokenIds, caches: list[Any], cache_type: str, plan: Plan | None
    ) -> None:
        reply = cache_type not in KEEP_KINDS
        kind = "final" if reply else cast(KeepKind, cache_type)
        ids = settled(ids, caches)
        if plan is not None:
            self._note_progress(plan, int(ids.size), reply)
        lacking: list[Any] = []
        if not ids.size or not self._put(tiers, ids, caches, kind, lacking):
            return
        self.spread.add(lacking)

        # A reply's recurrent state would be a second state a turn: it stays in this process.
        # So do replies where no part of what is stored is used: their prompt would be one.
        if not (reply and (tiers.recurrent or tiers.store.whole_only)):
            schedule = self.spread.add
            over = tiers.live.hold(ids, caches, kind, schedule)
            steps = tiers.store.keeping(ids, caches, kind, given=True, schedule=schedule, over=over)
            self.spread.store(steps, self.blocking, guarded)

    def _put(
        self, tiers: Tiers, ids: TokenIds, caches: list[Any], kind: str, lacking: list[Any]
    ) -> bool:
        """Keeps live caches; False, and said once, for those that cannot be kept at all."""
        try:
            tiers.live.put(ids, caches, kind, schedule=lacking.extend)
        except UnsupportedCache as reason:
            self._tell(f"not kept: {reason}")
            return False
        return True

    def _note_progress(self, plan: Plan, held: int, reply: bool) -> None:
        """Measures a prefill that ended here, or closes the request."""
        if reply:
            plan.done = True
        elif held >= plan.size - 1 and plan.alone and self._only(plan) and not plan.single:
            self.prefilling.measured(plan.computed - 1, time.perf_counter() - plan.fetched_at)

    def _only(self, plan: Plan) -> bool:
        return all(one.done or one is plan for one in self._open)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning("%s", sentence)


def _nothing() -> None:
    """Nobody waits for caches to be kept."""


def guarded(call: Callable[[], T], otherwise: T) -> T:
    """What ``call`` gives; ``otherwise`` if it fails: generation goes on without the cache."""
    try:
        return call()
    except Exception:  # noqa: BLE001  (whatever it is, it must not end the generation thread)
        log.exception("the prompt cache failed; the request goes on without it")
        return otherwise
