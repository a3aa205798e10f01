"""Conversations that were used last, read from the store into memory before anybody asks.

A process that was started again has nothing live. Who comes back to a conversation waits for its
rows to be read; here they are read as soon as the store is reached, while nobody is served. The
first request ends it, behind the conversation that is just being read: its own look-up comes next
on the same thread.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.beside import Beside
from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.live_tier import LiveTier
from pion_vllm_mlx.errors import UnsupportedCache

log = logging.getLogger("pion_vllm_mlx")

MOST_CONVERSATIONS = 64


class ReadAhead:
    """One reading of the latest conversations, a job of the thread beside each.

    ``done`` where there is nothing to read, or no more is read.
    """

    def __init__(self, beside: Beside) -> None:
        self.done = True
        self._beside = beside
        self._waiting: list[TokenIds] = []
        self._kept: list[TokenIds] = []
        self._read_ms = 0.0

    def begin(self, store: LineageStore, live: LiveTier) -> None:
        """Reads as many bytes as the store's options say, behind what the thread has to do.

        At most half of what the live caches may take.
        """
        self.done = False
        self._store, self._live = store, live
        self._most_bytes = min(store.options.preload_bytes, live.budget_bytes // 2)
        self._beside.ask(self._list)

    def stop(self) -> None:
        """Reads no further conversation. Any thread."""
        self.done = True

    # -- on the thread beside ---------------------------------------------------

    def _list(self) -> None:
        if not self.done and self._most_bytes > 0:
            self._waiting = self._store.latest(self._most_bytes, MOST_CONVERSATIONS)
        self._next()

    def _next(self) -> None:
        if self._waiting and not self.done:
            self._beside.ask(self._one)
            return
        self.done = True
        for tokens in reversed(self._kept):  # the latest is the last to be given up
            hit = self._live.find(np.append(tokens, tokens[-1:]))
            if hit is not None:
                self._live.take(hit)
        if self._kept:
            count, size = len(self._kept), sum(tokens.size for tokens in self._kept)
            log.info("read ahead: %d conversations, %d tokens, %d ms", count, size, self._read_ms)

    def _one(self) -> None:
        tokens = self._waiting.pop(0)
        try:
            if not self.done and self._has_room(tokens):
                self._read(tokens)
        except Exception:  # noqa: BLE001  (whatever it is, no request is to hear of it)
            log.exception("a conversation could not be read ahead")
        finally:
            self._next()

    def _has_room(self, tokens: TokenIds) -> bool:
        """Whether a conversation fits, whose rows may take less in the store than in memory."""
        if len(self._live) >= self._live.max_entries:
            return False
        held = sum(kept.size for kept in self._kept)
        used = self._live.nbytes
        return used + (used / held * tokens.size if held else 0) <= self._most_bytes

    def _read(self, tokens: TokenIds) -> None:
        restored = self._store.read_ahead(tokens)
        if restored is None:
            return
        self._read_ms += restored.ms
        kept = tokens[: restored.length]
        if self._put(kept, restored.caches):
            self._kept.append(kept)

    def _put(self, tokens: TokenIds, caches: list[Any]) -> bool:
        try:
            return self._live.put(tokens, caches)
        except UnsupportedCache as error:
            log.debug("not kept in memory: %s", error)
            return False
