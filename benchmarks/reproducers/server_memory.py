"""The server's own memory while it stores and serves gigabytes.

One server, polled for RssAnon (its own memory; the page cache is not its own) all the while:

1. one 256 MB bulk string: a single layer stored and fetched,
2. 8 clients that store at once until ``--gigabytes`` lie there, then everything fetched.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .common import (
    MB,
    Process,
    arguments,
    check,
    environment,
    fresh_folder,
    pion_server,
    report,
)
from .prefix import SIDES, Bytes, Shape, fetch, register, store

CLIENTS = 8
POLL_SECONDS = 0.005
MEMORY_BAR_MB = 200.0
#: 16 layers of 8 MB a side: 256 MiB a prefix.
SHAPE = Shape(tokens=8192)
#: one layer of 256 MB.
BULK_TOKENS = 250_000
BULK_SHAPE = Shape(layers=1, tokens=BULK_TOKENS)


def memory_kb(pid: int, name: str) -> int:
    """A field of the process's status, in kB; 0 when the process is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
    return 0


@dataclass
class Watch:
    """The peak of RssAnon over what happens while it runs, phase by phase."""

    pid: int
    peaks_kb: dict[str, int] = field(default_factory=dict)
    phase: str = "start"
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Poll until told to stop."""
        while not self._stop.wait(POLL_SECONDS):
            peak = max(self.peaks_kb.get(self.phase, 0), memory_kb(self.pid, "RssAnon"))
            self.peaks_kb[self.phase] = peak

    def stop(self) -> None:
        """End polling."""
        self._stop.set()


@contextmanager
def watched(pid: int) -> Iterator[Watch]:
    """Poll a process's memory meanwhile."""
    watch = Watch(pid)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        thread.join()


def one_bulk(pion: Process) -> None:
    """Store and fetch one bulk string of 256 MB."""
    with pion.connect() as connection:
        register(connection, "bulk", BULK_SHAPE)
        store(connection, "bulk", BULK_SHAPE, [BULK_SHAPE.random_layer()])
        fetch(connection, "bulk", BULK_SHAPE, BULK_SHAPE.buffers())
        connection.command("KV.PREFIX.DROP", "bulk")


def store_some(pion: Process, client: int, prefixes: int) -> None:
    """One storing client."""
    layers: list[Bytes] = [SHAPE.random_layer(client)]
    with pion.connect() as connection:
        for number in range(prefixes):
            namespace = f"c{client}.{number}"
            register(connection, namespace, SHAPE)
            store(connection, namespace, SHAPE, layers)


def store_all(pion: Process, prefixes: int) -> None:
    """8 client processes at once, ``prefixes`` prefixes each. SystemExit if one fails."""
    word = [sys.executable, "-m", "benchmarks.reproducers.server_memory"]
    children = [
        subprocess.Popen(
            [*word, "--client", str(client), str(prefixes), str(pion.port)], env=environment()
        )
        for client in range(CLIENTS)
    ]
    if any(code != 0 for code in [child.wait() for child in children]):
        raise SystemExit("a storing client failed")


def fetch_all(pion: Process, prefixes: int) -> None:
    """Every prefix, one after the other."""
    buffers = SHAPE.buffers()
    with pion.connect() as connection:
        for client in range(CLIENTS):
            for number in range(prefixes):
                fetch(connection, f"c{client}.{number}", SHAPE, buffers)


def measure(options: argparse.Namespace, folder: Path) -> None:
    prefixes = max(1, round(options.gigabytes * 1e9 / SHAPE.total_bytes / CLIENTS))
    with pion_server(folder / "pion") as pion:
        with watched(pion.pid) as watch:
            watch.phase = "one 256 MB bulk"
            one_bulk(pion)
            watch.phase = "8 clients storing"
            store_all(pion, prefixes)
            watch.phase = "fetching"
            fetch_all(pion, prefixes)
        peaks = {name: round(kb * 1024 / MB, 1) for name, kb in watch.peaks_kb.items()}
    figures = {
        "stored_bytes": prefixes * CLIENTS * SHAPE.total_bytes,
        "sessions": prefixes * CLIENTS * len(SIDES),
        "peak_rss_anon_mb": {**peaks, **check(max(peaks.values()), MEMORY_BAR_MB, at_least=False)},
    }
    report("server_memory", options, figures)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.3)
    parser.add_argument("--client", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.client:
        client, prefixes, port = options.client
        store_some(Process([], port, Path(os.curdir), Path()), client, prefixes)
        return
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
