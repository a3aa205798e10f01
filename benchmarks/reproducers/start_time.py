"""How fast a killed server is back: 4 GB stored, SIGKILL, start, first ``+HIT``.

The time runs from starting the process to the reply of KV.PREFIX.LOOKUP; once with a log to
replay and once after KV.PREFIX.SAVE. ``first_fetch`` is what comes on top for the first
prefix that is fetched: its checksums are verified then, once a start.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path
from typing import Any

from pion_vllm_mlx.wire.encode import Simple

from .common import Process, arguments, check, fresh_folder, pion_server, report, spread
from .prefix import fetch
from .server_memory import CLIENTS, SHAPE, store_all

BAR_SECONDS = 1.0
NAMESPACE = "c0.0"


def seconds_to_hit(pion: Process) -> tuple[float, float]:
    """From starting the process to its first ``+HIT``; then of fetching that prefix."""
    buffers = SHAPE.buffers()
    started = time.perf_counter()
    pion.start()
    with pion.connect() as connection:
        reply = connection.command("KV.PREFIX.LOOKUP", NAMESPACE)
        hit_at = time.perf_counter()
        if reply != Simple("HIT"):
            raise SystemExit(f"the restarted server answered {reply!r}")
        fetch(connection, NAMESPACE, SHAPE, buffers)
        return hit_at - started, time.perf_counter() - hit_at


def startup(pion: Process, starts: int) -> dict[str, Any]:
    """Kill and start, again and again: with a log to replay, then after SAVE."""
    found: dict[str, Any] = {}
    for kind in ("log replayed", "after SAVE"):
        times = []
        for _ in range(starts):
            pion.stop(signal.SIGKILL)
            times.append(seconds_to_hit(pion))
        seconds = spread([hit for hit, _ in times])
        found[kind] = {
            "seconds": seconds,
            **check(seconds["median"], BAR_SECONDS, at_least=False),
            "first_fetch_seconds": spread([fetched for _, fetched in times]),
        }
        with pion.connect() as connection:
            connection.command("KV.PREFIX.SAVE")
    return found


def measure(options: argparse.Namespace, folder: Path) -> None:
    prefixes = max(1, round(options.gigabytes * 1e9 / SHAPE.total_bytes / CLIENTS))
    with pion_server(folder / "pion") as pion:
        store_all(pion, prefixes)
        found = startup(pion, options.pairs)
    stored = prefixes * CLIENTS * SHAPE.total_bytes
    report("start_time", options, {"stored_bytes": stored, **found})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.3)
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
