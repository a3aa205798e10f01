"""The value receipt: what the prefix cache did, per worker, since the start or a reset."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

#: what a token's prefill is taken to cost when nobody reported a time.
ESTIMATED_US_PER_TOKEN = 555


@dataclass
class Ledger:
    """Counters of PION.STATS. Times in microseconds."""

    worker_id: int = 0
    started: float = field(default_factory=time.monotonic)
    hits: int = 0
    misses: int = 0
    hits_measured: int = 0
    tokens_served: int = 0
    bytes_served: int = 0
    us_saved: int = 0
    us_measured: int = 0

    def hit(self, tokens: int, measured_ms: int) -> None:
        """Credit a LOOKUP hit: with its measured prefill, or with an estimate when that is 0."""
        self.hits += 1
        self.tokens_served += tokens
        if measured_ms:
            self.hits_measured += 1
            self.us_measured += measured_ms * 1000
            self.us_saved += measured_ms * 1000
        else:
            self.us_saved += tokens * ESTIMATED_US_PER_TOKEN

    def uptime(self) -> int:
        return int(time.monotonic() - self.started)

    def fields(self) -> list[tuple[str, int | str]]:
        """The sixteen fields in their order."""
        return [
            ("worker_id", self.worker_id),
            ("uptime_in_seconds", self.uptime()),
            ("kvprefix_hits", self.hits),
            ("kvprefix_misses", self.misses),
            ("kvprefix_hits_measured", self.hits_measured),
            ("kvprefix_tokens_served", self.tokens_served),
            ("kvprefix_bytes_served", self.bytes_served),
            ("kvprefix_prefill_us_saved", self.us_saved),
            ("kvprefix_prefill_us_measured", self.us_measured),
            ("prefill_seconds_avoided", _seconds(self.us_saved)),
            ("prefill_seconds_avoided_measured", _seconds(self.us_measured)),
            ("semantic_hits", 0),
            ("semantic_misses", 0),
            ("moe_hits", 0),
            ("moe_misses", 0),
            ("vector_queries", 0),
        ]


def _seconds(microseconds: int) -> str:
    """Seconds with three decimals, cut, not rounded."""
    return f"{microseconds // 1_000_000}.{microseconds // 1000 % 1000:03d}"
