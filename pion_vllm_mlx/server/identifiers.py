"""Numbers that name something and tell nobody how much else there is.

Counted over a whole server they would tell each tenant how busy the others are.
"""

from __future__ import annotations

import time
from collections.abc import Collection

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
    """Ids of rollback points: each says when it was taken, in µs since 1970, not which one it is.

    So no earlier process has given one out. Of one owner of sessions each is larger than all
    before it, and what others do shows in none, whatever becomes of the clock.
    """

    def __init__(self, tenants: Collection[bytes]) -> None:
        self._tenants = tenants
        self._last: dict[bytes, int] = {}

    def next(self, sid: bytes) -> int:
        """The id of a new point of a session, under its stored name."""
        owner = owner_of(sid, self._tenants)
        point = max(_microseconds(), self._last.get(owner, 0) + 1)
        self._last[owner] = point
        return point
