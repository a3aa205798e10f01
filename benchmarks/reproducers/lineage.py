"""The lineage store: how long a lookup takes, what is on disk, how long ``keep`` holds its caller.

Lookup: a prompt of 100,000 tokens among 1,000 conversations, by ``match``; half of it is
stored, so that it leaves its lineage in the middle. Disk: what the data folder takes
(allocated blocks, after a SAVE) against the bytes of the distinct rows of a trace with a
shared system prompt, turns, a repeat and branches. Keep: the caches of a 1B model (16
layers, 8 heads of 64, float16), 8,192 new tokens at once, and 16 at a time after that,
while the background thread writes. No server is asked while the caller waits.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore

from .common import Process, arguments, check, fresh_folder, percentile, pion_server, report, spread
from .models import RowsOnly, random_ids, random_llama

LOOKUP_TOKENS, CONVERSATIONS = 100_000, 1_000
LOOKUP_BAR_MS, DISK_BAR, KEEP_BAR_MS = 10.0, 1.1, 2.0
KEEP_TOKENS, STEP_TOKENS, STEPS = 8_192, 16, 64
VOCABULARY = 128
SERVER = ("--max-sessions", "65536")


def narrow_model() -> Any:
    """One layer, one head of 32: rows of 128 bytes, so that many tokens are few bytes."""
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32,
        "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 32, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }  # fmt: skip
    mx.random.seed(7)
    model = RowsOnly(llama.ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


def opened(model: Any, server: Process) -> LineageStore:
    options = LineageOptions(url=f"tcp://127.0.0.1:{server.port}", budget_bytes=0)
    return LineageStore(model, options)


def fill(model: Any, ids: list[int], cache: list[Any], start: int = 0) -> None:
    """Random rows for the tokens from ``start`` on: nothing is computed."""
    shape = (1, model.args.num_key_value_heads, len(ids) - start, model.args.head_dim)
    for number, layer in enumerate(cache):
        rows = mx.random.normal(shape, key=mx.random.key(number)).astype(mx.float16)
        layer.update_and_fetch(rows, rows[..., ::-1])
    mx.eval([c.keys for c in cache], [c.values for c in cache])


def keep(store: LineageStore, model: Any, ids: list[int]) -> None:
    cache = make_prompt_cache(model)
    fill(model, ids, cache)
    if not store.keep(ids, cache) or not store.flush(120):
        raise SystemExit(f"not stored: {store.stats()}")


def lookup(server: Process, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of ``match``."""
    model = narrow_model()
    store = opened(model, server)
    system = random_ids(1_000, VOCABULARY, 1)
    for seed in range(CONVERSATIONS - 1):
        own = random_ids(64 + seed % 200, VOCABULARY, 10 + seed)
        keep(store, model, [*system, *own])
    long = random_ids(LOOKUP_TOKENS, VOCABULARY, 5_000)
    keep(store, model, long[: LOOKUP_TOKENS // 2])
    asked = [*long[: LOOKUP_TOKENS // 2 - 1], *long[LOOKUP_TOKENS // 2 - 2 :]][:LOOKUP_TOKENS]
    other = opened(model, server)
    times, lengths = [], set()
    for _ in range(options.pairs + 1):
        started = time.perf_counter()
        match = other.match(asked)
        times.append((time.perf_counter() - started) * 1e3)
        lengths.add(match.length)
    if lengths != {LOOKUP_TOKENS // 2 - 1} and lengths != {LOOKUP_TOKENS // 2}:
        raise SystemExit(f"found {lengths} tokens")
    found = spread(times[1:])
    conversations = len(other.conversations())
    for one in (store, other):
        one.close()
    return {
        "tokens": LOOKUP_TOKENS,
        "conversations": conversations,
        "match_ms": found,
        **check(found["median"], LOOKUP_BAR_MS, at_least=False),
    }


def allocated(folder: Path) -> int:
    """Bytes that the files of a folder take: the holes of spare rows are none."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(os.stat(path).st_blocks * 512 for path in files)


def disk(server: Process, data: Path) -> dict[str, Any]:
    """Bytes on disk over bytes of distinct rows."""
    model = random_llama("thin", mx.float16)
    store = opened(model, server)
    before = allocated(data)
    system = random_ids(2_000, VOCABULARY, 2)
    distinct: set[int] = set()
    for seed in range(4):
        ids = list(system)
        for turn in range(4):
            ids += random_ids(200, VOCABULARY, 100 + 10 * seed + turn)
            keep(store, model, ids)
            distinct |= {hash(tuple(ids[: n + 1])) for n in range(len(system) - 1, len(ids))}
        match = store.match(ids)
        if match.length != len(ids) - 1:
            raise SystemExit(f"a repeat finds {match.length} of {len(ids)} tokens")
    rows = (len(distinct) + len(system) - 1) * 16 * 2 * 8 * 64 * 2
    with server.connect() as connection:
        connection.command("KV.PREFIX.SAVE")
    time.sleep(1.0)
    used = allocated(data) - before
    store.close()
    return {
        "distinct_row_bytes": rows,
        "disk_bytes": used,
        "ratio": round(used / rows, 3),
        **check(used / rows, DISK_BAR, at_least=False),
    }


def blocking(server: Process, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds for which ``keep`` holds its caller, and those its thread was at work."""
    model = random_llama("thin", mx.float16)
    whole, steps, cpu = [], [], []
    for pair in range(options.pairs + 1):
        store = opened(model, server)
        ids = random_ids(KEEP_TOKENS, VOCABULARY, 9_000 + pair)
        cache = make_prompt_cache(model)
        fill(model, ids, cache)
        store.match(ids)
        times = [timed_keep(store, ids, cache)]
        for _ in range(STEPS):
            ids += random_ids(STEP_TOKENS, VOCABULARY, len(ids))
            fill(model, ids, cache, len(ids) - STEP_TOKENS)
            times.append(timed_keep(store, ids, cache))
        if not store.flush(120) or store.stats()["written"] != STEPS + 1:
            raise SystemExit(f"not stored: {store.stats()}")
        store.close()
        if pair:
            whole.append(times[0][0])
            steps += [wall for wall, _ in times[1:]]
            cpu += [used for _, used in times]
    late = sum(1 for value in [*whole, *steps] if value > KEEP_BAR_MS)
    return {
        "tokens": KEEP_TOKENS,
        "first_keep_ms": spread(whole),
        "keep_of_16_ms": {**spread(steps), "p99": round(percentile(steps, 0.99), 2)},
        "thread_cpu_ms": {**spread(cpu), "p99": round(percentile(cpu, 0.99), 2)},
        "calls_over_2_ms": late,
        "calls": len(whole) + len(steps),
        **check(max(*whole, *steps), KEEP_BAR_MS, at_least=False),
    }


def timed_keep(store: LineageStore, ids: list[int], cache: list[Any]) -> tuple[float, float]:
    """Milliseconds by the clock, and of this thread's processor time."""
    started, cpu = time.perf_counter(), time.thread_time()
    taken = store.keep(ids, cache)
    elapsed, used = time.perf_counter() - started, time.thread_time() - cpu
    if not taken:
        raise SystemExit(f"not kept: {store.stats()}")
    return elapsed * 1e3, used * 1e3


def main() -> None:
    options = arguments(__doc__).parse_args()
    figures: dict[str, Any] = {}
    with fresh_folder(options.dir) as folder:
        with pion_server(folder / "lookup", *SERVER) as server:
            figures["lookup"] = lookup(server, options)
        with pion_server(folder / "disk", *SERVER) as server:
            figures["disk"] = disk(server, folder / "disk" / "data")
        with pion_server(folder / "keep", *SERVER) as server:
            figures["keep"] = blocking(server, options)
    report("lineage", options, figures, "mlx", "mlx-lm")


if __name__ == "__main__":
    main()
