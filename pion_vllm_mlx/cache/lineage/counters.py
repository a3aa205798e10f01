"""What a lineage store did so far."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

REASONS_KEPT = 32


class Counters:
    """Numbers by name, and the latest reasons. Thread-safe.

    ``matches`` are the prompts that were looked up here, ``tokens_looked_up`` theirs, and
    ``tokens_restored`` what was loaded for them; a process asks the store only for what its own
    memory has not. ``read_ahead`` and ``tokens_read_ahead`` are the conversations that were read
    before anybody asked. ``hits``, ``bytes_restored``,
    ``restore_failures``, ``kept``, ``written``, ``bytes_written``, ``bytes_rows``,
    ``evicted`` to stay within the budget, ``evicted_by_server`` for limits of its own, found when
    they were missed; ``damaged``, ``unavailable``; ``gone``, what others deleted while memory had
    it; ``not_yet``, prompts of which more was still waiting to be stored, and in memory no more;
    ``not_durable``, stores after which the server refused a COMMIT;
    what was not stored, by cause: ``queue_full``, ``over_budget``, ``contended``, ``lost``,
    ``refused``, ``failed``; and ``lane_…`` a lane.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    def add(self, name: str, amount: int = 1, why: str = "") -> None:
        """Counts; the latest reason of a name is kept."""
        with self._lock:
            self._numbers[name] += amount
            if why:
                self._reasons.pop(name, None)
                self._reasons[name] = why
                if len(self._reasons) > REASONS_KEPT:
                    del self._reasons[next(iter(self._reasons))]

    def get(self, name: str) -> int:
        with self._lock:
            return self._numbers[name]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        with self._lock:
            return {**self._numbers, "reasons": dict(self._reasons)}
