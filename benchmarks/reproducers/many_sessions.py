"""A full table of sessions: who stores into it, who asks meanwhile, and what a save costs others.

For 256, 20,000 and 65,536 sessions: the table is filled with prefixes of one row a side in one
layer. Then prefixes are stored one by one, each of which makes another one leave, while another
client sends PINGs; then KV.PREFIX.SAVE runs while one client stores rows and another sends PINGs;
then the server is killed and started again.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.wire.encode import Simple

from .common import Process, arguments, check, fresh_folder, percentile, pion_server, report

SIZES = (256, 20_000, 65_536)
#: prefixes that one turn of the filling stores.
FILLED_AT_ONCE = 100
ROW = bytes(range(128))
#: what a client waits between two PINGs, or two stores beside a save.
PAUSE_SECONDS = 0.002
PING_BAR_MS = 20.0
#: a store into a full table over one into a table of 256 sessions.
STORE_BAR = 2.0
#: what a write may wait longer beside a save than with 256 sessions.
SAVE_BAR_MS = 100.0


def commands(name: str) -> list[tuple[Any, ...]]:
    """What stores a prefix of one row a side."""
    sides = [("V.STOREBATCH", f"{name}_p{side}", 0, 0, 1, ROW, "FMT", "F16") for side in "kv"]
    return [("KV.PREFIX.REGISTER", name, 64, "fp16"), *sides]


def store(connection: RespConnection, names: list[str]) -> None:
    """Store prefixes with one write to the socket. SystemExit when one is refused."""
    replies = connection.pipeline([words for name in names for words in commands(name)])
    if wrong := [reply for reply in replies if reply != Simple("OK")]:
        raise SystemExit(f"a store was answered {wrong[0]!r}")


@contextmanager
def repeated(pion: Process, work: Callable[[RespConnection, int], None]) -> Iterator[list[float]]:
    """Seconds of each call of ``work``, again and again by a client of its own."""
    seconds: list[float] = []
    over = threading.Event()

    def go_on() -> None:
        with pion.connect() as connection:
            while not over.is_set():
                started = time.perf_counter()
                work(connection, len(seconds))
                seconds.append(time.perf_counter() - started)
                time.sleep(PAUSE_SECONDS)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


def ping(connection: RespConnection, turn: int) -> None:
    connection.command("PING")


def add_row(connection: RespConnection, turn: int) -> None:
    """Another row of a prefix that is there."""
    connection.command("V.STOREBATCH", "saved_pk", 0, turn + 1, 1, ROW, "FMT", "F16")


def evicting(pion: Process, connection: RespConnection, stores: int) -> dict[str, float]:
    """Stores of which each makes a prefix leave."""
    seconds = []
    with repeated(pion, ping) as pings:
        for number in range(stores):
            started = time.perf_counter()
            store(connection, [f"new{number}"])
            seconds.append(time.perf_counter() - started)
    return {
        "store_ms_median": round(1e3 * percentile(seconds, 0.5), 2),
        "store_ms_p99": round(1e3 * percentile(seconds, 0.99), 2),
        "store_ms_max": round(1e3 * max(seconds), 2),
        "store_ms_mean": round(1e3 * sum(seconds) / len(seconds), 2),
        "ping_ms_max": round(1e3 * max(pings), 2),
    }


def saving(pion: Process, connection: RespConnection) -> dict[str, float]:
    """KV.PREFIX.SAVE beside a client that stores and one that asks."""
    store(connection, ["saved"])
    with repeated(pion, ping) as pings, repeated(pion, add_row) as writes:
        started = time.perf_counter()
        connection.command("KV.PREFIX.SAVE")
        took = time.perf_counter() - started
    return {
        "save_seconds": round(took, 2),
        "write_ms_max": round(1e3 * max(writes), 2),
        "writes_meanwhile": len(writes),
        "ping_ms_max": round(1e3 * max(pings), 2),
    }


def restarting(pion: Process) -> float:
    """Seconds from starting the killed server to its first HIT."""
    pion.stop(signal.SIGKILL)
    started = time.perf_counter()
    pion.start()
    with pion.connect() as connection:
        if connection.command("KV.PREFIX.LOOKUP", "saved") != Simple("HIT"):
            raise SystemExit("what was stored last is gone")
    return round(time.perf_counter() - started, 2)


def one_size(folder: Path, sessions: int, stores: int) -> dict[str, Any]:
    """All figures for a table of so many sessions."""
    with pion_server(folder, "--max-sessions", str(sessions)) as pion:
        with pion.connect() as connection:
            started = time.perf_counter()
            for begin in range(0, sessions // 2, FILLED_AT_ONCE):
                end = min(begin + FILLED_AT_ONCE, sessions // 2)
                store(connection, [f"n{number}" for number in range(begin, end)])
            filled = time.perf_counter() - started
            found: dict[str, Any] = {
                "fill_ms_a_prefix": round(1e3 * filled / (sessions // 2), 2),
                "evicting": evicting(pion, connection, stores),
                "saving": saving(pion, connection),
            }
        return {**found, "start_seconds": restarting(pion)}


def measure(options: argparse.Namespace, folder: Path) -> None:
    sizes = [one_size(folder / str(size), size, options.stores) for size in SIZES]
    few, many = sizes[0], sizes[-1]
    ratio = many["evicting"]["store_ms_mean"] / few["evicting"]["store_ms_mean"]
    longer = many["saving"]["write_ms_max"] - few["saving"]["write_ms_max"]
    figures = {
        "sessions": dict(zip(map(str, SIZES), sizes, strict=True)),
        "evicting_many_over_few": check(ratio, STORE_BAR, at_least=False),
        "ping_ms_beside_evictions": check(
            many["evicting"]["ping_ms_max"], PING_BAR_MS, at_least=False
        ),
        "write_waits_longer_ms": check(longer, SAVE_BAR_MS, at_least=False),
    }
    report("many_sessions", options, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stores", type=int, default=1000, help="stores into each full table")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
