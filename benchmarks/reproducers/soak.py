"""Twenty minutes of mixed load: does memory, latency, disk use or the log grow, does anything fail?

One process looks up as fast as the server answers (or at ``--rate``), over ``--connections``
connections: a small prefix that must be a hit every time, however much is evicted around it,
and one name that nobody stored. This process stores prefixes of 64 MiB, fetches and compares them,
stores over them, drops them, stores and fetches recurrent states and plain keys, one
operation every ``--pause`` seconds. The disk budget and the session limit are small, so that
something is evicted all the time and the server saves and compacts again and again.

Every few seconds the server's RssAnon, descriptors, threads, logs and disk use are taken, once
a minute what the lookups took. After ``--warm-up`` minutes, in which the budget fills, the
verdict compares the last third of the time with the first: ``flat`` means that nothing in it
grew beyond the spread that ``LIMITS`` allows, or fell below ``LEAST``, nothing left its
``BOUNDS``, and that there was not one error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.wire.resp import Part

from .common import (
    REPOSITORY,
    Process,
    arguments,
    environment,
    fresh_folder,
    percentile,
    pion_server,
    report,
)
from .prefix import SIDES, Bytes, Shape, fetch_words, register
from .server_memory import memory_kb

#: 16 layers of 2 MB a side.
SHAPE = Shape(tokens=2048)
NAMES = 24
DISK_BUDGET, MAX_SESSIONS, WAL_MB = 1 << 30, 26, 1
FLAGS = ("--disk-budget", str(DISK_BUDGET), "--max-sessions", str(MAX_SESSIONS))
LOGS = ("", "ssm_", "keyspace_")
STAMP_BYTES, STATE_BYTES, VALUE_BYTES = 16, 1 << 20, 200_000
SAMPLE_SECONDS = 5.0
#: what the median of the last third may be over that of the first: factor, and on top.
LIMITS = {
    "rss_anon_mb": (1.1, 8.0),
    "descriptors": (1.0, 4.0),
    "threads": (1.0, 1.0),
    "disk_mb": (1.2, 64.0),
    "p50_ms": (1.25, 0.02),
    "p99_ms": (1.5, 0.1),
}
#: what the median of the last third is of that of the first, at the least.
LEAST = {"rate": 0.8}
#: a log fills up and starts anew: without a quiet moment at four times its size, that of plain
#: keys at four times what its snapshot takes, if that is more.
_LOG_MB = 4 * WAL_MB * (1 << 20) / 1e6
BOUNDS = {
    "wal_mb": _LOG_MB,
    "ssm_wal_mb": _LOG_MB,
    "keyspace_wal_mb": max(_LOG_MB, 4 * (NAMES + 1) * VALUE_BYTES / 1e6),
}


def lookups(port: int, connections: int, per_second: int) -> None:
    """Look up until standard input ends; a JSON line for every minute. Runs in a child.

    ``per_second`` 0: as fast as the server answers.
    """
    hit, miss = b"KV.PREFIX.LOOKUP hot\r\n", b"KV.PREFIX.LOOKUP nobody\r\n"
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    asked = [(sock, hit, b"+HIT\r\n") for sock in socks[1:]] + [(socks[0], miss, b"+MISS\r\n")]
    clock = time.perf_counter
    while not over.is_set():
        times: list[float] = []
        wrong = 0
        began = clock()
        ends_at = began + 60.0
        while clock() < ends_at and not over.is_set():
            sent = []
            for sock, words, _ in asked:
                sent.append(clock())
                sock.sendall(words)
            for (sock, _, expected), at in zip(asked, sent, strict=True):
                wrong += sock.recv(64) != expected
                times.append(clock() - at)
            ahead = began + len(times) / per_second - clock() if per_second else 0
            if ahead > 0:
                over.wait(ahead)
        line = {f"p{share}_ms": 1e3 * percentile(times, share / 100) for share in (50, 99)}
        line |= {"lookups": len(times), "wrong": wrong, "max_ms": 1e3 * max(times)}
        line["rate"] = len(times) / (clock() - began)
        print(json.dumps(line), flush=True)


@contextmanager
def looking_up(pion: Process, options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Lookups from a process of their own meanwhile; the list grows with every minute."""
    words = [sys.executable, "-m", "benchmarks.reproducers.soak", "--lookups", str(pion.port)]
    minutes: list[dict[str, Any]] = []

    def read(lines: IO[bytes]) -> None:
        minutes.extend(json.loads(line) for line in lines)

    with subprocess.Popen(
        [*words, "--connections", str(options.connections), "--rate", str(options.rate)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        cwd=REPOSITORY,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        reader = threading.Thread(target=read, args=(child.stdout,))
        reader.start()
        try:
            yield minutes
        finally:
            child.stdin.close()
            reader.join()
    if child.returncode:
        raise SystemExit("the process that looks up has failed")


@dataclass
class Load:
    """The bulk operations, and what came of them."""

    connection: RespConnection
    dice: random.Random
    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    stored: dict[str, int] = field(default_factory=dict)
    version: int = 0

    def __post_init__(self) -> None:
        base = SHAPE.random_layer()
        self.layers: list[Bytes] = [base.copy() for _ in range(2 * SHAPE.layers)]
        self.buffers = SHAPE.buffers()
        self.base = base
        self.state = self.dice.randbytes(STATE_BYTES)
        names: list[tuple[Callable[[str], None], int]] = [
            *((self.store, 40), (self.fetch, 30), (self.drop, 8)),
            *((self.keep_state, 8), (self.keep_key, 8), (self.map, 6)),
        ]
        self.operations = [one for one, _ in names]
        self.weights = [weight for _, weight in names]

    def step(self) -> None:
        """One operation, drawn by its weight."""
        operation = self.dice.choices(self.operations, self.weights)[0]
        name = f"n{self.dice.randrange(NAMES)}"
        try:
            operation(name)
        except CommandError as error:
            if "not found" not in str(error):
                self.errors.append(f"{operation.__name__} {name}: {error}")
            self.done["gone"] += 1
        self.done[operation.__name__] += 1

    def _stamp(self, version: int, number: int) -> Bytes:
        return np.frombuffer(b"%d.%d" % (version, number) + bytes(STAMP_BYTES), np.uint8)[
            :STAMP_BYTES
        ]

    def store(self, name: str) -> None:
        """64 MiB, over what is there."""
        self.version += 1
        register(self.connection, name, SHAPE)
        commands: list[list[Part]] = []
        for number, layer in enumerate(self.layers):
            layer[:STAMP_BYTES] = self._stamp(self.version, number)
            sid, index = name + SIDES[number // SHAPE.layers], number % SHAPE.layers
            place: list[Part] = ["V.STOREBATCH", sid, index, 0, SHAPE.tokens, layer]
            commands.append([*place, "FMT", "STORED", "LAYOUT", "HND"])
        self.stored.pop(name, None)
        for reply in self.connection.pipeline(commands):
            if isinstance(reply, CommandError):
                raise reply
        self.stored[name] = self.version

    def fetch(self, name: str) -> None:
        """What was stored last under the name, compared, unless it was evicted."""
        if name not in self.stored:
            return
        for side, first in zip(SIDES, (0, SHAPE.layers), strict=True):
            self.connection.fetch_into(fetch_words(name, side, SHAPE), self.buffers)
            for number, buffer in enumerate(self.buffers, first):
                stamp = self._stamp(self.stored[name], number)
                good = np.array_equal(buffer[:STAMP_BYTES], stamp)
                if not (good and np.array_equal(buffer[STAMP_BYTES:], self.base[STAMP_BYTES:])):
                    self.errors.append(f"fetch {name}: wrong bytes")

    def drop(self, name: str) -> None:
        self.connection.command("KV.PREFIX.DROP", name)
        self.stored.pop(name, None)

    def map(self, name: str) -> None:
        self.connection.command("KV.PREFIX.MAP", name)

    def keep_state(self, name: str) -> None:
        self.connection.command("SSM.PREFIX.STORE", "state", 1, self.state)
        if self.connection.command("SSM.PREFIX.FETCH", "state", 1) != self.state:
            self.errors.append("a state is not the stored one")

    def keep_key(self, name: str) -> None:
        value = self.state[:VALUE_BYTES]
        self.connection.command("SET", name, value)
        if self.connection.command("GET", name) != value:
            self.errors.append("a value is not the stored one")


@dataclass
class Watch:
    """Samples of the server while the load runs."""

    pion: Process
    connection: RespConnection
    samples: list[dict[str, float]] = field(default_factory=list)

    def info(self, *words: str) -> dict[str, str]:
        """The fields of an INFO."""
        reply: Any = self.connection.command(*words)
        lines = bytes(reply).decode().splitlines()
        return {name: value for name, _, value in (line.partition(":") for line in lines)}

    def take(self) -> None:
        pid, info = self.pion.pid, self.info("INFO", "persistence")
        files = [path.stat() for path in (self.pion.folder / "data").rglob("*") if path.is_file()]
        self.samples.append(
            {
                "rss_anon_mb": memory_kb(pid, "RssAnon") / 1e3,
                "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
                "threads": memory_kb(pid, "Threads"),
                "disk_mb": sum(one.st_blocks * 512 for one in files) / 1e6,
                **{f"{log}wal_mb": int(info[f"{log}wal_bytes"]) / 1e6 for log in LOGS},
            }
        )


def run(load: Load, watch: Watch, options: argparse.Namespace) -> None:
    """One operation after the other until the time is over."""
    started = time.monotonic()
    ends_at = started + 60 * (options.minutes + options.warm_up)
    next_sample = started + 60 * options.warm_up
    while (now := time.monotonic()) < ends_at:
        if now >= next_sample:
            next_sample = now + SAMPLE_SECONDS
            watch.take()
        load.step()
        time.sleep(options.pause)


def thirds(values: list[float]) -> dict[str, float]:
    """Medians of the first and the last third, and the most of all."""
    part = max(1, len(values) // 3)
    first, last = percentile(values[:part], 0.5), percentile(values[-part:], 0.5)
    return {"first": round(first, 3), "last": round(last, 3), "max": round(max(values), 3)}


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every watched figure that the rows have, and whether it stayed flat."""
    found: dict[str, Any] = {}
    for name, (factor, on_top) in LIMITS.items():
        if rows and name in rows[0]:
            figure = thirds([row[name] for row in rows])
            found[name] = {**figure, "flat": figure["last"] <= factor * figure["first"] + on_top}
    for name, least in LEAST.items():
        if rows and name in rows[0]:
            figure = thirds([row[name] for row in rows])
            found[name] = {**figure, "flat": figure["last"] >= least * figure["first"]}
    for name, bound in BOUNDS.items():
        if rows and name in rows[0]:
            figure = thirds([row[name] for row in rows])
            found[name] = {**figure, "flat": figure["max"] <= bound}
    return found


def measure(options: argparse.Namespace, folder: Path) -> None:
    flags = (*FLAGS, "--wal-size", str(WAL_MB))
    with pion_server(folder / "pion", *flags) as pion:
        with pion.connect() as connection, pion.connect() as watcher:
            register(connection, "hot", Shape(layers=1, tokens=1))
            load, watch = Load(connection, random.Random(options.seed)), Watch(pion, watcher)
            with looking_up(pion, options) as minutes:
                run(load, watch, options)
            info = watch.info("KV.PREFIX.INFO")
        minutes = minutes[math.ceil(options.warm_up) :] or minutes
        log = (pion.folder / "output.log").read_text(errors="replace")
    errors = [*load.errors, *(line for line in log.splitlines() if "rror" in line)]
    errors += [f"{one['wrong']} wrong lookups" for one in minutes if one["wrong"]]
    figures = {**verdict(watch.samples), **verdict(minutes)}
    flat = not errors and all(figure["flat"] for figure in figures.values())
    line = {
        "minutes": options.minutes,
        "rate_asked": options.rate,
        "verdict": "flat" if flat else "not flat",
        "errors": len(errors),
        "first_errors": errors[:5],
        "lookups": sum(one["lookups"] for one in minutes),
        "lookups_per_second": round(sum(one["rate"] for one in minutes) / len(minutes)),
        "lookup_max_ms": round(max(one["max_ms"] for one in minutes), 1),
        "operations": dict(load.done),
        "evictions": int(info["vstore_evictions"]),
        **figures,
        "by_minute": [
            [one["lookups"], round(one["p50_ms"], 3), round(one["p99_ms"], 3)] for one in minutes
        ],
    }
    report("soak", options, line)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=1.0, help="minutes before it counts")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between operations")
    parser.add_argument("--connections", type=int, default=8, help="that look up")
    parser.add_argument("--rate", type=int, default=0, help="lookups a second, 0: all it takes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lookups", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lookups:
        lookups(options.lookups, options.connections, options.rate)
        return
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
