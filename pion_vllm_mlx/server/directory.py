"""Which worker holds which session, as one worker sees it.

With one worker nothing is elsewhere. ``shared_directory`` has what several of them share.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pion_vllm_mlx.server.store.index import KEY_SUFFIX, VALUE_SUFFIX, group_of


class Listed(NamedTuple):
    """A session as the other workers know it: K sides carry the rows of layer 0."""

    owner: int
    published: bool
    tokens: int = 0
    deadline_ms: int = 0

    def alive(self) -> bool:
        """Whether a lookup may hit it."""
        return self.published and not 0 < self.deadline_ms <= time.time() * 1000


class Known(NamedTuple):
    """What a worker publishes about one of its sessions."""

    tokens: int
    deadline_ms: int


def sides_of(namespace: bytes) -> tuple[bytes, bytes]:
    """The session ids of both sides."""
    return namespace + KEY_SUFFIX, namespace + VALUE_SUFFIX


def together(sid: bytes) -> tuple[bytes, ...]:
    """The sessions that live where this one does: both sides of its namespace, or itself."""
    return (sid,) if group_of(sid) == sid else sides_of(group_of(sid))


class Directory:
    """The directory of a server with one worker: nothing is elsewhere."""

    def __init__(self) -> None:
        self.prefill_ms: dict[bytes, int] = {}

    def home(self, sids: Iterable[bytes]) -> int | None:
        """The other worker that holds one of these sessions; None when no other does."""
        return None

    def elsewhere(self, namespace: bytes) -> int | None:
        """Rows of layer 0 of a namespace that another worker can serve; None without one."""
        return None

    def expired(self, namespace: bytes) -> bool:
        """Whether a side of a namespace of another worker is past its deadline."""
        return False

    def lineage_home(self, lineage: bytes) -> int | None:
        """The other worker that holds segments of a lineage; None when none does, or this one."""
        return None

    def count(self) -> int | None:
        """How many sessions all workers have published; None where only one could."""
        return None

    def claim(self, sids: Iterable[bytes]) -> int | None:
        """Reserve sessions for this worker, or say which other one has them or their lineage.

        Under the store's write lock: a claim that is not published before the next one is
        taken back. Raises CommandError where the disk takes no claim; nothing is claimed then.
        """
        return None

    def release(self) -> None:
        """Take back what was claimed and not published; not while a claim is being used."""

    def publish(self, sessions: Mapping[bytes, Known | None]) -> None:
        """Tell all workers what became of sessions of this one; None: gone.

        It has happened already: what the disk refuses now is told with an ``exchange``.
        """

    def set_prefill(self, namespace: bytes, prefill_ms: int) -> None:
        """Keep a namespace's prefill time; 0 forgets it."""
        self.prefill_ms.pop(namespace, None)
        if prefill_ms:
            self.prefill_ms[namespace] = prefill_ms

    def touch(self, namespace: bytes) -> None:
        """A namespace of another worker was hit here; told with the next ``exchange``."""

    def exchange(self) -> set[bytes]:
        """Send what was touched here; the namespaces of this worker that others hit."""
        return set()

    def close(self) -> None:
        """Release the file."""
