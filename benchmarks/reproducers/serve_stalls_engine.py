"""An engine with a clock on its generation thread: ``mlx-lm|vllm-mlx FILE``, then its own flags.

Of every step of the batch is noted when it began and ended, how many sequences it decoded and
prefilled, and how long what is ours took since the step before, by the clock and of the thread's
processor time: whatever the cache was asked for, tokenizing and planning included, and what is
done of what waits, with a step (the piece that it carries) and behind it.  A reply that is not
batched has its tokens for steps.  The first line of the file are the names of the columns; one
line a step follows, written when the engine ends.  What ``serve_stalls_watch`` has noted lies
beside it, in a file of its own.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .serve_stalls_watch import Watch

COLUMNS = (
    "began",
    "ended",
    "decoded",
    "prefilled",
    "waiting",
    "ours_ms",
    "longest_call_ms",
    "cpu_ms",
    "longest_call",
)
MLX_LM, VLLM_MLX = "mlx-lm", "vllm-mlx"
ENGINES = (MLX_LM, VLLM_MLX)


@dataclass
class Trace:
    """Steps of the batch, and what of ours lay between them."""

    path: Path
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    since: list[tuple[float, str]] = field(default_factory=list)
    cpu_ms: float = 0.0
    depth: int = 0
    thread: int = 0
    watch: Watch = field(default_factory=Watch)

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
                cpu_ms = (time.thread_time() - cpu) * 1e3
                self.since.append(((time.perf_counter() - began) * 1e3, call.__name__))
                self.cpu_ms += cpu_ms
                self.depth -= 1
                self.watch.note(f"ours: {call.__name__}", began, cpu_ms)

        return timed

    def step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A step of the batch."""

        @functools.wraps(call)
        def stepped(batch: Any) -> Any:
            before, waiting = self._before(), len(batch._generation_batch)
            began = time.perf_counter()
            prompts, replies = call(batch)
            self._note(began, (len(replies), len(prompts), waiting), before)
            return prompts, replies

        return stepped

    def replies(self, call: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """What generates a reply that is not batched: each of its tokens is a step."""

        @functools.wraps(call)
        def generated(*args: Any, **options: Any) -> Iterator[Any]:
            responses, decoding = iter(call(*args, **options)), 0
            while True:
                before, began = self._before(), time.perf_counter()
                response = next(responses, None)
                if response is None:
                    return
                self._note(began, (1, 1 - decoding, decoding), before)
                decoding = 1
                yield response

        return generated

    def write(self) -> None:
        """All of it."""
        lines = [json.dumps(COLUMNS), *(json.dumps(row) for row in self.rows)]
        self.path.write_text("\n".join(lines) + "\n")
        self.watch.write(self.path.with_suffix(".calls"))

    def _before(self) -> tuple[float, float, float, str]:
        """What of ours lay before the step that begins: together, the longest, CPU, its name."""
        self.thread = threading.get_ident()
        longest, name = max(self.since, default=(0.0, ""))
        found = (sum(ms for ms, _ in self.since), longest, self.cpu_ms, name)
        self.since.clear()
        self.cpu_ms = 0.0
        return found

    def _note(
        self, began: float, counts: tuple[int, int, int], before: tuple[float, float, float, str]
    ) -> None:
        self.rows.append((began, time.perf_counter(), *counts, *before))


def watched_mlx_lm(trace: Trace) -> Callable[[list[str]], int]:
    """Puts the clocks into mlx-lm's engine; what runs it."""
    from pion_vllm_mlx.serve import engine_mlx_lm
    from pion_vllm_mlx.serve.engine_mlx_lm_generator import Generator
    from pion_vllm_mlx.serve.engine_mlx_lm_noted import Noted
    from pion_vllm_mlx.serve.lineage_cache import LineageCache

    server: Any = importlib.import_module("mlx_lm.server")
    clocked(
        trace,
        (Generator, "_tokenize"),
        (Generator, "_next_request"),
        (LineageCache, "fetch_nearest_cache"),
        (LineageCache, "insert_cache"),
        (Noted, "_new"),
        (Noted, "_keep"),
    )
    server.BatchGenerator.next = trace.step(server.BatchGenerator.next)
    server.stream_generate = trace.replies(server.stream_generate)
    return engine_mlx_lm.main


def watched_vllm_mlx(trace: Trace) -> Callable[[list[str]], int]:
    """Puts the clocks into vllm-mlx's engine; what runs it."""
    from mlx_lm.generate import BatchGenerator

    from pion_vllm_mlx.cache import vllm_mlx_backend_prefill as prefill
    from pion_vllm_mlx.cache.vllm_mlx_backend_cache import PionPrefixCache
    from pion_vllm_mlx.serve import engine_vllm_mlx

    clocked(
        trace,
        (PionPrefixCache, "fetch"),
        (PionPrefixCache, "keep"),
        (prefill, "_find_anchors"),
        (prefill.PrefillWatch, "cut"),
        (prefill.PrefillWatch, "_after_prompt"),
        (prefill.PrefillWatch, "_after_token"),
        (prefill.PrefillWatch, "_measure"),
    )
    kind: Any = BatchGenerator
    kind.next = trace.step(kind.next)
    return engine_vllm_mlx.main


def clocked(trace: Trace, *places: tuple[Any, str]) -> None:
    """Puts clocks on calls of ours, and on what is done with a step and behind it."""
    from pion_vllm_mlx.cache.spread import Spread

    spread = ((Spread, name) for name in ("carried", "stepped", "work", "finish"))
    for owner, name in (*places, *spread):
        method = vars(owner)[name]
        setattr(owner, name, trace.ours(method))


def main(words: list[str]) -> int:
    """The engine, traced."""
    trace = Trace(Path(words[1]))
    run = watched_mlx_lm(trace) if words[0] == MLX_LM else watched_vllm_mlx(trace)
    trace.watch.begin(served=words[0] == MLX_LM)
    code = run(words[2:])
    trace.write()
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the engine itself does
