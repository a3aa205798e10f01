"""Blobs found by the cosine of an embedding.

Embeddings are kept as unit vectors ``[capacity, DIMENSIONS]`` float32. A search ranks
all of them in float32 and decides between those that are equal within rounding in
float64; of equally near ones the latest stored wins. An embedding of zeros has no
direction and is never found.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError

CAPACITY = 1000
DIMENSIONS = 768
DEFAULT_THRESHOLD = 0.95
#: how far rounding may move the cosine of two float32 vectors: a threshold of 1 finds itself.
ROUNDING = 1e-6
#: how far the float32 ranking may be off.
_MARGIN = 1e-4


@dataclass(frozen=True)
class Entry:
    """One blob. ``deadline`` is a monotonic time, 0 = never; ``order`` counts stores."""

    row: int
    blob: bytes | memoryview
    model: bytes
    deadline: float
    order: int


def embedding(data: bytes | memoryview) -> NDArray[np.float32]:
    """A finite embedding ``[DIMENSIONS]``. Raises CommandError."""
    if len(data) != 4 * DIMENSIONS:
        raise CommandError(f"embedding must be {DIMENSIONS} float32, {4 * DIMENSIONS} bytes")
    vector = np.frombuffer(data, "<f4")
    if not np.isfinite(vector).all():
        raise CommandError("embedding holds a value that is not finite")
    return vector


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = vector.astype(np.float64)
    norm = float(np.sqrt(exact @ exact))
    return exact / norm if norm else exact


class SemanticCache:
    """Least recently accessed entries go when it is full; expired ones when seen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.stored_bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.expired = 0
        self._clock = clock
        self._vectors = np.zeros((CAPACITY, DIMENSIONS), np.float32)
        self._directed = np.zeros(CAPACITY, bool)
        self._owners = [b""] * CAPACITY
        self._free = list(range(CAPACITY - 1, -1, -1))
        self._next_deadline = 0.0
        self._order = itertools.count(1)

    def store(
        self,
        cache_id: bytes,
        vector: NDArray[np.float32],
        blob: bytes | memoryview,
        ttl_seconds: int,
        model: bytes,
    ) -> None:
        """Keep ``blob`` itself under an embedding; the same id overwrites. ttl 0: for good."""
        self.expire()
        if cache_id in self.entries:
            self._remove(cache_id)
        elif not self._free:
            self._remove(next(iter(self.entries)))
            self.evictions += 1
        row = self._free.pop()
        deadline = self._clock() + ttl_seconds if ttl_seconds else 0.0
        self._vectors[row] = _unit(vector)
        self._directed[row] = vector.any()
        self._owners[row] = cache_id
        self.entries[cache_id] = Entry(row, blob, model, deadline, next(self._order))
        self.stored_bytes += len(blob)
        if deadline and (not self._next_deadline or deadline < self._next_deadline):
            self._next_deadline = deadline

    def fetch(
        self, vector: NDArray[np.float32], threshold: float, model: bytes | None
    ) -> bytes | memoryview | None:
        """The blob with the best cosine of at least ``threshold``; counts as access.

        ``model`` looks only at entries with exactly that tag; None at all.
        """
        self.expire()
        found = self._best(vector, threshold, model)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self.entries.move_to_end(found)
        return self.entries[found].blob

    def _best(
        self, vector: NDArray[np.float32], threshold: float, model: bytes | None
    ) -> bytes | None:
        unit = _unit(vector)
        if not self.entries or not unit.any():
            return None
        products = np.einsum("nd,d->n", self._vectors, unit.astype(np.float32))
        scores = np.where(self._directed, products, -np.inf)
        if model is not None:
            others = [entry.row for entry in self.entries.values() if entry.model != model]
            scores[others] = -np.inf
        top = scores.max()
        if not np.isfinite(top):
            return None
        ranked = []
        for row in np.flatnonzero(scores >= top - _MARGIN):
            cache_id = self._owners[row]
            cosine = float(self._vectors[row].astype(np.float64) @ unit)
            order = self.entries[cache_id].order
            ranked.append((round(cosine / ROUNDING), order, cosine, cache_id))
        _, _, cosine, best = max(ranked)
        return best if cosine >= threshold - ROUNDING else None

    def expire(self) -> None:
        """Drop and count what is past its deadline."""
        now = self._clock()
        if not self._next_deadline or now < self._next_deadline:
            return
        for cache_id, entry in list(self.entries.items()):
            if entry.deadline and entry.deadline <= now:
                self._remove(cache_id)
                self.expired += 1
        left = [entry.deadline for entry in self.entries.values() if entry.deadline]
        self._next_deadline = min(left, default=0.0)

    def _remove(self, cache_id: bytes) -> None:
        entry = self.entries.pop(cache_id)
        self._vectors[entry.row] = 0
        self._directed[entry.row] = False
        self._free.append(entry.row)
        self.stored_bytes -= len(entry.blob)

    @property
    def hit_rate(self) -> float:
        """Hits of all fetches; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)
