"""The side of a lineage store that looks at what is stored, and changes it on demand.

Nothing here touches an array: no engine is needed, and none is held up.
"""

from __future__ import annotations

import logging
from functools import partial

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.connection import info_fields
from pion_vllm_mlx.cache.lineage.background import Background, Task
from pion_vllm_mlx.cache.lineage.branching import Branching
from pion_vllm_mlx.cache.lineage.client import CONNECT_SECONDS, LineageClient, as_int
from pion_vllm_mlx.cache.lineage.conversations import Conversations
from pion_vllm_mlx.cache.lineage.counters import Counters
from pion_vllm_mlx.cache.lineage.explain import explain
from pion_vllm_mlx.cache.lineage.faults import Faults
from pion_vllm_mlx.cache.lineage.index import Found, Index, Names
from pion_vllm_mlx.cache.lineage.matching import Rules
from pion_vllm_mlx.cache.lineage.model_key import Key
from pion_vllm_mlx.cache.lineage.publish import Publisher
from pion_vllm_mlx.cache.lineage.rates import Rates
from pion_vllm_mlx.cache.lineage.recent import Coming, Rarely, Recent
from pion_vllm_mlx.cache.lineage.tokens import Tokens, token_ids
from pion_vllm_mlx.cache.lineage.types import Conversation, Explanation, LineageOptions
from pion_vllm_mlx.errors import PionError, StoreUnavailable

log = logging.getLogger("pion_vllm_mlx")


