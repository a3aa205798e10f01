"""Conversations that were used last, read from the store into memory before anybody asks.

A process that was started again has nothing live. Who comes back to a conversation waits for its
rows to be read; here they are read as soon as the store is reached, while nobody is served. The
first request ends it: its own look-up comes next on the same thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from pion_vllm_mlx.cache.beside import Beside
from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.live_tier import LiveTier
from pion_vllm_mlx.errors import UnsupportedCache

log = logging.getLogger("pion_vllm_mlx")

MOST_CONVERSATIONS = 64


@dataclass(eq=False)
class ReadAhead:
    """One reading of the latest conversations, a job of the thread beside each."""

    store: LineageStore
    live: LiveTier
    beside: Beside
    done: bool = False
    _waiting: list[TokenIds] = field(default_factory=list)
    _totals: list[float] = field(default_factory=lambda: [0, 0, 0, 0.0])

    def begin(self) -> None:
        """Reads as many bytes as the store's options say, behind what the thread has to do.

        At most half of what the live caches may take.
        """
        most_bytes = min(self.store.options.preload_bytes, self.live.budget_bytes // 2)
        self.beside.ask(lambda: self._list(most_bytes))

    def stop(self) -> None:
        """Reads no further conversation. Any thread."""
        self.done = True

    def _list(self, most_bytes: int) -> None:
        if not self.done and most_bytes > 0:
            self._waiting = self.store.latest(most_bytes, MOST_CONVERSATIONS)
        self._next()

    def _next(self) -> None:
        if self._waiting and not self.done:
            self.beside.ask(self._one)
            return
        self.done = True
        if self._totals[0]:
            log.info("read ahead: %d conversations, %d tokens, %d MB in %d ms", *self._totals)

    def _one(self) -> None:
        tokens = self._waiting.pop(0)
        restored = None if self.done else self.store.read_ahead(tokens)
        if restored is not None:
            self._keep(tokens[: restored.length], restored.caches)
            new = (1, restored.length, restored.num_bytes / 10**6, restored.ms)
            self._totals = [old + more for old, more in zip(self._totals, new, strict=True)]
        self._next()

    def _keep(self, tokens: TokenIds, caches: list[Any]) -> None:
        try:
            self.live.put(tokens, caches)
        except UnsupportedCache as error:
            log.debug("not kept in memory: %s", error)
