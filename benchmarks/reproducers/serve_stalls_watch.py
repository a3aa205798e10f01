"""What an engine's threads are doing: an interval of time for each call that is watched.

For ``serve_stalls``, which lays a call that held the generation thread up beside what the other
threads did at that time. Times are those of one clock, whatever the process.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: shorter ones are not noted.
LEAST_SECONDS = 1e-4
#: as they are noted of a call, each a module and a name in it.
PLACES = (
    ("cache.live_tier", "LiveTier.put"),
    ("cache.live_tier", "LiveTier.take"),
    ("cache.live_tier", "LiveTier.common"),
    ("cache.lineage.kept", "Kept.keeping"),
    ("cache.lineage.kept", "Kept._taken"),
    ("cache.lineage.kept", "Kept._queued"),
    ("cache.lineage.kept", "Kept._write"),
    ("cache.lineage.kept", "Kept._when_idle"),
    ("cache.lineage.recent", "Recent.since"),
    ("cache.lineage.recent", "Recent.note"),
    ("cache.lineage.beginnings", "Beginnings.longest"),
    ("cache.lineage.background", "Background.put"),
    ("cache.lineage.store", "LineageStore.match"),
    ("cache.lineage.store", "LineageStore.restore"),
    ("cache.lineage.store", "LineageStore.cuts"),
    ("cache.lineage.reader", "Reader._proofs"),
    ("cache.lineage.writer", "Writer._find"),
    ("cache.lineage.writer", "crc32c"),
    ("cache.lineage.client", "LineageClient.pipeline"),
    ("cache.lineage.client", "LineageClient.store_rows"),
    ("cache.lineage.bringing", "in_pieces"),
    ("cache.lineage.bringing", "shared"),
    ("cache.lineage.capture", "rows_of"),
    ("cache.direct_rows", "DirectRows.fill"),
    ("cache.direct_rows", "_memory"),
    ("cache.direct_rows", "_fill"),
    ("cache.mapped_files", "MappedFiles.__init__"),
    ("cache.evaluation", "settle"),
    ("cache.beside", "_let_go"),
    ("cache.pace", "Pace.wait"),
)
SERVED = (
    ("serve.lineage_cache", "LineageCache.look_up"),
    ("serve.lineage_cache_lookup", "Tiers.look_up"),
    ("serve.engine_mlx_lm_generator", "Generator._some_tokens"),
    ("serve.engine_mlx_lm_generator", "Generator._anchor"),
)


class Watch:
    """Intervals of watched calls, and of the collector's rounds. Any thread."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str, float, float, float]] = []
        self._round = 0.0

    def note(self, name: str, began: float, cpu_ms: float = 0.0) -> None:
        """A call of this thread that ends now."""
        ended = time.perf_counter()
        if ended - began >= LEAST_SECONDS:
            self._calls.append((threading.current_thread().name, name, began, ended, cpu_ms))

    def watched(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``call``, noted."""

        @functools.wraps(call)
        def calling(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.note(name, began)

        return calling

    def begin(self, served: bool) -> None:
        """Puts itself around all places; ``served``: also those of mlx-lm's engine."""
        for module, name in (*PLACES, *(SERVED if served else ())):
            owner: Any = importlib.import_module(f"pion_vllm_mlx.{module}")
            *path, last = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            setattr(owner, last, self.watched(getattr(owner, last), name))
        self._blocking()
        gc.callbacks.append(self._collected)

    def write(self, path: Path) -> None:
        """All of it, one a line: thread, name, when it began and ended, its own CPU ms."""
        path.write_text("".join(json.dumps(call) + "\n" for call in self._calls))

    def _blocking(self) -> None:
        """What is measured on the generation thread is noted by its name there."""
        from pion_vllm_mlx.cache.beside import Blocking

        note = Blocking.note

        def noted(blocking: Any, name: str, elapsed_ms: float) -> None:
            self.note(name, time.perf_counter() - elapsed_ms / 1e3)
            note(blocking, name, elapsed_ms)

        Blocking.note = noted  # type: ignore[method-assign]

    def _collected(self, phase: str, told: dict[str, int]) -> None:
        if phase == "start":
            self._round = time.perf_counter()
        else:
            self.note(f"gc {told['generation']}", self._round)
