"""LineageStore: conversations of one model that survive their process.

One request of an engine, all calls on the thread that owns MLX:

1. ``match(tokens)``: what is stored of the prompt; loads nothing.
2. ``restore(match)``: a cache of ``match.length`` tokens, or None.
3. ``cuts(tokens, match, anchor)``: where to hand the cache over while prefilling the rest.
4. ``keep(tokens, caches, kind)`` at each cut, at the end of the prompt, after the reply.

The store never fails a request: whatever goes wrong is counted, named in ``stats``, and
behaves like an empty store.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage import policy
from pion_vllm_mlx.cache.lineage.background import Background, weakly
from pion_vllm_mlx.cache.lineage.beginnings import Beginnings
from pion_vllm_mlx.cache.lineage.blocks import FIRST_TOKENS
from pion_vllm_mlx.cache.lineage.client import connect
from pion_vllm_mlx.cache.lineage.counters import Counters
from pion_vllm_mlx.cache.lineage.endings import Endings
from pion_vllm_mlx.cache.lineage.faults import MALFORMED, Faults
from pion_vllm_mlx.cache.lineage.index import Index
from pion_vllm_mlx.cache.lineage.journal import Journals, ReplyJournal
from pion_vllm_mlx.cache.lineage.kept import Kept
from pion_vllm_mlx.cache.lineage.matching import Rules, match_of
from pion_vllm_mlx.cache.lineage.model_key import ModelKey
from pion_vllm_mlx.cache.lineage.publish import Publisher
from pion_vllm_mlx.cache.lineage.reader import DamagedPiece, Loaded, Reader
from pion_vllm_mlx.cache.lineage.recent import TOUCH_SECONDS, Coming, Rarely, Recent
from pion_vllm_mlx.cache.lineage.shape import Shape, refuse_late_quantizing
from pion_vllm_mlx.cache.lineage.tokens import NO_TOKENS, Tokens, token_ids
from pion_vllm_mlx.cache.lineage.types import (
    Cut,
    LineageOptions,
    Match,
    Restored,
)
from pion_vllm_mlx.cache.lineage.writer import Writer
from pion_vllm_mlx.config import ClientSwitches
from pion_vllm_mlx.errors import PionError, StoreUnavailable, UnsupportedCache

__all__ = ["LineageStore", "anchor_length"]

log = logging.getLogger("pion_vllm_mlx")

anchor_length = policy.anchor_length


class LineageStore(Kept):
    """See the module's docstring. A store of a model that cannot be stored bypasses."""

    def __init__(
        self, model: Any, options: LineageOptions | None = None, *, draft_model: Any = None
    ) -> None:
        """Reads the weights for the key (about a second for 2 GB); connects to nothing yet.

        A draft model's caches are further slots behind those of the model, as mlx-lm has them.
        Raises ConfigError for a setting that does not exist. A cache class that cannot be
        stored is named in ``bypass``, logged once, and every call is then empty.
        """
        self.options = options or LineageOptions()
        switches = ClientSwitches.from_environment()
        self._counters = Counters()
        self._recent, self._coming = Recent(), Coming()
        self._used, self._rated = Rarely(TOUCH_SECONDS), Rarely(TOUCH_SECONDS)
        self._faults = Faults(self._counters)
        self._bypass: str | None = None
        self._front, self._back = connect(self.options), connect(self.options)
        self._writer = Writer(self._back, self.options.budget_bytes, self._counters)
        self._background = Background(self.options.queue_bytes, weakly(self._when_idle))
        self._unsealed: dict[str, None] = {}
        self._anchors = Beginnings(policy.MOST_ANCHORS)
        self._endings = Endings()
        self._shared = Beginnings(policy.MOST_ANCHORS)
        self._refused = Beginnings(policy.MOST_ANCHORS)
        self._swept = False
        weakref.finalize(self, _close, self._background, self._front, self._back)
        try:
            refuse_late_quantizing(self.options)
            shape = Shape.of(model, draft_model, self.options.kv_bits, self.options.kv_group_size)
            self._model_key = ModelKey(model, draft_model, self.options)
            self._key = self._model_key.current()
        except UnsupportedCache as error:
            self._bypass = str(error)
            log.warning("prefixes of this model are not stored: %s", error)
            return
        self._shape = shape
        checkpoints = self.options.checkpoints and switches.lineage
        self._rules = Rules(shape, self.options.min_gain, checkpoints)
        self._reader = Reader(self._front, shape, switches, self._counters)

    @property
    def bypass(self) -> str | None:
        """Why this store keeps nothing, None when it does."""
        return self._bypass

    @property
    def whole_only(self) -> bool:
        """Whether a prefix is only used where a whole kept one is, as with PION_LINEAGE=0."""
        return self._bypass is None and not self._rules.checkpoints

    @property
    def stateful(self) -> bool:
        """Whether the model's caches have parts that are stored whole, each time anew."""
        return self._bypass is None and self._shape.stateful

    @property
    def wants_cuts(self) -> bool:
        """Whether the model's caches have restore points only where they were kept."""
        return self._bypass is None and self._shape.wants_cuts and self._rules.checkpoints

    # -- a request --------------------------------------------------------------

    def match(self, tokens: Tokens) -> Match:
        """The longest stored prefix of ``tokens``. Loads nothing; never raises.

        ``length`` is at most ``len(tokens) - 1``, and 0 for less than ``min_gain``.
        Token ids outside of 0 … 2**32-1 (images) make an empty match that says so.
        """
        ids, why = token_ids(tokens)
        if ids is None or self._bypass is not None:
            return Match(NO_TOKENS, why=why or self._bypass or "")
        self._counters.add("matches")
        self._counters.add("tokens_looked_up", int(ids.size))
        try:
            self._renew_key()
            index = Index(self._front, self._key.names)
            self._front.open()
            with self._front.within(self.options.deadline_seconds):
                found = index.find(ids, whole=self._shape.wants_cuts)
        except PionError as error:
            self._faults.unavailable(error)
            return Match(ids, why=f"no store: {error}", withheld=int(ids.size))
        self._faults.answered()
        match = replace(match_of(found, ids, self._key.names, self._rules), nearest=found)
        point = match.checkpoint.length if match.checkpoint is not None else None
        if match.common < self._recent.since(ids)[0].rows:
            self.recheck(ids)  # gone, or on its way
        self._recent.note(ids, match.common, match.length, point)
        refused = self._refused.longest(ids)
        if refused > match.common:
            budget = f"the budget is {self.options.budget_bytes:,} bytes"
            match = replace(match, why=f"no room for {refused} of it: {budget}", withheld=refused)
        elif match.why and self._faults.refusal:
            why = f"{match.why}; the last store failed: {self._faults.refusal}"
            match = replace(match, why=why)
        return match

    def restore(self, match: Match) -> Restored | None:
        """Caches of ``match.length`` tokens, evaluated; None where they are not to be had.

        May hold fewer tokens than the match said, if its rows turn out to be fewer: use
        ``length``. The caches are the caller's own: generating changes nothing that is stored.
        """
        if not match or self._bypass is not None:
            return None
        started = time.perf_counter()
        loaded = self._loaded(match)
        if loaded is None:
            self._counters.add("misses")
            return None
        elapsed_ms = (time.perf_counter() - started) * 1000
        self._counters.add("hits")
        self._counters.add("tokens_restored", loaded.length)
        self._counters.add("bytes_restored", loaded.num_bytes)
        self._counters.add(f"lane_{loaded.lane}")
        self._touch(match)
        return Restored(loaded.caches, loaded.length, loaded.lane, loaded.num_bytes, elapsed_ms)

    def read_ahead(self, tokens: TokenIds) -> Restored | None:
        """Caches of a stored conversation that nobody has asked for yet; None where it is gone.

        Neither a hit nor a use of it. May hold fewer tokens: use ``length``.
        """
        started = time.perf_counter()
        try:
            self._renew_key()
            found = Index(self._front, self._key.names).find(tokens, whole=self._shape.wants_cuts)
        except PionError as error:
            self._faults.unavailable(error)
            return None
        asked = np.append(tokens, tokens[-1:])  # a match leaves the last token to compute
        match = match_of(found, asked, self._key.names, self._rules)
        loaded = self._loaded(match) if match else None
        if loaded is None:
            return None
        point = match.checkpoint.length if match.checkpoint is not None else None
        self._recent.note(tokens, match.common, match.length, point)
        self._counters.add("read_ahead")
        self._counters.add("tokens_read_ahead", loaded.length)
        elapsed_ms = (time.perf_counter() - started) * 1000
        return Restored(loaded.caches, loaded.length, loaded.lane, loaded.num_bytes, elapsed_ms)

    def cuts(self, tokens: Tokens, match: Match, anchor: int | None = None) -> list[Cut]:
        """Where to hand over the cache while prefilling from ``match.length`` on, in order.

        Positions lie between ``match.length`` and ``len(tokens)``. None for a model whose
        rows can be cut anywhere; its rows up to the anchor are then kept by themselves.
        """
        if self._bypass is not None or not self._rules.checkpoints:
            return []
        if not self._shape.wants_cuts:
            if anchor is not None and anchor >= FIRST_TOKENS and match.tokens.size > anchor:
                self._anchors.expect(match.tokens[:anchor])
            return []
        ending = self._endings.expected(match.tokens, match.common, match.stored)
        found = policy.cuts(len(tokens), match.length, match.common, anchor, ending)
        shared = self._shared.longest(match.tokens)
        return policy.with_anchor(found, shared) if shared > match.length else found

    def expect_beginning(self, tokens: Tokens) -> None:
        """Prompts of other agents will begin with ``tokens``, too: an anchor lies at their end.

        Any thread.
        """
        ids, _ = token_ids(tokens)
        if ids is not None and ids.size >= policy.LEAST_NEW_TOKENS:
            self._shared.expect(ids)

    # -- journals ---------------------------------------------------------------

    def journal(self, key: str) -> ReplyJournal | None:
        """A journal for a reply that begins now; None without ``resume``.

        What it notes comes after the rows that ``keep`` was given before.
        """
        if self._bypass is not None or not self.options.resume:
            return None
        names = self._key.names
        back = Journals(self._back, names)
        return ReplyJournal(key, Journals(self._front, names), back, self._in_background)

    def load_journal(self, key: str) -> list[int] | None:
        """The token ids that a killed process had generated for a request, or None."""
        try:
            resumes = self._bypass is None and self.options.resume
            return Journals(self._front, self._key.names).load(key) if resumes else None
        except PionError as error:
            self._faults.unavailable(error)
            return None

    def drop_journal(self, key: str) -> None:
        """Forgets, in the background, what a killed process had noted."""
        if self._bypass is None and self.options.resume:
            self._in_background(partial(Journals(self._back, self._key.names).drop, key))

    # -- the whole ----------------------------------------------------------------

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until all that was kept so far is written; False when time is over."""
        return self._background.flush(timeout)

    def stats(self) -> dict[str, Any]:
        """Counters, bytes, reasons, as plain values. Any thread; asks nobody."""
        return {
            **self._counters.as_dict(),
            "waiting": self._background.waiting,
            "waiting_bytes": self._background.waiting_bytes,
            "budget_bytes": self.options.budget_bytes,
            "bypass": self._bypass,
        }

    def close(self, timeout: float = 10.0) -> None:
        """Writes what waits, stops the background thread, closes the connections."""
        self._background.close(timeout)
        self._front.close()
        self._back.close()

    # -- inside ---------------------------------------------------------------

    def _loaded(self, match: Match) -> Loaded | None:
        """What the reader has of a match; None, and said why, where it is not to be had."""
        try:
            loaded = self._reader.load(match, self._key.identity, self.options.min_gain)
        except DamagedPiece as error:
            self._damaged(error)
            loaded = None
        except StoreUnavailable as error:
            self._faults.unavailable(error)
            loaded = None
        except (PionError, *MALFORMED) as error:
            self._counters.add("restore_failures", why=str(error))
            loaded = None
        if loaded is None:
            self._recent.forget(match.tokens)
        return loaded

    def _renew_key(self) -> None:
        """The key as the model is now: an adapter may have been loaded."""
        key = self._model_key.current()
        if key is not self._key:
            self._key = key
            self._recent.clear()

    def _touch(self, match: Match) -> None:
        """Counts the hit at the server and marks the chain as used, behind the caller's back."""
        names = self._key.names
        chain = [piece.segment for piece in match.chain]
        leaf, length = match.chain[-1].namespace, match.length

        def run() -> None:
            Publisher(self._back, names).touch(chain)
            self._back.pipeline(names.route, [("KV.PREFIX.LOOKUP", leaf, "TOKENS", length)])

        self._in_background(run)

    def _damaged(self, error: DamagedPiece) -> None:
        """What does not verify goes, unless it was just replaced or taken out."""
        names = self._key.names
        self._counters.add("restore_failures", why=str(error))

        def run() -> None:
            if self._writer.forget_damaged(names, error):
                self._counters.add("damaged", why=str(error))
                log.warning("stored rows dropped: %s", error)

        self._in_background(run)


def _close(background: Background, *clients: Any) -> None:
    background.close(0.0)
    for client in clients:
        client.close()
