"""Equal rows stored once: what it costs prefixes that are not equal, and what it gains.

1. A prefix of rows that nobody else has, stored until all is acknowledged, by a server
   with ``--share-equal on`` and one with ``off``; and 1,000 short stores to one namespace.
   Seconds of the client, and processor time of the servers, what they do later included.
2. The same prefix stored by 2 and by 8 names: bytes on disk before and after, seconds from
   the last acknowledgement to the last byte given back (2 s of quiet included), processor
   time of the server meanwhile, and how long PINGs wait beside it.
3. The index: seconds that the event loop looks at a session, and bytes it remembers of it.
4. Leading rows: a layer restored from two runs instead of one, 16 tokens appended; the price
   of sharing the first part of a prefix whose rest differs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
import tracemalloc
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.server.store.records import Create, Record, Rows
from pion_vllm_mlx.server.store.sharing import Sharer
from pion_vllm_mlx.server.store.store import Store
from pion_vllm_mlx.wire.resp import Part

from .common import (
    MB,
    Process,
    alternate,
    arguments,
    check,
    fresh_folder,
    milliseconds,
    paired_ratio,
    pion_server,
    report,
)
from .latency_under_load import figures_of, ping_during
from .prefix import SIDES, Bytes, Shape, register, store

SHORT_STORES, SHORT_ROWS = 1000, 16
SESSIONS = 1000
PATIENCE_SECONDS = 120.0


# -- 1: what others pay --------------------------------------------------------


def long_store(connection: RespConnection, shape: Shape) -> Callable[[], float]:
    """Stores a prefix of new rows; its seconds."""
    seeds = count()

    def run() -> float:
        seed = next(seeds)
        layers = [shape.random_layer(seed)]
        started = time.perf_counter()
        register(connection, f"long{seed}", shape)
        store(connection, f"long{seed}", shape, layers)
        took = time.perf_counter() - started
        connection.command("KV.PREFIX.DROP", f"long{seed - 1}")
        return took

    return run


def short_stores(connection: RespConnection) -> Callable[[], float]:
    """Stores short runs, one command after the other, behind each other; their seconds."""
    seeds = count()
    shape = Shape(layers=1, tokens=SHORT_ROWS)

    def run() -> float:
        seed = next(seeds)
        rows = [shape.random_layer(10_000 * seed + n) for n in range(SHORT_STORES)]
        register(connection, f"short{seed}", shape)
        started = time.perf_counter()
        for number, blob in enumerate(rows):
            place: list[Part] = [f"short{seed}_pk", 0, number * SHORT_ROWS, SHORT_ROWS]
            words: list[Part] = ["V.STOREBATCH", *place, blob, "FMT", "STORED", "LAYOUT", "HND"]
            connection.command(*words)
        return time.perf_counter() - started

    return run


def cost(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figure 1: seconds with sharing over seconds without."""
    shape = Shape(tokens=options.tokens)
    figures: dict[str, Any] = {}
    with (
        pion_server(folder / "on", "--share-equal", "on") as on,
        pion_server(folder / "off", "--share-equal", "off") as off,
        on.connect(unix=True) as with_sharing,
        off.connect(unix=True) as without,
    ):
        sides = {"on": with_sharing, "off": without}
        for name, make in (
            ("long", lambda connection: long_store(connection, shape)),
            ("short", short_stores),
        ):
            runs = {side: make(connection) for side, connection in sides.items()}
            before = [processor_seconds(pion) for pion in (on, off)]
            seconds = alternate(runs, options.pairs, options.patience)
            busy = [processor_seconds(pion) for pion in (on, off)]
            used = [round(b - a, 2) for a, b in zip(before, busy, strict=True)]
            figures[f"{name}_stores"] = {
                **{f"{side}_ms": milliseconds(values) for side, values in seconds.items()},
                "on_over_off": paired_ratio(seconds["on"], seconds["off"]),
                "processor_seconds": dict(zip(("on", "off"), used, strict=True)),
            }
    return figures


# -- 2: what is gained ---------------------------------------------------------


def info(connection: RespConnection) -> dict[str, int]:
    reply: Any = connection.command("KV.PREFIX.INFO")
    pairs = (line.split(":") for line in bytes(reply).decode().split())
    return {name: int(value) for name, value in pairs}


def processor_seconds(pion: Process) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pion.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def settled(connection: RespConnection, at_most: int) -> float:
    """Seconds until no more than so many bytes are on disk."""
    started = time.perf_counter()
    while info(connection)["vstore_disk_bytes"] > at_most:
        if time.perf_counter() - started > PATIENCE_SECONDS:
            raise SystemExit(f"never shared: {info(connection)}")
        time.sleep(0.05)
    return time.perf_counter() - started


