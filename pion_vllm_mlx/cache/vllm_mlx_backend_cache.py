"""The object that vllm-mlx's scheduler takes for its prefix cache.

It offers what the scheduler calls and reads of ``MemoryAwarePrefixCache`` and keeps no array
that is not this module's: a small tier of live caches in the process, and behind it the
lineage store, asked only where it may hold more.  Everything but the statistics runs on the
thread that owns MLX; the statistics are plain numbers that any thread may read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage import Cut, LineageOptions, LineageStore, Match, policy
from pion_vllm_mlx.cache.lineage.tokens import NO_TOKENS, token_ids
from pion_vllm_mlx.cache.lineage.types import KeepKind
from pion_vllm_mlx.cache.live_tier import LiveTier, Tokens, check_length
from pion_vllm_mlx.errors import PionError, UnsupportedCache

log = logging.getLogger(__name__)

MEGABYTE = 1 << 20
#: what a fault of ours or of MLX can end in: on the generation thread it would end every request
UNEXPECTED = (
    PionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class BackendSettings:
    """What every cache object of an installed backend shares.

    ``options`` None: no store, prefixes live in this process only.  ``keep_replies``: what was
    generated is kept as well, so that the next turn starts behind it.
    """

    options: LineageOptions | None = field(default_factory=LineageOptions)
    keep_replies: bool = True


@dataclass
class Lookup:
    """What a fetch found: for cuts, the log line and the receipt.

    ``tier``: ``memory``, the store's lane, or ``none``.  ``why`` says why it was not more.
    """

    ids: TokenIds
    reused_tokens: int = 0
    tier: str = "none"
    why: str = ""
    common: int = 0
    restore_ms: float = 0.0
    match: Match | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.ids.size)


@dataclass(frozen=True)
class Miss:
    """The last prompt that was not wholly reused, and the engine it was asked of."""

    core: Any
    tokens: list[int]
    at: float = field(default_factory=time.monotonic)


@dataclass
class Counters:
    """Numbers of one cache object; written by one thread, read by any.

    Of all requests: ``tokens_prompt`` tokens of prompts, of which ``tokens_reused`` were not
    computed. ``kept_live`` and ``refused_live`` are prefixes, ``replies_kept`` of those the ends
    of replies: a next turn reuses what was generated, too. The store has counters of its own.
    """

    requests: int = 0
    tokens_prompt: int = 0
    tokens_reused: int = 0
    hits_memory: int = 0
    hits_store: int = 0
    hits_none: int = 0
    kept_live: int = 0
    replies_kept: int = 0
    refused_live: int = 0


class PionPrefixCache:
    """A prefix cache of two tiers in the place of vllm-mlx's own."""

    def __init__(self, model: Any, config: Any, settings: BackendSettings) -> None:
        """``config`` is vllm-mlx's MemoryCacheConfig: the budget of the in-process tier."""
        self.settings = settings
        self._model = model
        self._live = LiveTier(int(config.compute_memory_limit()), int(config.max_entries))
        self._store: LineageStore | None = None
        self._store_opened = False
        self._counters = Counters()
        self._last_match_type: str | None = None
        self._last_matched_key: list[int] | None = None
        self._told: set[str] = set()
        kinds = _kinds(model)
        self.recurrent = "ArraysCache" in kinds
        self._wants_cuts = bool(kinds & {"ArraysCache", "RotatingKVCache", "ChunkedKVCache"})
        self.last_lookup = Lookup(NO_TOKENS)
        self.last_miss: Miss | None = None
        self.prefill_tokens_per_second = 0.0

    # What the scheduler calls ------------------------------------------------------------

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Caches that hold a prefix of ``tokens``, and the rest, which is never empty.

        The caches are the caller's own; None with all of ``tokens`` for a miss.
        """
        prompt = list(tokens)
        try:
            ids, why = token_ids(prompt)
            lookup = Lookup(NO_TOKENS if ids is None else ids, why=why)
            caches = self._find(lookup) if lookup.prompt_tokens > 1 else None
        except UNEXPECTED as error:
            # A prefix cache is no reason for a request to fail.
            log.exception("the prefix cache failed")
            lookup, caches = Lookup(NO_TOKENS, why=f"the cache failed: {error}"), None
        self.last_lookup = lookup
        self._count(lookup, len(prompt))
        self._last_matched_key = prompt[: lookup.reused_tokens] if caches else None
        self._last_match_type = "prefix" if caches else "miss"
        return (caches, prompt[lookup.reused_tokens :]) if caches else (None, prompt)

    def store(self, tokens: list[int], cache: list[Any], evict_prefixes: bool = True) -> bool:
        """Keep ``cache``, which holds exactly ``tokens``; what it supersedes goes by itself."""
        del evict_prefixes
        return self.keep(tokens, cache, "final")

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
        hits, asked = counters.requests - counters.hits_none, counters.requests
        return {
            "hits": hits,
            "misses": counters.hits_none,
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
        """Wait until all that was kept is stored; ``cache_dir`` is not used."""
        del cache_dir
        return self._store.flush() if self._store is not None else False

    def load_from_disk(self, cache_dir: str) -> int:
        """Open the store on this thread, which owns MLX; rows are read when they are needed."""
        del cache_dir
        self.store_or_none()
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
    def _entries(self) -> LiveTier:
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

        A reply's recurrent state stays in this process: it would be a second state a turn.
        """
        try:
            check_length(caches, len(tokens))
            live = self._live.put(tokens, caches, kind)
            self._counters.kept_live += 1
            self._counters.replies_kept += reply
            store = self.store_or_none()
            if store is None or (reply and self.recurrent):
                return live
            return store.keep(tokens, caches, kind) or live
        except UnsupportedCache as reason:
            self._tell(f"not kept: {reason}")
        except UNEXPECTED:
            log.exception("a prefix could not be kept")
        self._counters.refused_live += 1
        return False

    def cuts(self, lookup: Lookup, anchor: int | None) -> list[Cut]:
        """Where this prompt's cache has to be kept while what is not reused is prefilled.

        None for a model whose rows can be cut anywhere; the store is told of its anchor.
        """
        if not self.wants_anchors:
            return []
        match = lookup.match if lookup.match is not None else Match(lookup.ids)
        match = replace(
            match,
            length=lookup.reused_tokens,
            common=max(lookup.common, match.common),
        )
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
                    self._store = LineageStore(self._model, self.settings.options)
                    self._store.connect()  # the first look-up has not so much time
                except PionError as reason:
                    self._tell(f"no store: {reason}")
        return self._store

    def pion_stats(self) -> dict[str, Any]:
        """Our own counters, flat.  Any thread."""
        store = self._store
        mine: dict[str, Any] = {**vars(self._counters), "live_bytes": self._live.nbytes}
        if self.settings.options is None:
            return {"pion": "disabled", **mine}
        return {**mine, **(store.stats() if store is not None else {})}

    def close(self) -> None:
        """Write what waits and let the store go."""
        if self._store is not None:
            self._store.close()
        self._store = None

    # --------------------------------------------------------------------------------------

    def _find(self, lookup: Lookup) -> list[Any] | None:
        """The longest prefix of either tier; notes in ``lookup`` what it was."""
        hit = self._live.find(lookup.ids)
        lookup.common = self._live.common(lookup.ids)
        length = hit.length if hit else 0
        stored = self._restored(length, lookup)
        if stored is not None:
            return stored
        caches = self._live.take(hit) if hit else None
        if caches is not None:
            lookup.tier, lookup.reused_tokens = "memory", length
            if lookup.match is None or lookup.match.length <= length:
                lookup.why = ""
        lookup.why = lookup.why or _why_not_more(lookup)
        return caches

    def _restored(self, length: int, lookup: Lookup) -> list[Any] | None:
        """What the store holds, where that is at least ``min_gain`` tokens more."""
        options, store = self.settings.options, self.store_or_none()
        if store is None or options is None:
            return None
        if lookup.prompt_tokens - 1 - length < options.min_gain:
            return None
        lookup.match = match = store.match(lookup.ids)
        lookup.common = max(lookup.common, match.common)
        lookup.why = match.why
        if match.length < length + options.min_gain:
            return None
        restored = store.restore(match)
        if restored is None or restored.length <= length:
            lookup.why = "what is stored could not be restored"
            return None
        lookup.tier, lookup.reused_tokens = restored.lane, restored.length
        lookup.restore_ms = restored.ms
        return list(restored.caches)

    def _count(self, lookup: Lookup, prompt_tokens: int) -> None:
        counters = self._counters
        counters.requests += 1
        counters.tokens_prompt += prompt_tokens
        counters.tokens_reused += lookup.reused_tokens
        counters.hits_none += lookup.reused_tokens == 0
        counters.hits_memory += lookup.tier == "memory"
        counters.hits_store += lookup.tier not in ("memory", "none")

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning("pion: %s", sentence)


def _kinds(model: Any) -> set[str]:
    """The names of the cache classes that the model builds, those in a CacheList too."""
    from mlx_lm.models.cache import CacheList, make_prompt_cache

    def names(caches: Iterable[Any]) -> Iterator[str]:
        for cache in caches:
            if isinstance(cache, CacheList):
                yield from names(cache.caches)
            else:
                yield type(cache).__name__

    return set(names(make_prompt_cache(model)))


def _why_not_more(lookup: Lookup) -> str:
    count, length, common = lookup.prompt_tokens, lookup.reused_tokens, lookup.common
    if length >= count - 1:
        return ""
    if common > length:
        return f"{common} tokens agree with an earlier prompt, but no state was kept there"
    if not common:
        return "no earlier prompt begins like this one"
    return "no earlier prompt goes on like this one"
