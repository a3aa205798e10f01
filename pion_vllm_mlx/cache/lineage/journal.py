"""Journals: what a reply had come to when its process ended.

A journal is for a reply that never came to its end: it has to be gone before anybody is told
the end, or the same request would later be answered with the old reply.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

import numpy as np

from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.lineage.index import Names, parse_tokens
from pion_vllm_mlx.errors import PionError

KEEP_SECONDS = 86_400

Behind = Callable[[Callable[[], None], object], None]
"""Has something done on the background thread, behind all that was given to it before.

Of what was given with one object, and waits with nothing else of it in between, the last alone.
"""


class Journals:
    """The journals of one model. Raises StoreUnavailable, CommandError."""

    def __init__(self, client: LineageClient, names: Names) -> None:
        self._client = client
        self._names = names

    def save(self, key: str, generated: Sequence[int]) -> None:
        """Notes the ids of a reply, for a day."""
        ids = np.asarray(generated, "<u4").tobytes()
        self._ask("SET", self._name(key), ids, "EX", KEEP_SECONDS)

    def load(self, key: str) -> list[int] | None:
        """The ids that were noted, or None."""
        found = self._ask("GET", self._name(key))
        return parse_tokens(found).tolist() if isinstance(found, bytes) and found else None

    def drop(self, key: str) -> None:
        """Forgets a journal."""
        self._ask("DEL", self._name(key))

    def _ask(self, *command: object) -> object:
        return self._client.demand(self._names.route, [command])[0]

    def _name(self, key: str) -> str:
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=12)
        return self._names.key(f"jr:{digest.hexdigest()}")


class ReplyJournal:
    """The journal of one reply, from its first token to its end. Any thread."""

    def __init__(self, key: str, front: Journals, back: Journals, behind: Behind) -> None:
        """``front`` is asked by who calls, ``back`` by what ``behind`` runs."""
        self._key = key
        self._front, self._back, self._behind = front, back, behind
        self._lock = threading.Lock()
        self._ended = self._gone = False

    def note(self, generated: Sequence[int]) -> None:
        """Notes the ids so far, once the rows that were given to be stored before are."""
        ids = list(generated)

        def save() -> None:
            with self._lock:
                if not self._ended:
                    self._back.save(self._key, ids)

        self._behind(save, self)

    def end(self) -> bool:
        """Forgets the journal; when this returns it is gone. To be called before the end is told.

        Waits for one answer of the store, over the other connection where the first is held
        up, each at most for its deadline. False where none came: then it is tried once more in
        the background.
        """
        self._ended = True
        with self._lock:
            if not self._gone:
                self._gone = any(_dropped(way, self._key) for way in (self._front, self._back))
            gone = self._gone
        if not gone:
            self.leave()
        return gone

    def leave(self) -> None:
        """Forgets the journal in the background: nobody is told of the reply any more."""
        self._ended = True

        def drop() -> None:
            with self._lock:
                if not self._gone:  # else it may be another reply's by now
                    self._back.drop(self._key)
                    self._gone = True

        self._behind(drop, None)


def _dropped(journals: Journals, key: str) -> bool:
    try:
        journals.drop(key)
    except PionError:
        return False
    return True
