"""Storing a prefix, acknowledged, against ``write(2)``; and what it costs on disk.

1. Every layer stored by pipelined V.STOREBATCH under ``--appendfsync everysec``, until all
   are acknowledged, against ``write(2)`` of the same sizes into new files in the same
   folder. Neither side waits for the disk; what was written goes away between two runs.
2. Bytes that the server hands to the file system, and bytes its files occupy after sealing,
   over bytes stored: for the same prefix, and for turns of 64 tokens, once the server has
   copied what it wants to in a quiet moment. What it answered over its sockets counts as no
   write. And stated: runs of 1 KiB, beside which records and headers are a quarter; 300 turns,
   where more than 256 short runs in a row have become one. The same for states, of a sid each,
   with four KV.PREFIX.SAVEs on the way.

``--disk-only`` leaves out 1.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from pion_vllm_mlx.cache.connection import RespConnection

from .common import (
    Process,
    alternate,
    arguments,
    check,
    fresh_folder,
    paired_ratio,
    pion_server,
    rates,
    report,
)
from .prefix import SIDES, Bytes, Shape, register, store

TURNS, TURN_TOKENS = 20, 64
#: so many turns are stored, too, with heads and values a head that make runs of 8 KiB
MANY_TURNS, MANY_TURNS_HEADS = (80, 250, 300), (1, 64)
#: more short runs in a row become one
MERGED_TURNS = 256
#: after so long without a copy the server has nothing more to copy: well above what it calls quiet
TIDY_SECONDS = 5.0
#: heads and values a head whose turns make runs of 64, 32, 8, 4, 2 and 1 KiB
TURN_HEADS = ((8, 64), (4, 64), (1, 64), (1, 32), (1, 16), (1, 8))
#: so many bytes of states of each of these sizes, saved so often
STATES_BYTES, STATE_SIZES, SAVES = 64 << 20, (256 << 10, 60 << 10, 16 << 10, 4 << 10), 4
LEAST_STATE_BYTES = 32 << 10  # a file of its own takes a block or two besides
#: beside shorter runs records and headers are more than the bar allows
LEAST_RUN_BYTES = 2 << 10


def write_files(folder: Path, shape: Shape, layers: Sequence[Bytes]) -> float:
    """Seconds that ``write(2)`` takes for one file a layer and side; they are removed."""
    names = [folder / f"w{number}" for number in range(2 * shape.layers)]
    started = time.perf_counter()
    for number, name in enumerate(names):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        view = layers[number % len(layers)].data
        while view:
            view = view[os.write(fd, view) :]
        os.close(fd)
    took = time.perf_counter() - started
    for name in names:
        name.unlink()
    return took


def timed_store(
    connection: RespConnection, names: Iterator[int], shape: Shape, layers: Sequence[Bytes]
) -> float:
    """Seconds from the first command to the last acknowledgement; the prefix is dropped."""
    namespace = f"r{next(names)}"
    started = time.perf_counter()
    register(connection, namespace, shape)
    store(connection, namespace, shape, layers)
    took = time.perf_counter() - started
    connection.command("KV.PREFIX.DROP", namespace)
    return took


def rate(
    pion: Process, folder: Path, shape: Shape, options: argparse.Namespace, unix: bool
) -> dict[str, Any]:
    """Figure 1 for one prefix over one kind of socket."""
    layers = [shape.random_layer(number) for number in range(2)]
    names = count()
    with pion.connect(unix=unix) as connection:
        seconds = alternate(
            {
                "write": lambda: write_files(folder, shape, layers),
                "pion": lambda: timed_store(connection, names, shape, layers),
            },
            options.pairs,
            options.patience,
        )
    ratio = paired_ratio(seconds["write"], seconds["pion"])
    return {
        "bytes": shape.total_bytes,
        **{f"{name}_gb_s": rates(shape.total_bytes, s) for name, s in seconds.items()},
        "throughput_ratio": ratio,
        **check(ratio["median"], 0.4, at_least=True),
    }


def written_bytes(pid: int) -> dict[str, int]:
    """What a process handed to write calls, and what it made the file system write."""
    lines = Path(f"/proc/{pid}/io").read_text().split("\n")
    fields = dict(line.split(": ") for line in lines if line)
    return {"wchar": int(fields["wchar"]), "write_bytes": int(fields["write_bytes"])}


def occupied_bytes(folder: Path) -> int:
    """Bytes that all files of a folder occupy; holes do not count."""
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def wait_until_tidied(connection: RespConnection) -> None:
    """Until what the server copies in quiet moments stands still."""
    copied, since = b"", time.monotonic()
    while time.monotonic() - since < TIDY_SECONDS:
        info: bytes = connection.command("KV.PREFIX.INFO")
        (found,) = (one for one in info.split() if one.startswith(b"vstore_copied_bytes:"))
        if found != copied:
            copied, since = found, time.monotonic()
        time.sleep(0.1)


def disk_cost(
    pion: Process, stored_bytes: int, before: dict[str, int], bar: bool = True
) -> dict[str, Any]:
    """Write calls, written bytes and occupied bytes over bytes stored, after sealing."""
    os.sync()
    after = written_bytes(pion.pid)
    ratios = {name: (after[name] - before[name]) / stored_bytes for name in after}
    ratios["occupied"] = occupied_bytes(pion.folder / "data") / stored_bytes
    return {
        "bytes": stored_bytes,
        **{name: round(value, 3) for name, value in ratios.items()},
        **(check(max(ratios.values()), 1.2, at_least=False) if bar else {}),
    }


def whole_prefix(folder: Path, shape: Shape) -> dict[str, Any]:
    """Figure 2 for a prefix stored at once."""
    with pion_server(folder) as pion, pion.connect() as connection:
        before = written_bytes(pion.pid)
        register(connection, "whole", shape)
        store(connection, "whole", shape, [shape.random_layer()])
        connection.command("KV.PREFIX.MAP", "whole")
        wait_until_tidied(connection)
        return disk_cost(pion, shape.total_bytes, before)


def conversation(folder: Path, shape: Shape, turns: int = TURNS) -> dict[str, Any]:
    """Figure 2 for turns of 64 tokens; every turn is acknowledged before the next."""
    rows = shape.random_layer()
    with pion_server(folder) as pion, pion.connect() as connection:
        before = written_bytes(pion.pid)
        register(connection, "turns", shape)
        for turn in range(turns):
            connection.pipeline(
                [
                    [
                        *("V.STOREBATCH", "turns" + side, layer, turn * shape.tokens),
                        *(shape.tokens, rows, "FMT", "STORED", "LAYOUT", "HND"),
                    ]
                    for side in SIDES
                    for layer in range(shape.layers)
                ]
            )
        answer: bytes = connection.command("KV.PREFIX.MAP", "turns")
        before["wchar"] += len(answer)
        wait_until_tidied(connection)
        bar = shape.layer_bytes >= LEAST_RUN_BYTES and turns <= MERGED_TURNS
        return {"turns": turns, **disk_cost(pion, turns * shape.total_bytes, before, bar)}


def states(folder: Path, state_bytes: int) -> dict[str, Any]:
    """Figure 2 for states; those that came before a save are in it."""
    number = STATES_BYTES // state_bytes
    with pion_server(folder, "--max-sessions", "65536") as pion, pion.connect() as connection:
        before = written_bytes(pion.pid)
        for at in range(number):
            words = ("SSM.PREFIX.STORE", f"state{at}", 0, os.urandom(state_bytes))
            connection.command(*words)
            if (at + 1) % (number // SAVES) == 0:
                connection.command("KV.PREFIX.SAVE")
        wait_until_tidied(connection)
        bar = state_bytes >= LEAST_STATE_BYTES
        return {"states": number, **disk_cost(pion, number * state_bytes, before, bar)}


def rate_figures(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figure 1."""
    figures = {}
    with pion_server(folder / "pion", "--appendfsync", "everysec") as pion:
        for tokens in options.tokens:
            shape = replace(Shape(), tokens=tokens)
            for unix in (False, True):
                key = f"N={tokens} {'unix' if unix else 'tcp'}"
                figures[key] = rate(pion, folder, shape, options, unix)
    return figures


def measure(options: argparse.Namespace, folder: Path) -> None:
    figures = {} if options.disk_only else rate_figures(options, folder)
    for tokens in options.tokens:
        shape = replace(Shape(), tokens=tokens)
        figures[f"disk N={tokens}"] = whole_prefix(folder / f"whole{tokens}", shape)
    cases = [(TURNS, heads) for heads in TURN_HEADS] + [
        (many, MANY_TURNS_HEADS) for many in MANY_TURNS
    ]
    for count_of, (heads, dim) in cases:
        turns = replace(Shape(), tokens=TURN_TOKENS, heads=heads, dim=dim)
        key = f"disk {count_of} turns of 64, {turns.layer_bytes >> 10} KiB a run"
        where = folder / f"turns{count_of}x{heads}x{dim}"
        figures[key] = conversation(where, turns, count_of)
    for size in STATE_SIZES:
        figures[f"disk states of {size >> 10} KiB"] = states(folder / f"states{size}", size)
    report("store_rate", options, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 4100])
    parser.add_argument("--disk-only", action="store_true", help="without figure 1")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
