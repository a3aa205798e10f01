"""Start with much stored: 16 GB of sealed prefixes, or 65,536 small sessions, to the first hit.

The 16 GB are stored by the ordinary commands, as rows of zeros, but for a few bytes that
make every layer another; KV.PREFIX.MAP seals each prefix. Then ``fallocate --dig-holes``
gives back the blocks that hold only zeros: no byte of the files changes and every checksum
still holds, they only occupy little disk. Nothing that a start reads depends on it, a start
reads no rows; ``first_fetch`` then reads and verifies one prefix, from holes. The server is
killed before every start, twice over: with the log to replay, and after KV.PREFIX.SAVE.

The small sessions hold one run of 16 rows each, which rides in the log until it is saved.
``info_ms`` is what KV.PREFIX.INFO takes, the first time after the start and later.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.wire.encode import Simple
from pion_vllm_mlx.wire.resp import Part

from .common import Process, arguments, check, fresh_folder, pion_server, report, spread
from .prefix import SIDES, Bytes, fetch, register
from .server_memory import SHAPE

BAR_SECONDS = 1.0
SMALL_ROWS, SMALL_WIDTH = 16, 64
PIPELINE = 500
INFOS = 20
MARK_BYTES = 16


def ask(connection: RespConnection, commands: list[list[Part]]) -> None:
    """Send commands together. Raises CommandError for the first refusal."""
    for reply in connection.pipeline(commands):
        if isinstance(reply, CommandError):
            raise reply


def occupied(folder: Path) -> tuple[int, int]:
    """Bytes of all segment files: as long as they are, and as they occupy the disk."""
    found = [path.stat() for path in folder.glob("pion.segments.*/*")]
    return sum(one.st_size for one in found), sum(one.st_blocks * 512 for one in found)


def dig_holes(folder: Path) -> None:
    """Give back the blocks of sealed files that hold only zeros, where the system can."""
    if shutil.which("fallocate"):
        for path in folder.glob("pion.segments.*/*"):
            if path.stat().st_blocks * 512 > path.stat().st_size // 2:
                subprocess.run(["fallocate", "--dig-holes", str(path)], check=True)


def store_sparse(pion: Process, prefixes: int) -> None:
    """So many prefixes of 256 MiB each, sealed one by one."""
    layers = [np.zeros(SHAPE.layer_bytes, np.uint8) for _ in range(SHAPE.layers)]
    with pion.connect() as connection:
        for number in range(prefixes):
            register(connection, f"p{number}", SHAPE)
            for side in SIDES:
                for index, layer in enumerate(layers):
                    layer[:MARK_BYTES] = mark(number, side, index)
                ask(connection, [*store_commands(f"p{number}{side}", layers)])
            connection.command("KV.PREFIX.MAP", f"p{number}")
            dig_holes(pion.folder / "data")


def mark(number: int, side: str, index: int) -> Bytes:
    """The first bytes of a layer."""
    text = f"{number}{side}{index}".encode().ljust(MARK_BYTES)
    return np.frombuffer(text, np.uint8)


def store_commands(sid: str, layers: list[Bytes]) -> Iterator[list[Part]]:
    """What stores one side."""
    for index, layer in enumerate(layers):
        place: list[Part] = ["V.STOREBATCH", sid, index, 0, SHAPE.tokens, layer]
        yield [*place, "FMT", "STORED", "LAYOUT", "HND"]


def store_small(pion: Process, sessions: int) -> None:
    """So many sessions, two a namespace, one run of rows in each."""
    blob = np.random.default_rng(1).bytes(SMALL_ROWS * SMALL_WIDTH * 2)

    def commands() -> Iterator[list[Part]]:
        for number in range(sessions // 2):
            yield ["KV.PREFIX.REGISTER", f"p{number}", SMALL_WIDTH, "fp16"]
            for side in ("_pk", "_pv"):
                place: list[Part] = [f"p{number}{side}", 0, 0, SMALL_ROWS]
                yield ["V.STOREBATCH", *place, blob, "FMT", "F16"]

    waiting: list[list[Part]] = []
    with pion.connect() as connection:
        for words in commands():
            waiting.append(words)
            if len(waiting) == PIPELINE:
                ask(connection, waiting)
                waiting = []
        ask(connection, waiting)


def to_first_hit(pion: Process) -> float:
    """Seconds from starting the killed server to its first ``+HIT``."""
    pion.stop(signal.SIGKILL)
    started = time.perf_counter()
    pion.start()
    with pion.connect() as connection:
        reply = connection.command("KV.PREFIX.LOOKUP", "p0")
        took = time.perf_counter() - started
    if reply != Simple("HIT"):
        raise SystemExit(f"the restarted server answered {reply!r}")
    return took


def first_fetch(pion: Process) -> dict[str, float]:
    """Seconds of the first fetch of a prefix since the start: it is verified then."""
    buffers = SHAPE.buffers()
    with pion.connect() as connection:
        started = time.perf_counter()
        fetch(connection, "p0", SHAPE, buffers)
        took = time.perf_counter() - started
    side = SIDES[-1]  # fetched last
    for index, rows in enumerate(buffers):
        if rows[MARK_BYTES:].any() or (rows[:MARK_BYTES] != mark(0, side, index)).any():
            raise SystemExit("the rows are not the stored ones")
    return {"first_fetch_seconds": round(took, 3)}


def info(pion: Process) -> dict[str, Any]:
    """What KV.PREFIX.INFO costs, and the sessions it counts."""
    times = []
    with pion.connect() as connection:
        for _ in range(INFOS):
            started = time.perf_counter()
            reply: Any = connection.command("KV.PREFIX.INFO")
            times.append((time.perf_counter() - started) * 1e3)
    fields = dict(line.split(":") for line in bytes(reply).decode().split())
    return {
        "sessions": int(fields["vstore_sessions"]),
        "info_ms": {"first": round(times[0], 2), "later": spread(times[1:])},
    }


def starts(
    pion: Process, count: int, bar: float | None, look: Callable[[Process], dict[str, Any]]
) -> dict[str, Any]:
    """Kill and start: with a log to replay, then after a SAVE."""
    found: dict[str, Any] = {}
    for kind in ("log replayed", "after SAVE"):
        seconds = spread([to_first_hit(pion) for _ in range(count)], 3)
        held = {} if bar is None else check(seconds["median"], bar, at_least=False)
        found[kind] = {"seconds": seconds, **held, **look(pion)}
        if kind == "log replayed":
            started = time.perf_counter()
            with pion.connect() as connection:
                connection.command("KV.PREFIX.SAVE")
            found["save_seconds"] = round(time.perf_counter() - started, 2)
    return found


def measure(options: argparse.Namespace, folder: Path) -> None:
    figures: dict[str, Any] = {}
    prefixes = round(options.gigabytes * 1e9 / SHAPE.total_bytes)
    if prefixes:
        with pion_server(folder / "sparse") as pion:
            store_sparse(pion, prefixes)
            length, blocks = occupied(pion.folder / "data")
            found = starts(pion, options.pairs, BAR_SECONDS, first_fetch)
        sizes = {"file_bytes": length, "disk_bytes": blocks, "prefixes": prefixes}
        figures["sparse"] = {**sizes, **found}
    if options.sessions:
        flags = ("--max-sessions", str(options.sessions), "--wal-size", "1024")
        with pion_server(folder / "small", *flags) as pion:
            store_small(pion, options.sessions)
            figures["small"] = starts(pion, min(3, options.pairs), None, info)
    report("start_sparse", options, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=16.2)
    parser.add_argument("--sessions", type=int, default=65_536)
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
