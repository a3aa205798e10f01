"""Lookups a second from 50 connections, against redis-server's GET, by redis-benchmark on both.

The stored namespace is hit every time; redis holds one short value. ``pipelined``: the
same with 16 commands in flight on every connection, which is no bar.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from .common import (
    Process,
    alternate,
    arguments,
    check,
    fresh_folder,
    paired_ratio,
    pion_server,
    redis_server,
    report,
    spread,
)

CONNECTIONS = 50
BAR = 0.3
PIPELINE = 16
TIMEOUT_SECONDS = 300
LOOKUP, GET = ("KV.PREFIX.LOOKUP", "ns"), ("GET", "key")


def rate(server: Process, pipeline: int, seconds: float, words: tuple[str, ...]) -> dict[str, Any]:
    """One run of redis-benchmark for about so many seconds: rate, and latencies in ms."""
    binary = shutil.which("redis-benchmark")
    if binary is None:
        raise SystemExit("redis-benchmark is not installed")
    options = ["-p", str(server.port), "-c", str(CONNECTIONS), "-P", str(pipeline), "--csv"]

    def run(requests: int) -> dict[str, str]:
        command = [binary, *options, "-n", str(requests), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
        names, values = csv.reader(lines)
        return dict(zip(names, values, strict=True))

    first = run(2_000 * pipeline)
    found = run(max(1_000, round(float(first["rps"]) * seconds)))
    return {
        "per_second": float(found["rps"]),
        **{name: float(found[f"{name}_latency_ms"]) for name in ("p50", "p99", "max")},
    }


def compare(
    ours: Process, theirs: Process, pipeline: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Both sides in turn; the ratio of their rates."""
    rows: dict[str, list[dict[str, Any]]] = {"lookup": [], "redis_get": []}

    def side(name: str, server: Process, words: tuple[str, ...]) -> float:
        rows[name].append(rate(server, pipeline, options.seconds, words))
        return 1.0 / float(rows[name][-1]["per_second"])

    seconds = alternate(
        {
            "lookup": lambda: side("lookup", ours, LOOKUP),
            "redis_get": lambda: side("redis_get", theirs, GET),
        },
        options.pairs,
        options.patience,
    )
    figures: dict[str, Any] = {"ratio": paired_ratio(seconds["redis_get"], seconds["lookup"])}
    for name, found in rows.items():
        counted = found[1:]
        figures[f"{name}_per_second"] = spread([row["per_second"] for row in counted], 0)
        for percent in ("p50", "p99"):
            figures[f"{name}_{percent}_ms"] = spread([row[percent] for row in counted], 3)
    return figures


def prepare(ours: Process, theirs: Process) -> None:
    """What is looked up."""
    with ours.connect() as connection:
        connection.command("KV.PREFIX.REGISTER", "ns", "64", "fp16")
        connection.command("KV.PREFIX.LOOKUP", "ns")
    with theirs.connect() as connection:
        connection.command("SET", "key", b"x" * 3)


def credited(ours: Process) -> int:
    """Hits that the server has counted: every answered lookup was one."""
    with ours.connect() as connection:
        reply: Any = connection.command("PION.STATS")
        fields = [bytes(word) if not isinstance(word, int) else word for word in reply]
        return int(fields[fields.index(b"kvprefix_hits") + 1])


def version(theirs: Process) -> str:
    """What redis-server says it is."""
    with theirs.connect() as connection:
        text = bytes(connection.command("INFO", "server")).decode()  # type: ignore[arg-type]
    return text.partition("redis_version:")[2].split()[0]


def measure(options: argparse.Namespace, folder: Path) -> None:
    with pion_server(folder / "pion") as ours, redis_server(folder / "redis") as theirs:
        prepare(ours, theirs)
        time.sleep(0.5)
        single = compare(ours, theirs, 1, options)
        pipelined = compare(ours, theirs, PIPELINE, options)
        hits, redis_version = credited(ours), version(theirs)
    figures = {
        "connections": CONNECTIONS,
        "redis_server": redis_version,
        "single": {**single, **check(single["ratio"]["median"], BAR, at_least=True)},
        "pipelined": {"pipeline": PIPELINE, **pipelined},
        "hits_counted": hits,
    }
    report("lookup_rate", options, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one timed run")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
