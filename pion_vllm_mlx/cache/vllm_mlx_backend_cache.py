"""The object that vllm-mlx's scheduler takes for its prefix cache.

It offers what the scheduler calls and reads of ``MemoryAwarePrefixCache`` and keeps no array
that is not this module's: a small tier of live caches in the process, and behind it the
lineage store, asked only where it may hold more.  ``look_up`` asks it, and reads what it has, on
a thread beside the one that generates, before the scheduler calls ``fetch``; what was not looked
up is looked up there.  Everything else runs on the thread that owns MLX, but for the statistics,
plain numbers that any thread may read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx

from pion_vllm_mlx.cache.beside import Beside, Blocking
from pion_vllm_mlx.cache.handles import owned
from pion_vllm_mlx.cache.lineage import Cut, LineageStore, Match, policy
from pion_vllm_mlx.cache.lineage.tokens import NO_TOKENS, token_ids
from pion_vllm_mlx.cache.lineage.types import KeepKind
from pion_vllm_mlx.cache.live_tier import Tokens, check_length
from pion_vllm_mlx.cache.live_unwritten import UnwrittenTier
from pion_vllm_mlx.cache.read_ahead import ReadAhead
from pion_vllm_mlx.cache.spread import Spread
from pion_vllm_mlx.cache.vllm_mlx_backend_kinds import are_known, cache_kinds
from pion_vllm_mlx.cache.vllm_mlx_backend_lookup import Counters, LookedUp, Lookup, Miss
from pion_vllm_mlx.cache.vllm_mlx_backend_restore import restore
from pion_vllm_mlx.cache.vllm_mlx_backend_settings import UNEXPECTED, BackendSettings, guarded
from pion_vllm_mlx.errors import PionError, UnsupportedCache

__all__ = ["UNEXPECTED", "BackendSettings", "PionPrefixCache"]

log = logging.getLogger(__name__)

MEGABYTE = 1 << 20

T = TypeVar("T")


class PionPrefixCache:
    """A prefix cache of two tiers in the place of vllm-mlx's own."""

    def __init__(self, model: Any, config: Any, settings: BackendSettings) -> None:
        """``config`` is vllm-mlx's MemoryCacheConfig: the budget of the in-process tier."""
        self.settings = settings
        self.model = model
        self.spread = Spread()
        self._beside = Beside(self.spread.pace)
        self._live = settings.live_tier(config, self._discard)
        self._store: LineageStore | None = None
        self._store_opened = False
        self._counters = Counters()
        self._last_match_type: str | None = None
        self._last_matched_key: list[int] | None = None
        self._told: set[str] = set()
        kinds = cache_kinds(model)
        self.recurrent, self.known = "ArraysCache" in kinds, are_known(model)
        self._bypass: str | None = None
        uncut = {"ArraysCache", "RotatingKVCache", "ChunkedKVCache"}
        self._wants_cuts = not settings.keeps_nothing and bool(kinds & uncut)
        self.last_lookup = Lookup(NO_TOKENS)
        self.last_miss: Miss | None = None
        self.prefill_tokens_per_second = 0.0
        self.blocking = Blocking()
        #: whether the steps of a batch carry what is in ``spread``; else it is done at once.
        self.in_steps = False
        self._ahead = ReadAhead(self._beside)
        #: finds out on the thread beside what else is to be known of a prompt, of its text
        self.ahead: Callable[[str, Any], None] = lambda prompt, tokenizer: None
        self._looked_up = LookedUp()
        self._closed = False

    # What the scheduler calls ------------------------------------------------------------

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Caches that hold a prefix of ``tokens``, and the rest, which is never empty.

        The caches are the caller's own; None with all of ``tokens`` for a miss.
        """
        with self.blocking.measured("fetch"):
            return self._fetch(list(tokens))

    def _fetch(self, prompt: list[int]) -> tuple[list[Any] | None, list[int]]:
        try:
            lookup = self._begun(prompt)
            lookup = self._looked_up.take(lookup.ids) or lookup
            caches = self._find(lookup) if lookup.prompt_tokens > 1 else None
        except UNEXPECTED as error:
            # A prefix cache is no reason for a request to fail.
            log.exception("the prefix cache failed")
            lookup, caches = Lookup(NO_TOKENS, why=f"the cache failed: {error}"), None
        self.last_lookup = lookup
        self._counters.count(lookup, len(prompt))
        self._last_matched_key = prompt[: lookup.reused_tokens] if caches else None
        self._last_match_type = "prefix" if caches else "miss"
        return (caches, prompt[lookup.reused_tokens :]) if caches else (None, prompt)

    def store(self, tokens: list[int], cache: list[Any], evict_prefixes: bool = True) -> bool:
        """Keep ``cache``, which holds exactly ``tokens``; what it supersedes goes by itself."""
        del evict_prefixes
        if self.settings.keeps_nothing:
            return False
        # a batch's scheduler comes here with a reply, that of image models with a prompt
        with self.blocking.measured("keep"):
            stays = self.in_steps and self._live.whole_only
            return self._keep(tokens, cache, "final", stays=stays)

    def remove(self, tokens: list[int], *, include_ssd: bool = False) -> bool:
        """Give up the live entry of exactly ``tokens``.  The store evicts by its own budget."""
        del include_ssd
        try:
            return self._live.remove(tokens)
        except UnsupportedCache:
            return False

    def clear(self) -> None:
        """Give up all live entries; what is stored stays (its user deletes conversations)."""
        self._live.clear()

    def get_stats(self) -> dict[str, Any]:
        """vllm-mlx's own statistics, ours beside them under ``pion``.  Any thread."""
        counters, live = self._counters, self._live
        misses, asked = counters.hits["none"], counters.requests
        hits = asked - misses
        return {
            "hits": hits,
            "misses": misses,
            "hit_rate": round(hits / asked, 4) if asked else 0.0,
            "evictions": live.evictions,
            "tokens_saved": counters.tokens_reused,
            "current_memory_mb": round(live.nbytes / MEGABYTE, 2),
            "max_memory_mb": round(live.budget_bytes / MEGABYTE, 2),
            "memory_utilization": round(live.nbytes / max(1, live.budget_bytes), 4),
            "entry_count": len(live),
            "store_rejections": live.rejections + counters.refused_live,
            "pion": self.pion_stats(),
        }

    def reset_stats(self) -> None:
        """Begin counting anew."""
        self._counters = Counters()

    def save_to_disk(self, cache_dir: str) -> bool:
        """Wait until all that was kept is stored; ``cache_dir`` is not used.

        What waits for steps is done at once on the thread that generates; False on others, which
        cannot do it.
        """
        del cache_dir
        finished = guarded(self.spread.finish_here, False)
        return self._store is not None and self._store.flush() and finished

    def load_from_disk(self, cache_dir: str) -> int:
        """Open the store on this thread, which owns MLX, and have the latest conversations read."""
        del cache_dir
        store = self.store_or_none()
        if store is not None and store.bypass is None:
            self._ahead.begin(store, self._live)
        return 0

    def prepare_store(self, tokens: list[int], cache: list[Any], auxiliary: Any = None) -> None:
        """vllm-mlx's image path may prepare an entry before it is published: not offered."""
        del tokens, cache, auxiliary

    def set_ssd_tier(self, ssd_tier: Any) -> None:
        """vllm-mlx's own disk tier does not see our entries."""
        if ssd_tier is not None:
            self._tell("--ssd-cache-dir has no effect: the store is the disk tier")

    def check_ssd(self, tokens: list[int]) -> None:
        """Nothing waits in vllm-mlx's own disk tier."""
        del tokens

    @property
    def memory_limit_mb(self) -> float:
        """The budget of the in-process tier."""
        return self._live.budget_bytes / MEGABYTE

    @property
    def memory_usage_mb(self) -> float:
        """What the in-process tier holds."""
        return self._live.nbytes / MEGABYTE

    @property
    def _entries(self) -> UnwrittenTier:
        return self._live

    @property
    def _current_memory(self) -> int:
        return self._live.nbytes

    def __len__(self) -> int:
        return len(self._live)

    # What the patched scheduler adds -----------------------------------------------------

    def keep(
        self,
        tokens: Tokens,
        caches: Sequence[Any],
        kind: KeepKind = "final",
        *,
        reply: bool = False,
    ) -> bool:
        """Keep ``caches``, which hold exactly ``tokens``, in both tiers; never raises for them.

        A reply's recurrent state stays in this process: it would be a second state a turn. So do
        replies where no part of what is stored is used: their prompt would be one.
        """
        if self.settings.keeps_nothing:
            return False
        with self.blocking.measured("keep"):
            stays = reply and (self.recurrent or self._live.whole_only)
            kept = self._keep(tokens, caches, kind, stays=stays)
            self._counters.replies_kept += reply and kept
            return kept

    def _keep(self, tokens: Tokens, caches: Sequence[Any], kind: KeepKind, *, stays: bool) -> bool:
        """``stays``: in this process alone."""
        try:
            check_length(caches, len(tokens))
            live = self._live.put(tokens, caches, kind, schedule=self.spread.add)
            self._counters.kept_live += 1
            store = self.store_or_none()
            stores = store is not None and not stays
            if store is not None and stores:
                # what a batch hands over is nobody else's; an image model's may be written to
                given, add = self.in_steps, self.spread.add
                over = self._live.hold(tokens, caches, kind, add, given=given)
                steps = store.keeping(tokens, caches, kind, given=given, schedule=add, over=over)
                self.spread.store(steps, self.blocking, guarded)
            if not self.in_steps:
                self.spread.finish()
            return live or stores
        except UnsupportedCache as reason:
            self._tell(f"not kept: {reason}")
        except UNEXPECTED:
            log.exception("a prefix could not be kept")
        self._counters.refused_live += 1
        return False

    def look_up(self, tokens: Sequence[int]) -> Lookup | None:
        """Has the store asked for a prompt, and read, before ``fetch`` is called for it.

        For the thread beside; None where there is nothing to ask.
        """
        self._ahead.stop()
        lookup = self._begun(list(tokens))
        if self._store is None or lookup.prompt_tokens < 2:
            return None
        lookup.near = self._live.nearest(lookup.ids)  # what is read will be the nearest
        hit = self._live.find(lookup.ids)
        self._ask_store(lookup, hit.length if hit else 0)
        self._looked_up.add(lookup)
        return lookup

    def forget(self, lookup: Lookup) -> None:
        """Nobody will fetch what was looked up, if nobody has."""
        self._looked_up.forget(lookup)

    def beside(self, call: Callable[[], T]) -> Future[T]:
        """What ``call`` gives on the thread that asks the store."""
        return self._beside.ask(call)

    def cuts(self, lookup: Lookup, anchor: int | None) -> list[Cut]:
        """Where this prompt's cache has to be kept while what is not reused is prefilled.

        None for a model whose rows can be cut anywhere; the store is told of its anchor.
        """
        if not self.wants_anchors:
            return []
        match = lookup.match if lookup.match is not None else Match(lookup.ids)
        match = replace(match, length=lookup.reused_tokens, common=lookup.common)
        store = self.store_or_none()
        if store is not None and store.bypass is None:
            return store.cuts(lookup.ids, match, anchor)
        if not self._wants_cuts:
            return []
        return policy.cuts(lookup.prompt_tokens, match.length, match.common, anchor)

    def bound(self, max_kv_size: int) -> None:
        """Told of ``--max-kv-size``: such caches are other than the model's own.

        They live in this process only, and cannot be shortened once they are full.
        """
        if max_kv_size > 0 and not self._store_opened:
            self._store_opened, self._wants_cuts = True, True
            self._tell("with --max-kv-size prefixes are kept in this process only")

    def stand_back(self, reason: str) -> None:
        """Nothing is asked of this object; ``reason`` says why nothing is stored."""
        self._store_opened, self._bypass = True, reason
        if self.settings.options is not None:
            self._tell(f"prefixes of this model are not stored: {reason}")

    @property
    def wants_anchors(self) -> bool:
        """Whether anybody asks where system prompts end."""
        return self._wants_cuts or self.settings.options is not None

    def store_or_none(self) -> LineageStore | None:
        """The store, opened at its first use on the thread that owns MLX."""
        if not self._store_opened:
            self._store_opened = True
            if self.settings.options is not None:
                try:
                    self._store = LineageStore(self.model, self.settings.options)
                    self._store.connect()  # the first look-up has not so much time
                    self.prefill_tokens_per_second = self._store.prefill_rate
                except PionError as reason:
                    self._tell(f"no store: {reason}")
        return self._store

    def pion_stats(self) -> dict[str, Any]:
        """Our own counters under the names of ``/v1/pion/stats``.  Any thread."""
        store = self._store
        waiting = self.spread.waiting  # first: what is done goes on to wait for the store
        stored: dict[str, Any] = store.stats() if store is not None else {"bypass": self._bypass}
        return {
            **({"pion": "disabled"} if self.settings.options is None else {}),
            **dict.fromkeys(("tokens_looked_up", "read_ahead"), 0),
            **stored,
            **self._counters.as_dict(),
            "waiting": waiting + stored.get("waiting", 0),
            "restores": stored.get("hits", 0),
            "resumes": 0,
            "reading_ahead": not self._ahead.done,
            "live_bytes": self._live.nbytes,
            "live_entries": len(self._live),
            **self._live.told(),
            "uncopied_bytes": self.spread.waiting_bytes,
            "allocator_bytes": mx.get_cache_memory(),
            "generation_thread": self.blocking.as_dict(),
            "prefill_tokens_per_second": round(self.prefill_tokens_per_second, 1) or None,
        }

    def close(self) -> None:
        """Write what waits and let the store go.

        On another thread than that which generates not what waits for its steps.
        """
        if self._store is not None:
            if not guarded(self.spread.finish_here, False):
                self._tell("not stored: what requests in flight were about to keep")
            self._store.close()
        self._store, self._closed = None, True
        self._beside.close()

    # --------------------------------------------------------------------------------------

    def _begun(self, prompt: list[int]) -> Lookup:
        ids, why = token_ids(prompt)
        if self.settings.keeps_nothing:
            why = "--disable-prefix-cache: nothing is kept"
        return Lookup(NO_TOKENS if ids is None else ids, why=why)

    def _find(self, lookup: Lookup) -> list[Any] | None:
        """The longest prefix of either tier; notes in ``lookup`` what it was."""
        near = self._live.nearest(lookup.ids)
        if lookup.restored is None or near[0] > lookup.restored.length:
            lookup.near = near
        hit = self._live.find(lookup.ids)
        held = hit.length if hit else 0
        if not lookup.asked or held < lookup.held:  # what made the store unwanted is gone again
            self.store_or_none()
            self._ask_store(lookup, held)
        restored, lookup.restored = lookup.restored, None
        caches = None
        if restored is not None and restored.length >= held:  # memory holds it, too, by now
            lookup.tier, lookup.reused_tokens = restored.lane, restored.length
            lookup.restore_ms, caches = restored.ms, list(restored.caches)
        elif hit is not None and (kept := self._live.take(hit)) is not None:
            lookup.tier, lookup.reused_tokens, caches = "memory", held, owned(kept)
        lookup.say_why()
        return caches

    def _ask_store(self, lookup: Lookup, held: int) -> None:
        """Reads what the store has more than the ``held`` tokens of memory."""
        lookup.asked, lookup.held = True, held
        if self._store is not None:
            restore(lookup, held, self._store, self._live)

    def _discard(self, arrays: list[Any]) -> None:
        if not self._closed:
            self._beside.drop(arrays)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning("pion: %s", sentence)
