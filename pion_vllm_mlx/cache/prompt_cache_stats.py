"""The counters of one prompt cache object."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pion_vllm_mlx.cache.store_client_endpoint import what_helps
from pion_vllm_mlx.errors import CommandError, PionError

NO_LANE = "none"


@dataclass
class Counters:
    """What happened so far; ``_ms`` in milliseconds, ``last_…`` of the latest call.

    ``lane_failures`` counts lanes that fell to the next one, ``unavailable`` calls that
    found no usable store, ``rejected`` calls that the store refused, ``damaged`` prefixes
    that did not verify, ``refused`` caches of a class that cannot be stored,
    ``store_failures`` stores that did not complete.
    """

    hits: int = 0
    misses: int = 0
    admission_skips: int = 0
    fetch_ms_total: float = 0.0
    store_ms_total: float = 0.0
    last_prefill_ms: float = 0.0
    bytes_fetched: int = 0
    bytes_stored: int = 0
    last_bytes: int = 0
    last_lane: str = NO_LANE
    unavailable: int = 0
    rejected: int = 0
    damaged: int = 0
    refused: int = 0
    store_failures: int = 0
    conversion: str | None = None
    last_miss_reason: str | None = None
    lane_hits: Counter[str] = field(default_factory=Counter)
    lane_failures: Counter[str] = field(default_factory=Counter)

    def hit(self, lane: str, num_bytes: int) -> None:
        self.hits += 1
        self.lane_hits[lane] += 1
        self.last_lane, self.last_bytes, self.last_miss_reason = lane, num_bytes, None
        self.bytes_fetched += num_bytes

    def no_answer(self, error: PionError) -> None:
        """The store could not be asked, or refused: one that works may refuse a namespace."""
        if isinstance(error, CommandError) and not what_helps(error):
            self.rejected += 1
            self.last_miss_reason = f"the store refuses: {error}"
        else:
            self.unavailable += 1
            self.last_miss_reason = f"no store: {error}"

    def miss(self) -> None:
        self.misses += 1
        self.last_lane, self.last_bytes = NO_LANE, 0

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, with the hit rate."""
        calls = self.hits + self.misses
        return {
            **vars(self),
            "lane_hits": dict(self.lane_hits),
            "lane_failures": dict(self.lane_failures),
            "hit_rate": self.hits / calls if calls else 0.0,
        }
