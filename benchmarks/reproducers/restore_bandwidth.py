"""The mapped lane in a fresh process, against mlx-lm's own file of the same prefix.

Every time is taken once in the life of a fresh process whose model is loaded and whose
kernels have run; both sides take turns, the page cache is warm. Three ends of the clock:

* ``evaluated``: from the lookup (mlx-lm: ``load_prompt_cache``) until every layer's arrays
  are evaluated,
* ``appended``: the same, and 16 rows appended to every layer, evaluated: what a suffix adds
  whatever the model,
* ``first token``: from the lookup to the first token after a suffix of 16 tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from pion_vllm_mlx import PionPromptCache

from .common import (
    Process,
    arguments,
    check,
    environment,
    fresh_folder,
    milliseconds,
    paired_ratio,
    pion_server,
    report,
    wait_until_quiet,
)
from .models import SUFFIX_TOKENS, first_token, random_ids, random_llama

KINDS = ("evaluated", "appended", "first token")
DTYPES = {"fp16": mx.float16, "bf16": mx.bfloat16, "fp32": mx.float32}
BAR = 1.1
VOCABULARY = 128


def namespace(tokens: int) -> str:
    """Where the prefix of ``tokens`` tokens lies."""
    return f"restore-{tokens}"


def prefix_ids(tokens: int) -> list[int]:
    """The prefix of that length."""
    return random_ids(tokens, VOCABULARY, tokens)


def prompt_file(folder: Path, tokens: int) -> str:
    """mlx-lm's file of the same prefix."""
    return str(folder / f"mlx-lm-{tokens}.safetensors")


def load_file(folder: Path, tokens: int) -> list[Any]:
    """mlx-lm's way to restore the prefix."""
    caches: list[Any] = load_prompt_cache(prompt_file(folder, tokens))  # type: ignore[no-untyped-call]
    return caches


def states(caches: Sequence[Any]) -> list[Any]:
    """The arrays of a plain cache list."""
    return [cache.state for cache in caches]


class Job:
    """What a fresh process is told, and how it does it."""

    def __init__(self, words: dict[str, Any]) -> None:
        self.folder = Path(words["folder"])
        self.url = words["url"]
        self.side, self.kind = words["side"], words["kind"]
        self.model = random_llama("thin", DTYPES[words["dtype"]])
        self.suffix = random_ids(SUFFIX_TOKENS, VOCABULARY, 1)

    def prompt_cache(self) -> PionPromptCache:
        """A client of the parent's server."""
        return PionPromptCache(self.model, url=self.url, deadline_seconds=60)

    def prepare(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Prefill and store every prefix; mlx-lm saves the very same cache."""
        found = []
        with self.prompt_cache() as pion:
            for count in tokens:
                cache = pion.get_or_prefill(prefix_ids(count), namespace(count))
                save_prompt_cache(prompt_file(self.folder, count), cache)
                found.append({"bytes": pion.stats()["bytes_stored"]})
        return found

    def restores(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Time one restore of every prefix."""
        first_token(self.model, self.suffix, make_prompt_cache(self.model))
        if self.side == "mlx-lm":
            return [self._timed(partial(load_file, self.folder, n)) for n in tokens]
        found = []
        with self.prompt_cache() as pion:
            for n in tokens:
                found.append(self._timed(partial(pion.get_or_prefill, prefix_ids(n), namespace(n))))
                if pion.stats()["lane"] != "mapped":
                    raise SystemExit(f"not the mapped lane: {pion.stats()}")
        return found

    def _timed(self, restore: Callable[[], list[Any]]) -> dict[str, Any]:
        rows = mx.ones((1, 8, SUFFIX_TOKENS, 64), self.model.row_dtype)
        mx.eval(rows)
        token = None
        started = time.perf_counter()
        caches = restore()
        if self.kind == "first token":
            token = first_token(self.model, self.suffix, caches)
        else:
            if self.kind == "appended":
                for cache in caches:
                    cache.update_and_fetch(rows, rows)
            mx.eval(states(caches))
        return {"seconds": time.perf_counter() - started, "token": token}


def child(words: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job in a fresh process and wait for its report."""
    command = [sys.executable, "-m", "benchmarks.reproducers.restore_bandwidth"]
    done = subprocess.run(
        [*command, "--job", json.dumps(words)],
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def rounds(options: argparse.Namespace, job: dict[str, Any], kind: str) -> dict[str, Any]:
    """One end of the clock: both sides in turn, every prefix in processes of its own."""
    times: dict[tuple[str, int], list[float]] = {}
    tokens_seen: dict[int, set[int]] = {n: set() for n in options.tokens}
    for _ in range(options.pairs):
        wait_until_quiet(options.patience)
        for n in options.tokens:
            for side in ("mlx-lm", "pion"):
                # one restore a process: a second one finds memory that the first has freed
                (result,) = child({**job, "tokens": [n], "side": side, "kind": kind})
                times.setdefault((side, n), []).append(result["seconds"])
                tokens_seen[n].add(result["token"])
    found = {}
    for n in options.tokens:
        ratio = paired_ratio(times["pion", n], times["mlx-lm", n])
        found[f"N={n}"] = {
            "mlx_lm_ms": milliseconds(times["mlx-lm", n]),
            "pion_ms": milliseconds(times["pion", n]),
            "time_ratio": ratio,
            "same_token": len(tokens_seen[n]) == 1,
            **check(ratio["median"], BAR, at_least=False),
        }
    return found


def measure(options: argparse.Namespace, folder: Path, pion: Process) -> None:
    # as a process attaches to an embedded server: by its Unix socket
    job = {"folder": str(folder), "url": f"unix://{pion.unixsocket}", "dtype": options.dtype}
    job["tokens"] = options.tokens
    stored = child({**job, "side": "pion", "kind": "store"})
    found: dict[str, Any] = {kind: rounds(options, job, kind) for kind in options.kinds}
    figures = {"dtype": options.dtype, "stored_bytes": stored[-1]["bytes"], **found}
    report("restore_bandwidth", options, figures, "mlx", "mlx-lm")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 4100])
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = Job(options.job)
        work = job.prepare if options.job["kind"] == "store" else job.restores
        print(json.dumps(work(options.job["tokens"])))
        return
    with fresh_folder(options.dir) as folder, pion_server(folder / "pion") as pion:
        measure(options, folder, pion)


if __name__ == "__main__":
    main()
