"""Time to the first token behind a prefix, by every way to get at the prefix.

A first process prefills every prefix, stores it through PionPromptCache, and saves it with
mlx-lm too. Then ``--pairs`` fresh processes, one after the other, take each time once per
prefix, from the call to the first token after a suffix of 16 tokens:

* ``cold``: mlx-lm's ``generate_step`` of prefix and suffix,
* ``in-process``: PionPromptCache, the prefix already lives in this process,
* ``mapped``, ``stored``: PionPromptCache, by that lane, nothing of it in this process,
* ``mlx-lm file``: ``load_prompt_cache`` of mlx-lm's own file, from the page cache.

The order changes from process to process. Before that, the same process has gone every way
with another stored prefix of the same length: kernels are compiled, plans are made.

Prints one JSON line a prefix and one for all. Shapes: ``1b``, ``8b``:
Llamas of random 4-bit weights; ``real``: the small real model of the demo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from pion_vllm_mlx import PionPromptCache

from .common import (
    RESULTS,
    arguments,
    environment,
    fresh_folder,
    machine,
    milliseconds,
    paired_ratio,
    pion_server,
    versions,
)
from .models import SUFFIX_TOKENS, first_token, random_ids, random_llama

WAYS = ("cold", "in-process", "mapped", "stored", "mlx-lm file")
SWITCHES: Mapping[str, Mapping[str, str]] = {
    "in-process": {},
    "mapped": {"PION_PROMPT_CACHE_NO_INPROC": "1"},
    "stored": {"PION_PROMPT_CACHE_NO_INPROC": "1", "PION_PROMPT_CACHE_NO_EXPORT": "1"},
}
VOCABULARY = 100_000
DEADLINE_SECONDS = 60.0


@contextmanager
def switched(switches: Mapping[str, str]) -> Iterator[None]:
    """PionPromptCache reads its switches from the environment when it is built."""
    os.environ.update(switches)
    try:
        yield
    finally:
        for name in switches:
            del os.environ[name]


def build(shape: str) -> Any:
    """The model, in this process."""
    if shape != "real":
        return random_llama(shape, mx.bfloat16, bits=4)
    from pion_vllm_mlx.demo.model import ensure_model

    return load(str(ensure_model()))[0]


@dataclass(frozen=True)
class Prefix:
    """A stored prefix: its length, and which of the two of that length."""

    tokens: int
    warm_up: bool = False

    @property
    def namespace(self) -> str:
        """Where it lies."""
        return f"ttft-{self.tokens}{'-warm-up' if self.warm_up else ''}"

    @property
    def ids(self) -> list[int]:
        """Its tokens."""
        return random_ids(self.tokens, VOCABULARY, 2 * self.tokens + self.warm_up)

    def file(self, folder: Path) -> str:
        """mlx-lm's file of it."""
        return str(folder / f"{self.namespace}.safetensors")


