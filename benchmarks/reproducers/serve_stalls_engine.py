"""The mlx-lm engine with a clock on its generation thread: ``--trace FILE``, then its own flags.

Of every step of the batch is noted when it began and ended, how many sequences it decoded and
prefilled, and how long what is ours took since the step before, by the clock and of the thread's
processor time: whatever the cache was asked for, tokenizing and planning included. The first
line of the file are the names of the columns; one line a step follows, written when the engine
ends.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pion_vllm_mlx.serve import engine_mlx_lm

server: Any = importlib.import_module("mlx_lm.server")

COLUMNS = (
    "began",
    "ended",
    "decoded",
    "prefilled",
    "waiting",
    "ours_ms",
    "longest_call_ms",
    "cpu_ms",
)


@dataclass
class Trace:
    """Steps of the batch, and what of ours lay between them."""

    path: Path
    rows: list[tuple[float, ...]] = field(default_factory=list)
    since_ms: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0
    depth: int = 0
    thread: int = 0

    def ours(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed where it is the outermost one of ours on the generation thread."""

        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            if self.depth or threading.get_ident() != self.thread:
                return call(*args, **options)
            self.depth += 1
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.since_ms.append((time.perf_counter() - began) * 1e3)
                self.cpu_ms += (time.thread_time() - cpu) * 1e3
                self.depth -= 1

        return timed

    def step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A step of the batch."""

        @functools.wraps(call)
        def stepped(batch: Any) -> Any:
            self.thread = threading.get_ident()
            ours, longest, cpu = sum(self.since_ms), max(self.since_ms, default=0.0), self.cpu_ms
            self.since_ms.clear()
            self.cpu_ms = 0.0
            waiting = len(batch._generation_batch)
            began = time.perf_counter()
            prompts, replies = call(batch)
            ended = time.perf_counter()
            row = (began, ended, len(replies), len(prompts), waiting, ours, longest, cpu)
            self.rows.append(row)
            return prompts, replies

        return stepped

    def write(self) -> None:
        """All of it."""
        lines = [json.dumps(COLUMNS), *(json.dumps(row) for row in self.rows)]
        self.path.write_text("\n".join(lines) + "\n")


def watched(trace: Trace) -> None:
    """Puts the clocks in their places."""
    from pion_vllm_mlx.serve.engine_mlx_lm_generator import Generator
    from pion_vllm_mlx.serve.lineage_cache import LineageCache

    for kind, name in (
        (Generator, "_tokenize"),
        (Generator, "_next_request"),
        (LineageCache, "fetch_nearest_cache"),
        (LineageCache, "insert_cache"),
    ):
        setattr(kind, name, trace.ours(getattr(kind, name)))
    server.BatchGenerator.next = trace.step(server.BatchGenerator.next)


def main(words: list[str]) -> int:
    """The engine, traced."""
    at = words.index("--trace")
    trace = Trace(Path(words[at + 1]))
    watched(trace)
    code = engine_mlx_lm.main([*words[:at], *words[at + 2 :]])
    trace.write()
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the engine itself does
