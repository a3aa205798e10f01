"""What goes wrong in a lineage store: counted, and said, the first time loudly."""

from __future__ import annotations

import logging
import time

from pion_vllm_mlx.cache.lineage.budget import OverBudget
from pion_vllm_mlx.cache.lineage.counters import Counters
from pion_vllm_mlx.cache.lineage.locks import Contended
from pion_vllm_mlx.cache.lineage.plan import Lost
from pion_vllm_mlx.cache.store_client_endpoint import what_helps
from pion_vllm_mlx.errors import CommandError, PionError, StoreUnavailable, UnsupportedCache

log = logging.getLogger("pion_vllm_mlx")

_CAUSES = {OverBudget: "over_budget", Contended: "contended", Lost: "lost"}
"""The counters of stores that failed for a reason of their own."""

MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""What records and files that only another program can have written may end in."""


SILENT_SECONDS = 60.0
"""How long nothing is said of a store that is still not there."""


class Faults:
    """The faults of one store. Any thread."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._warned = False
        self._silent_until = 0.0
        self._refusal = ""

    @property
    def refusal(self) -> str:
        """Why nothing could be stored the last time, "" where that is so no more."""
        return self._refusal

    def stored(self) -> None:
        """Something was stored: the next time that it is not is news again."""
        self._refusal = ""

    def answered(self) -> None:
        """The store is there: the next time that it is not is news again."""
        self._warned = False

    def unavailable(self, error: PionError) -> None:
        """There is no store at present."""
        self._counters.add("unavailable", why=str(error))
        advice = what_helps(error)
        now = time.monotonic()
        again = logging.INFO if now >= self._silent_until else logging.DEBUG
        level = again if self._warned else logging.WARNING
        if level != logging.DEBUG:
            self._silent_until = now + SILENT_SECONDS
        self._warned = True
        log.log(level, "no prefix store: %s", f"{error}; {advice}" if advice else error)

    def refused(self, error: UnsupportedCache) -> None:
        """A cache that cannot be stored."""
        first = not self._counters.get("refused")
        self._counters.add("refused", why=str(error))
        log.log(logging.WARNING if first else logging.INFO, "%s", error)

    def not_durable(self, refusal: CommandError) -> None:
        """What was stored may be lost with the power: the server flushes nothing for us."""
        first = not self._counters.get("not_durable")
        self._counters.add("not_durable", why=refusal.sentence)
        level = logging.WARNING if first else logging.DEBUG
        log.log(level, "what is stored is not durable: the server says %s", refusal.sentence)

    def failed(self, error: BaseException) -> None:
        """Something was not stored after all."""
        name = next((name for kind, name in _CAUSES.items() if isinstance(error, kind)), "failed")
        self._counters.add(name, why=str(error))
        if isinstance(error, StoreUnavailable):
            self.unavailable(error)
        elif name in ("failed", "over_budget"):
            why = str(error) or type(error).__name__
            again = logging.DEBUG if name == "over_budget" or why == self._refusal else logging.INFO
            level = again if self._refusal else logging.WARNING
            self._refusal = why
            log.log(level, "a prefix was not stored: %s", self._refusal)