def gain(folder: Path, options: argparse.Namespace, names: int) -> dict[str, Any]:
    """Figure 2 for so many equal prefixes."""
    shape = Shape(tokens=options.tokens)
    layers: list[Bytes] = [shape.random_layer(number) for number in range(2)]
    took: list[float] = []
    with pion_server(folder, "--share-equal", "on") as pion, pion.connect(unix=True) as connection:
        for number in range(names):
            register(connection, f"n{number}", shape)
            store(connection, f"n{number}", shape, layers)
        before, busy = info(connection), processor_seconds(pion)
        limit = int(1.1 * shape.total_bytes)
        pings = ping_during(pion, lambda: took.append(settled(connection, limit)))
        after, busy = info(connection), processor_seconds(pion) - busy
    gained = before["vstore_disk_bytes"] - after["vstore_disk_bytes"]
    return {
        "stored_mb": round(before["vstore_bytes"] / MB, 1),
        "logical_mb_after": round(after["vstore_bytes"] / MB, 1),
        "disk_mb": [round(one["vstore_disk_bytes"] / MB, 1) for one in (before, after)],
        "gained_mb": round(gained / MB, 1),
        "seconds": round(took[0], 2),
        "processor_seconds": round(busy, 2),
        "ping_ms": figures_of(pings),
    }


# -- 3: the index --------------------------------------------------------------


def records(sessions: int, layers: int) -> list[Record]:
    """Sessions of one run a layer, whose rows are said to lie in a segment."""
    made: list[Record] = []
    for number in range(sessions):
        sid = b"n%d_pk" % number
        made.append(Create(sid, 512, "fp16", "fp16", 8))
        for layer in range(layers):
            crc = hash((number, layer)) & 0xFFFFFFFF
            place = (f"{number:024x}", 65536 + layer * (5 << 20))
            made.append(Rows(sid, layer, 0, 4096, True, 4160, crc, crc, *place))
    return made


def index(folder: Path, layers: int = 16) -> dict[str, Any]:
    """Figure 3. Nothing is equal, so no row is read."""

    async def look(store_: Store) -> tuple[float, int]:
        sharer = Sharer(store_)
        tracemalloc.start()
        started, held = 0.0, tracemalloc.get_traced_memory()[0]
        while store_.state.unshared:
            at = time.perf_counter()
            await sharer.step()
            started += time.perf_counter() - at
        held = tracemalloc.get_traced_memory()[0] - held
        tracemalloc.stop()
        return started, held

    folder.mkdir()
    made = Store(StoreConfig(folder, appendfsync="no"))
    for logged in made.vstore_wal.append(records(SESSIONS, layers)):
        made.state.apply(logged)
    sids = dict(made.state.unshared)
    _, held = asyncio.run(look(made))
    made.state.unshared.update(sids)
    started = time.perf_counter()

    async def again() -> None:
        sharer = Sharer(made)
        while made.state.unshared:
            await sharer.step()

    asyncio.run(again())
    seconds = time.perf_counter() - started
    return {
        "sessions": SESSIONS,
        "layers": layers,
        "us_a_session": round(seconds / SESSIONS * 1e6, 1),
        "bytes_a_session": round(held / SESSIONS),
    }


# -- 4: leading rows -----------------------------------------------------------


def leading(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figure 4: seconds from the file to all layers with 16 rows appended."""
    import mlx.core as mx

    shape, spare = Shape(tokens=options.tokens), 64
    heads, dim, half = shape.heads, shape.dim, shape.tokens // 2
    names = [f"{side}.{layer}" for side in SIDES for layer in range(shape.layers)]
    folder.mkdir()

    def rows(seed: int, tokens: int) -> mx.array:
        random = np.random.default_rng(seed)
        data = np.frombuffer(random.bytes(heads * tokens * dim * 2), np.uint16)
        return mx.array(data.reshape(heads, tokens, dim))

    one = {name: rows(n, shape.tokens + spare) for n, name in enumerate(names)}
    two = {f"{name}.0": array[:, :half] for name, array in one.items()}
    two |= {f"{name}.1": array[:, half:] for name, array in one.items()}
    paths = {1: str(folder / "one.safetensors"), 2: str(folder / "two.safetensors")}
    mx.save_safetensors(paths[1], one)
    mx.save_safetensors(paths[2], two)
    appended = mx.zeros((heads, 16, dim), mx.uint16)

    def restore(parts: int) -> None:
        loaded = mx.load(paths[parts])
        assert isinstance(loaded, dict)
        layers = [
            loaded[name]
            if parts == 1
            else mx.concatenate([loaded[f"{name}.0"], loaded[f"{name}.1"]], axis=1)
            for name in names
        ]
        for layer in layers:
            layer[:, shape.tokens : shape.tokens + 16] = appended
        mx.eval(layers)

    seconds = alternate(
        {"one": lambda: restore(1), "two": lambda: restore(2)}, options.pairs, options.patience
    )
    return {
        **{f"{name}_ms": milliseconds(values) for name, values in seconds.items()},
        "two_over_one": paired_ratio(seconds["two"], seconds["one"]),
    }


def measure(options: argparse.Namespace, folder: Path) -> None:
    figures = cost(folder, options)
    for kind in ("long", "short"):
        ratio = figures[f"{kind}_stores"]["on_over_off"]["median"]
        figures[f"{kind}_cost"] = check(ratio, 1.05, at_least=False)
    if options.cost_alone:
        print(figures)
        return
    for names in (2, 8):
        figures[f"{names}_equal"] = gain(folder / f"equal{names}", options, names)
    figures["index"] = index(folder / "index")
    figures["leading_rows"] = leading(folder / "leading", options)
    report("sharing", options, figures, "mlx")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--cost-alone", action="store_true", help="only figure 1, not kept")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
