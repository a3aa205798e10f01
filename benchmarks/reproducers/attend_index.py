"""ATTEND.QUERY over 128,000 keys of 128: recall and latency, on both lanes.

The index is exact, so recall against a full search in float64 has to be 1. Latency is
from sending the query to the last byte of 128 value rows, beside what the arithmetic
alone takes: one float32 product of all keys with the query in this process.
"""

from __future__ import annotations

import argparse
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.wire.frames import HEADER_BYTES, Status, frame

from .common import (
    Process,
    alternate,
    arguments,
    check,
    fresh_folder,
    milliseconds,
    percentile,
    pion_server,
    report,
)

SID, LAYER, K = "index", 0, 128
BATCH = 500
PROBES = 200
QUERIES = 20

Floats = NDArray[np.float32]


def store(connection: RespConnection, keys: Floats, values: Floats) -> float:
    """Everything in batches; the seconds it took."""
    width, out = keys.shape[1], values.shape[1]
    connection.command("ATTEND.CREATE", SID, width, out, "VQUANT", "fp32")
    started = time.perf_counter()
    for at in range(0, len(keys), BATCH):
        part = slice(at, at + BATCH)
        blobs = keys[part].tobytes(), values[part].tobytes()
        connection.command("ATTEND.STORE", SID, LAYER, len(keys[part]), *blobs)
    connection.command("ATTEND.FINALIZE", SID, LAYER)
    return time.perf_counter() - started


def query(connection: RespConnection, one: Floats, k: int) -> Floats:
    """The value rows ``[k, D]``; the first column says which they are."""
    reply = connection.command("ATTEND.QUERY", SID, LAYER, k, one.tobytes())
    if not isinstance(reply, (bytes, memoryview)):
        raise SystemExit(f"ATTEND.QUERY answered {reply!r}")
    return np.frombuffer(reply, "<f4")


def exact(keys: Floats, one: Floats) -> NDArray[np.int64]:
    """The nearest rows by float64."""
    parts = [
        np.square(keys[at : at + 8000] - one.astype("f8")).sum(1)
        for at in range(0, len(keys), 8000)
    ]
    return np.argsort(np.concatenate(parts), kind="stable")[:K]


def recall(connection: RespConnection, keys: Floats, width: int) -> dict[str, Any]:
    """Stored keys find their own row; other queries find what a full search finds."""
    rng = np.random.default_rng(2)
    probes = [int(n) for n in rng.choice(len(keys), PROBES, replace=False)]
    own = sum(int(query(connection, keys[n], 1)[0]) == n for n in probes)
    same = 0
    for one in rng.standard_normal((QUERIES, keys.shape[1])).astype("<f4"):
        found = query(connection, one, K).reshape(K, width)[:, 0].astype(np.int64)
        same += len(np.intersect1d(found, exact(keys, one)))
    return {
        "own_row": check(own / PROBES, 1.0, at_least=True),
        f"recall_at_{K}": check(same / QUERIES / K, 1.0, at_least=True),
    }


def binary_query(port: int) -> tuple[socket.socket, Callable[[Floats], None]]:
    """A connection to the binary lane, and one query over it."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    incoming = sock.makefile("rb")
    fields = struct.pack("<H", len(SID)) + SID.encode() + struct.pack("<HH", LAYER, K)

    def ask(one: Floats) -> None:
        sock.sendall(frame(0x23, fields + one.tobytes()))
        _, status, length = struct.unpack("<HBI", incoming.read(HEADER_BYTES))
        if status != Status.OK or len(incoming.read(length)) != length:
            raise SystemExit("the binary lane refused a query")

    return sock, ask


def latency(
    pion: Process, connection: RespConnection, keys: Floats, options: argparse.Namespace
) -> dict[str, Any]:
    """Both lanes and the bare product, in turn."""
    rounds = max(options.pairs, options.rounds)
    queries = iter(np.random.default_rng(3).standard_normal((rounds + 1, keys.shape[1])))
    current = [np.zeros(keys.shape[1], "<f4")]

    def product() -> None:
        current[0] = next(queries).astype("<f4")
        keys @ current[0]

    sock, ask = binary_query(pion.port + 1)
    with sock:
        sides: dict[str, Callable[[], Any]] = {
            "product_only": product,
            "resp": lambda: len(query(connection, current[0], K)),
            "binary": lambda: ask(current[0]),
        }
        seconds = alternate(sides, rounds, options.patience)
    figures: dict[str, Any] = {f"{name}_ms": milliseconds(s) for name, s in seconds.items()}
    for name in ("resp", "binary"):
        figures[f"{name}_p99_ms"] = round(1e3 * percentile(seconds[name], 0.99), 2)
    return figures


def measure(options: argparse.Namespace, folder: Path) -> None:
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((options.keys, options.width)).astype("<f4")
    values = np.empty((options.keys, options.width), "<f4")
    # whole numbers below 2^24 are exact: a row says which one it is
    values[:] = np.arange(options.keys, dtype="<f4")[:, None]
    with pion_server(folder / "pion") as pion, pion.connect() as connection:
        seconds = store(connection, keys, values)
        figures = {
            "keys": options.keys,
            "width": options.width,
            "k": K,
            "store_rows_per_second": round(options.keys / seconds),
            **recall(connection, keys, options.width),
            **latency(pion, connection, keys, options),
        }
    report("attend_index", options, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--keys", type=int, default=128_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=100, help="queries timed on each side")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
