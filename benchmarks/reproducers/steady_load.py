"""Stores that never pause: how long the logs get, how long a PING and a store wait.

One client stores without a pause: turns of conversations, one command after the other, whose
runs and states of 60 KB go to segments; and beside each turn some short prefixes, each in one
packet, whose rows, states and plain key ride in the logs. When there are as many sessions as
there may be, the oldest leave. The logs are small, so that the server has to save itself again
and again while the client goes on. PINGs go from a process of their own.

``longest_wal_by_size`` is the longest log of rows and of states; that of plain keys, which is
saved on its own, is told beside it. ``logged_by_size`` says how often each log was filled:
where that is not often, as on a slow machine, the rest says little.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.wire.resp import Part

from .common import MB, Process, arguments, check, fresh_folder, percentile, pion_server, report
from .latency_under_load import figures_of, ping_during
from .prefix import SIDES

CONVERSATIONS, LAYERS, TURN_TOKENS, WIDTH = 100, 16, 7, 256
STATE_BYTES = 60_000
#: beside each turn; each has one run a side, as long as a turn's, and a state of either kind.
SHORT_PREFIXES, SHORT_STATE_BYTES, VALUE_BYTES = 8, 3_800, 3_800
MAX_SESSIONS, KEYS = 2_048, 1_000
COMPLETION_LAYER = 65_535
SAMPLE_EVERY = 20
#: so often each log has to be filled.
FILLED = 8.0
#: as INFO names their lengths.
LOGS = {"rows": "wal_bytes", "states": "ssm_wal_bytes", "keys": "keyspace_wal_bytes"}


@dataclass
class Log:
    """What samples say of one log."""

    longest: int = 0
    logged: int = 0
    saves: int = 0
    _before: int = 0

    def sample(self, size: int) -> None:
        self.saves += size < self._before
        self.logged += max(0, size - self._before)
        self.longest = max(self.longest, size)
        self._before = size


@dataclass(frozen=True)
class Packet:
    """Commands that are sent at once, and the bytes of what they store."""

    commands: list[list[Part]]
    stored: dict[str, int] = field(default_factory=dict)


@dataclass
class Load:
    """A client that stores for some seconds, and what it saw."""

    connection: RespConnection
    watcher: RespConnection
    seconds: float
    store_seconds: list[float] = field(default_factory=list)
    stored: Counter[str] = field(default_factory=Counter)
    logs: dict[str, Log] = field(default_factory=lambda: {name: Log() for name in LOGS})

    def __post_init__(self) -> None:
        noise = np.random.default_rng(1)
        self._rows = noise.bytes(TURN_TOKENS * WIDTH * 2)
        self._state, self._value = noise.bytes(STATE_BYTES), noise.bytes(VALUE_BYTES)

    def run(self) -> None:
        ends_at = time.monotonic() + self.seconds
        for number, packet in enumerate(self._packets()):
            started = time.perf_counter()
            replies = self.connection.pipeline(packet.commands)
            if len(replies) == 1:
                self.store_seconds.append(time.perf_counter() - started)
            for reply in replies:
                if isinstance(reply, CommandError):
                    raise reply
            self.stored.update(packet.stored)
            if number % SAMPLE_EVERY == 0:
                self._sample()
            if time.monotonic() > ends_at:
                return

    def _sample(self) -> None:
        reply: Any = self.watcher.command("INFO", "persistence")
        info = dict(line.partition(":")[::2] for line in bytes(reply).decode().split())
        for name, log in self.logs.items():
            log.sample(int(info[LOGS[name]]))

    def _packets(self) -> Iterator[Packet]:
        for number in range(CONVERSATIONS):
            yield Packet([["KV.PREFIX.REGISTER", f"c{number}", WIDTH, "fp16"]])
        shorts = count()
        for start in count(0, TURN_TOKENS):
            for number in range(CONVERSATIONS):
                yield from self._turn(f"c{number}", start)
                for short in islice(shorts, SHORT_PREFIXES):
                    yield self._short(f"s{short}", f"k{short % KEYS}")

    def _run(self, sid: str, layer: int, start: int) -> list[Part]:
        return ["V.STOREBATCH", sid, layer, start, TURN_TOKENS, self._rows, "FMT", "F16"]

    def _turn(self, name: str, start: int) -> Iterator[Packet]:
        for side in SIDES:
            for layer in range(LAYERS):
                yield Packet([self._run(name + side, layer, start)], {"rows": len(self._rows)})
        words: list[Part] = ["SSM.PREFIX.STORE", name, COMPLETION_LAYER, self._state]
        yield Packet([words], {"states": STATE_BYTES})

    def _short(self, name: str, key: str) -> Packet:
        state = self._state[:SHORT_STATE_BYTES]
        commands: list[list[Part]] = [
            ["KV.PREFIX.REGISTER", name, WIDTH, "fp16"],
            *(self._run(name + side, 0, 0) for side in SIDES),
            ["SSM.PREFIX.STORE", f"{name}@4", 0, state],
            ["SSM.PREFIX.STORE", name, COMPLETION_LAYER, state],
            ["SET", key, self._value],
        ]
        stored = {"rows": 2 * len(self._rows), "states": 2 * len(state), "keys": VALUE_BYTES}
        return Packet(commands, stored)


def written_bytes(pion: Process) -> int:
    """Bytes that the server has written to files, and answered, so far."""
    fields = Path(f"/proc/{pion.pid}/io").read_text().split()
    return int(fields[fields.index("wchar:") + 1])


def measure(options: argparse.Namespace, folder: Path) -> None:
    flags = ("--wal-size", str(options.wal_size), "--max-sessions", str(MAX_SESSIONS))
    with pion_server(folder / "pion", *flags) as pion:
        with pion.connect() as connection, pion.connect() as watcher:
            load = Load(connection, watcher, options.seconds)
            pings = ping_during(pion, load.run)
            written = written_bytes(pion)
    size = options.wal_size << 20
    ms = {f"p{s}": percentile(load.store_seconds, s / 100) * 1e3 for s in (50, 99, 99.9)}
    logs = load.logs
    figures: dict[str, Any] = {
        "seconds": options.seconds,
        "stores_of_turns": len(load.store_seconds),
        "stored_mb": {kind: round(load.stored[kind] / MB, 1) for kind in LOGS},
        "written_by_stored": round(written / load.stored.total(), 2),
        "logged_by_size": {name: round(log.logged / size, 1) for name, log in logs.items()},
        "both_filled": check(
            min(logs["rows"].logged, logs["states"].logged) / size, FILLED, at_least=True
        ),
        "saves_seen": {name: log.saves for name, log in logs.items()},
        "ping_ms": figures_of(pings),
        "store_ms": {
            **{name: round(value, 2) for name, value in ms.items()},
            "max": round(max(load.store_seconds) * 1e3, 2),
        },
        "longest_by_size": {name: round(log.longest / size, 2) for name, log in logs.items()},
        "longest_wal_by_size": check(
            max(logs["rows"].longest, logs["states"].longest) / size, 4.0, at_least=False
        ),
    }
    report("steady_load", options, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the client stores")
    parser.add_argument("--wal-size", type=int, default=2, help="of the server, in MB")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