class Stored:
    """What a store of one model holds; a store that bypasses holds nothing."""

    options: LineageOptions
    _front: LineageClient
    _back: LineageClient
    _background: Background
    _counters: Counters
    _key: Key
    _rules: Rules
    _recent: Recent
    _coming: Coming
    _used: Rarely
    _rated: Rarely
    _faults: Faults
    _bypass: str | None
    #: prompt tokens a second on this machine, as a process before this one had it; 0: unknown.
    prefill_rate: float = 0.0

    def note_prefill_rate(self, tokens_per_second: float) -> None:
        """Keeps what was measured for the next process. Behind the caller's back, not each time."""
        if self._bypass is None and self._rated.due(self._key.names.mid):
            save = partial(Rates(self._back, self._key.names).save, tokens_per_second)
            self._background.put(Task(save, lambda error: None))

    def connect(self, seconds: float = CONNECT_SECONDS) -> bool:
        """Reaches the store before it is needed, and starts an embedded one; whether it is there.

        Waits up to ``seconds``, which no request's deadline allows. Any thread; never raises.
        """
        if self._bypass is not None:
            return False
        self._background.begin()
        try:
            self._front.reach(seconds)
        except PionError as error:
            self._faults.unavailable(error)
            return False
        self._tell_of_a_small_disk()
        try:
            self.prefill_rate = Rates(self._front, self._key.names).load()
        except PionError as error:
            self._counters.add("unavailable", why=str(error))
        return True

    def recheck(self, tokens: Tokens) -> None:
        """Sees to it that what ``keep`` holds for stored of ``tokens`` still is, and stays.

        Others may have deleted it meanwhile, while memory serves the prompt and nothing asks.
        Behind the caller's back, after what waits to be stored. Any thread; never raises.
        """
        ids, _ = token_ids(tokens)
        if ids is None or self._bypass is not None:
            return
        rows = self._recent.since(ids)[0].rows
        if rows:
            run = partial(self._recheck, self._key.names, ids, rows)
            self._background.put(Task(run, lambda error: None))

    def not_yet(self, tokens: int) -> str:
        """Counts a prompt of which so many wait to be written and are in memory no more; why."""
        why = f"{tokens} tokens of it wait to be stored, and memory had no room for them"
        self._counters.add("not_yet", why=why)
        return why

    def explain(self, tokens: Tokens, then: Found | None = None) -> Explanation:
        """Why ``tokens`` are not a longer hit: nearest prefix, first difference, key field.

        ``then``: the ``nearest`` of an earlier match, by now they may be stored themselves.
        """
        ids, why = token_ids(tokens)
        if ids is None or self._bypass is not None:
            return Explanation(0, 0, 0, sentence=why or self._bypass or "")
        try:
            return explain(self._front, self._key, ids, self._rules, then)
        except PionError as error:
            self._faults.unavailable(error)
            return Explanation(0, 0, 0, sentence=f"no store: {error}")

    def conversations(self) -> list[Conversation]:
        """The conversations of this model, the latest used first.

        Raises StoreUnavailable, as ``pin``, ``drop`` and ``branch`` do.
        """
        return [] if self._bypass is not None else self._conversations().all()

    def latest(self, most_bytes: int, most: int) -> list[TokenIds]:
        """The token ids of the conversations that were used last, the latest first.

        At most ``most``, and together as many as ``most_bytes`` hold. Never raises.
        """
        if self._bypass is not None:
            return []
        try:
            return self._conversations().latest(most_bytes, most)
        except PionError as error:
            self._faults.unavailable(error)
            return []

    def tokens_of(self, conversation: str) -> list[int]:
        """All token ids of a conversation, from its root on. Raises KeyError."""
        return self._conversations().tokens_of(conversation)

    def pin(self, conversation: str, pinned: bool = True) -> None:
        """Keeps a conversation, and all it stands on, from being evicted. Raises KeyError.

        What other pinned conversations stand on stays pinned when one is unpinned.
        """
        conversations = self._conversations()
        if pinned:
            conversations.pin(conversation)
        else:
            conversations.unpin(conversation)

    def is_pinned(self, conversation: str) -> bool:
        """Whether a conversation, or a segment of one, is kept from being evicted. KeyError."""
        return self._conversations().segment(conversation).pinned

    def drop(self, conversation: str) -> int:
        """Deletes a conversation and what only it stands on; how many segments. KeyError."""
        gone = self._conversations().drop(conversation)
        self._recent.clear()
        return gone

    def branch(self, conversation: str, length: int) -> str:
        """A conversation of its own for the first ``length`` tokens; its id.

        It outlives the one it came from. Raises KeyError, ValueError for a length it has not.
        """
        segment = self._conversations().segment(conversation)
        names = self._key.names
        number = Branching(self._front, names, self._key.identity).branch(segment, length)
        return names.member(number)

    # -- inside ---------------------------------------------------------------

    def _tell_of_a_small_disk(self) -> None:
        """Says where the server keeps to less of the disk than conversations may take."""
        names = self._key.names
        try:
            (reply,) = self._front.demand(names.route, [("INFO", "persistence")])
        except PionError:  # a tenant may not ask
            return
        allowed = as_int(info_fields(reply).get("disk_budget_bytes"), 0)
        if 0 < allowed < self.options.budget_bytes:
            log.warning(
                "the store's server keeps to %d MB of the disk, of the %d MB that conversations "
                "may take: free some, or start one with a --disk-budget of its own",
                allowed // 10**6,
                self.options.budget_bytes // 10**6,
            )

    def _recheck(self, names: Names, ids: TokenIds, rows: int) -> None:
        """Forgets what it knew of a prompt of which ``rows`` tokens should be stored.

        Where they are they count as used: else what memory serves would be the first to go.
        """
        found = Index(self._back, names).find(ids, whole=False)
        if found.common < rows <= self._coming.common(ids):
            return  # its caches wait for what is being computed
        if found.common < rows:
            why = "a prompt that was stored is not stored any more"
            self._counters.add("gone", why=found.gone.sentence if found.gone else why)
            self._recent.forget(ids)
        elif found.leaf is not None and self._used.due(names.member(found.leaf.number)):
            Publisher(self._back, names).touch([one.number for one in found.chain])

    def _conversations(self) -> Conversations:
        if self._bypass is not None:
            raise StoreUnavailable(self._bypass)
        return Conversations(self._front, self._key.names)
