"""Stores that never pause: how long the log gets, how long a PING and a store wait.

One client stores turns of conversations, one command after the other, without a pause:
short runs, and states of 60 KB, which ride in the log. The log is small, so that the server
has to save itself again and again while the client goes on. PINGs go from a process of their
own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.wire.resp import Part

from .common import MB, Process, arguments, check, fresh_folder, percentile, pion_server, report
from .latency_under_load import figures_of, ping_during

CONVERSATIONS, LAYERS, TURN_TOKENS, WIDTH = 100, 16, 7, 256
STATE_BYTES = 60_000
SAMPLE_EVERY = 200


@dataclass
class Load:
    """A client that stores for some seconds, and what it saw."""

    connection: RespConnection
    watcher: RespConnection
    seconds: float
    store_seconds: list[float] = field(default_factory=list)
    wal_bytes: list[int] = field(default_factory=list)
    saves: int = 0

    def info(self) -> dict[str, int]:
        reply: Any = self.watcher.command("KV.PREFIX.INFO")
        pairs = (line.split(":") for line in bytes(reply).decode().split())
        return {name: int(value) for name, value in pairs}

    def run(self) -> None:
        commands = self._commands()
        ends_at = time.monotonic() + self.seconds
        before = 0
        while time.monotonic() < ends_at:
            words = next(commands)
            started = time.perf_counter()
            self.connection.command(*words)
            self.store_seconds.append(time.perf_counter() - started)
            if len(self.store_seconds) % SAMPLE_EVERY == 0:
                size = self.info()["wal_bytes"]
                self.saves += size < before
                self.wal_bytes.append(size)
                before = size

    def _commands(self) -> Iterator[list[Part]]:
        blob = np.random.default_rng(1).bytes(TURN_TOKENS * WIDTH * 2)
        state = np.random.default_rng(2).bytes(STATE_BYTES)
        for number in range(CONVERSATIONS):
            yield ["KV.PREFIX.REGISTER", f"c{number}", WIDTH, "fp16"]
        turn = 0
        while True:
            for number in range(CONVERSATIONS):
                for sid in (f"c{number}_pk", f"c{number}_pv"):
                    for layer in range(LAYERS):
                        place = [sid, layer, turn * TURN_TOKENS, TURN_TOKENS]
                        yield ["V.STOREBATCH", *place, blob, "FMT", "F16"]
                yield ["SSM.PREFIX.STORE", f"c{number}", 65535, state]
            turn += 1


def written_bytes(pion: Process) -> int:
    """Bytes that the server has written to files so far."""
    fields = Path(f"/proc/{pion.pid}/io").read_text().split()
    return int(fields[fields.index("wchar:") + 1])


def measure(options: argparse.Namespace, folder: Path) -> None:
    flags = ("--wal-size", str(options.wal_size))
    with pion_server(folder / "pion", *flags) as pion:
        with pion.connect() as connection, pion.connect() as watcher:
            load = Load(connection, watcher, options.seconds)
            pings = ping_during(pion, load.run)
            stored = load.info()["vstore_bytes"]
            written = written_bytes(pion)
    ms = {f"p{s}": percentile(load.store_seconds, s / 100) * 1e3 for s in (50, 99, 99.9)}
    figures: dict[str, Any] = {
        "seconds": options.seconds,
        "stores": len(load.store_seconds),
        "stored_mb": round(stored / MB, 1),
        "written_by_stored": round(written / stored, 2),
        "saves_seen": load.saves,
        "ping_ms": figures_of(pings),
        "store_ms": {
            **{name: round(value, 2) for name, value in ms.items()},
            "max": round(max(load.store_seconds) * 1e3, 2),
        },
        "longest_wal_by_size": check(
            max(load.wal_bytes) / (options.wal_size << 20), 4.0, at_least=False
        ),
    }
    report("steady_load", options, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the client stores")
    parser.add_argument("--wal-size", type=int, default=8, help="of the server, in MB")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
