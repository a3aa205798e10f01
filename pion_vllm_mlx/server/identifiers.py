"""Numbers that name something and tell nobody how much else there is.

Counted over a whole server they would tell each tenant how busy the others are.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Collection, Iterator

from pion_vllm_mlx.server.tenants import owner_of


def _microseconds() -> int:
    return time.time_ns() // 1000


class ClientIds:
    """Ids of connections: each says when it came, in µs since 1970, not which one it is.

    Each is larger than all before it, and no two workers of a server give out the same.
    """

    def __init__(self, worker: int = 0, workers: int = 1) -> None:
        self._worker, self._workers = worker, workers
        self._last = 0

    def next(self) -> int:
        """The id of a connection that has just come."""
        now = _microseconds()
        mine = now - now % self._workers + self._worker
        self._last = max(mine, self._last + self._workers)
        return self._last


class RollbackIds:
    """Ids of rollback points, counted for each owner of sessions by itself.

    They begin at the start time in µs, so that no earlier process has given one out.
    """

    def __init__(self, tenants: Collection[bytes]) -> None:
        self._tenants = tenants
        start = _microseconds()
        self._next: dict[bytes, Iterator[int]] = defaultdict(lambda: itertools.count(start))

    def next(self, sid: bytes) -> int:
        """The id of a new point of a session, under its stored name."""
        return next(self._next[owner_of(sid, self._tenants)])