class Job:
    """What a fresh process is told, and how it does it."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        self.folder = Path(words["folder"])
        self.url = f"tcp://127.0.0.1:{words['port']}"
        self.ways: list[str] = words["ways"]
        self.prefixes: list[int] = words["prefixes"]
        self.model = build(words["shape"])
        self.suffix = random_ids(SUFFIX_TOKENS, VOCABULARY, 1)
        self.caches: dict[str, PionPromptCache] = {}
        for way, switches in SWITCHES.items():
            with switched(switches):
                self.caches[way] = PionPromptCache(
                    self.model, url=self.url, deadline_seconds=DEADLINE_SECONDS
                )

    def store(self) -> dict[str, Any]:
        """Prefill and store every prefix; mlx-lm saves the very same cache."""
        found = {}
        pion = self.caches["mapped"]
        for prefix in [Prefix(n, warm) for n in self.prefixes for warm in (True, False)]:
            before = pion.stats()["bytes_stored"]
            cache = pion.get_or_prefill(prefix.ids, prefix.namespace)
            found[str(prefix.tokens)] = pion.stats()["bytes_stored"] - before
            save_prompt_cache(prefix.file(self.folder), cache)
        return found

    def measure(self) -> dict[str, Any]:
        """Every way once, for every prefix."""
        found: dict[str, Any] = {}
        for tokens in self.prefixes:
            for prefix in (Prefix(tokens, warm_up=True), Prefix(tokens)):
                found[str(tokens)] = {way: self.timed(way, prefix) for way in self.ways}
        return found

    def timed(self, way: str, prefix: Prefix) -> dict[str, Any]:
        """One time to first token, and the time until the cache was there."""
        ids = prefix.ids
        restore: Callable[[], Any] = partial(load_prompt_cache, prefix.file(self.folder))
        if way in self.caches:
            restore = partial(self.caches[way].get_or_prefill, ids, prefix.namespace)
        if way == "in-process":
            for _ in range(2):  # the second time it stays
                restore()
        prompt = [*ids, *self.suffix] if way == "cold" else self.suffix
        mx.synchronize()
        mx.clear_cache()
        started = time.perf_counter()
        cache = None if way == "cold" else restore()
        restored = time.perf_counter()
        token = first_token(self.model, prompt, cache)
        ended = time.perf_counter()
        if way in self.caches and self.caches[way].stats()["lane"] != way:
            raise SystemExit(f"not the {way} lane: {self.caches[way].stats()}")
        return {"seconds": ended - started, "restore": restored - started, "token": token}


def child(words: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job in a fresh process and wait for its report."""
    command = [sys.executable, "-m", "benchmarks.reproducers.cross_process_ttft"]
    done = subprocess.run(
        [*command, "--job", json.dumps(words)],
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line_of(tokens: int, stored_bytes: int, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON line of one prefix."""
    seconds = {way: [run[way]["seconds"] for run in runs] for way in runs[0]}
    restored = {run[way]["token"] for run in runs for way in run if way != "cold"}
    ratios = {}
    if "mlx-lm file" in seconds:
        for way in ("mapped", "stored", "in-process"):
            if way in seconds:
                ratios[f"{way} / mlx-lm file"] = paired_ratio(seconds[way], seconds["mlx-lm file"])
    if "cold" in seconds and "mapped" in seconds:
        ratios["cold / mapped"] = paired_ratio(seconds["cold"], seconds["mapped"])
    return {
        "prefix_tokens": tokens,
        "bytes": stored_bytes,
        "ttft_ms": {way: milliseconds(times) for way, times in seconds.items()},
        "restore_ms": {
            way: milliseconds([run[way]["restore"] for run in runs])
            for way in runs[0]
            if way != "cold"
        },
        "time_ratios": ratios,
        "restored_tokens_identical": len(restored) == 1,
        "cold_token_identical": {run["cold"]["token"] for run in runs} == restored
        if "cold" in seconds
        else None,
    }


def lines_of(
    options: argparse.Namespace, stored: Mapping[str, int], runs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One line a prefix, then the summary."""
    head = {
        "name": "cross_process_ttft",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": options.machine or machine(),
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "versions": versions("mlx", "mlx-lm"),
        "shape": options.shape,
        "processes": len(runs),
    }
    per_prefix = [
        line_of(tokens, stored[str(tokens)], [run[str(tokens)] for run in runs])
        for tokens in options.prefixes
    ]
    table = {
        str(line["prefix_tokens"]): {
            way: figures["median"] for way, figures in line["ttft_ms"].items()
        }
        for line in per_prefix
    }
    return [*({**head, **line} for line in per_prefix), {**head, "median_ttft_ms": table}]


def measure(options: argparse.Namespace, folder: Path) -> None:
    with pion_server(folder / "pion") as pion:
        words = {"folder": str(folder), "port": pion.port, "shape": options.shape}
        words |= {"prefixes": options.prefixes, "ways": options.ways}
        started = time.monotonic()
        stored = child({**words, "kind": "store"})
        runs = []
        for turn in range(options.pairs):
            cut = turn % len(options.ways)
            ways = [*options.ways[cut:], *options.ways[:cut]]
            runs.append(child({**words, "kind": "measure", "ways": ways}))
            spent = (time.monotonic() - started) / (turn + 2)
            if options.seconds and time.monotonic() - started + spent > options.seconds:
                break
    lines = [json.dumps(line) for line in lines_of(options, stored, runs)]
    print("\n".join(lines), flush=True)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        name = f"cross_process_ttft-{options.shape}{options.suffix}.json"
        (RESULTS / name).write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=("1b", "8b", "real"), default="real")
    prefixes = [256, 512, 1024, 2048, 4096, 8192]
    parser.add_argument("--prefixes", type=int, nargs="+", default=prefixes)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=0.0, help="start no process after that")
    parser.add_argument("--machine", default="", help="what the result calls the machine")
    parser.add_argument("--suffix", default="", help="appended to the result's name")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = Job(options.job)
        print(json.dumps(job.store() if options.job["kind"] == "store" else job.measure()))
        return
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
