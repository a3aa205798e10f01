"""Attention at the server, end to end over its lanes, against what the arithmetic takes.

Three bars. A fused query (8 heads of 128, 2,048 prefix tokens and one of a suffix) over the
binary lane against the same sums in bare numpy in this process, K/V at hand. A batch of 16
queries against 16 single ones. And at 65,536 tokens a sparse query (8 of 1,024 blocks)
against a dense one, both over RESP. Beside them, stated: RESP for the fused query, a suffix
of 16 (131 KB more cross the wire each time), 16 clients at once, and K/V kept in halves and
in 4 bits (``--types``).

Every answer is checked against numpy before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
    paired_ratio,
    pion_server,
    report,
)

HEADS, DIM = 8, 128
TOKENS, SUFFIXES = 2048, (1, 16)
BATCH, CLIENTS = 16, 16
LONG, BLOCK, TOP = 65_536, 64, 8
FUSED = 0x24
#: passes of each side in one turn: one alone is too short to be timed among others.
TIMES, FEW = 20, 3

Floats = NDArray[np.float32]


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, "f4")


@dataclass(frozen=True)
class Layer:
    """K and V ``[H, N, D]`` under a session."""

    sid: str
    keys: Floats
    values: Floats

    def store(self, connection: RespConnection) -> None:
        shape = self.keys.shape
        blobs = self.keys.tobytes(), self.values.tobytes()
        connection.command("ATTEND.PREFIX.STORE", self.sid, 0, *shape, *blobs)


def attended(q: Floats, parts: list[tuple[Floats, Floats]]) -> Floats:
    """One softmax of one query ``[H, D]`` over all parts: the bare computation."""
    scale = np.float32(DIM**-0.5)
    scores = [np.matmul(keys, q[:, :, None])[..., 0] * scale for keys, _ in parts]
    top = np.max([one.max(axis=1) for one in scores], axis=0)[:, None]
    weights = [np.exp(one - top) for one in scores]
    total = np.sum([one.sum(axis=1) for one in weights], axis=0)[:, None]
    sums = [np.matmul(w[:, None, :], v)[:, 0] for w, (_, v) in zip(weights, parts, strict=True)]
    out: Floats = np.sum(sums, axis=0) / total
    return out


def fused_frame(sid: str, q: Floats, keys: Floats, values: Floats) -> bytes:
    """A request of the binary lane; Q ``[H, M, D]``."""
    heads, rows, dim = q.shape
    name = sid.encode()
    fields = struct.pack("<HHHH", 0, heads, dim, heads) + struct.pack("<II", rows, keys.shape[1])
    blobs = q.tobytes() + keys.tobytes() + values.tobytes() + bytes(range(heads))
    return frame(FUSED, struct.pack("<H", len(name)) + name + fields + blobs)


@dataclass
class Lane:
    """A connection to the binary lane."""

    sock: socket.socket

    def ask(self, request: bytes) -> Floats:
        self.sock.sendall(request)
        head = self._read(HEADER_BYTES)
        _, status, length = struct.unpack("<HBI", head)
        body = self._read(length)
        if status != Status.OK:
            raise SystemExit(f"the binary lane refused: {bytes(body)!r}")
        return np.frombuffer(body, "<f4")

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self.sock.recv_into(view)
            if not count:
                raise SystemExit("the server closed the connection")
            view = view[count:]
        return data


@contextmanager
def lane(port: int) -> Iterator[Lane]:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Lane(sock)


def resp(connection: RespConnection, name: str, *words: Any) -> Floats:
    reply = connection.command(f"ATTEND.PREFIX.{name}", *words)
    if not isinstance(reply, (bytes, bytearray, memoryview)):
        raise SystemExit(f"{name} answered {reply!r}")
    return np.frombuffer(reply, "<f4")


def must_equal(what: str, found: Floats, wanted: Floats) -> None:
    error = float(np.abs(found.reshape(wanted.shape) - wanted).max())
    if not error < 1e-4:
        raise SystemExit(f"{what}: off by {error}")


def repeated(work: Callable[[], Any], times: int = TIMES) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            work()

    return run


def per_call(seconds: list[float], times: int = TIMES) -> dict[str, float]:
    return milliseconds([value / times for value in seconds])


def fused(pion: Process, options: argparse.Namespace) -> dict[str, Any]:
    """A fused query with either suffix; then a batch, then many clients."""
    layer = Layer("fused", normal(1, HEADS, TOKENS, DIM), normal(2, HEADS, TOKENS, DIM))
    q = normal(5, HEADS, 1, DIM)
    figures: dict[str, Any] = {}
    with pion.connect() as connection, lane(pion.port + 1) as binary:
        layer.store(connection)
        for tokens in SUFFIXES:
            suffix = normal(3, HEADS, tokens, DIM), normal(4, HEADS, tokens, DIM)
            request = fused_frame(layer.sid, q, *suffix)
            figures[f"fused_suffix_{tokens}"] = against_numpy(
                layer, (q, *suffix), (connection, binary), options
            )
        bar = check(figures["fused_suffix_1"]["binary_over_numpy"]["median"], 1.5, at_least=False)
        return {
            "fused_over_numpy": bar,
            **figures,
            "batch": batched(layer, connection, binary, options),
            "clients": at_once(pion, request, options),
        }


def against_numpy(
    layer: Layer,
    query: tuple[Floats, Floats, Floats],
    lanes: tuple[RespConnection, Lane],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One fused query in numpy, over the binary lane, over RESP."""
    q, keys, values = query
    connection, binary = lanes
    request = fused_frame(layer.sid, q, keys, values)
    words = (layer.sid, 0, HEADS, DIM, keys.shape[1], HEADS)
    blobs = (q.tobytes(), keys.tobytes(), values.tobytes(), b"")
    parts = [(layer.keys, layer.values), (keys, values)]
    sides: dict[str, Callable[[], Any]] = {
        "numpy": lambda: attended(q[:, 0], parts),
        "binary": lambda: binary.ask(request),
        "resp": lambda: resp(connection, "QUERY_FUSED", *words, *blobs),
    }
    for name, side in sides.items():
        must_equal(name, side(), attended(q[:, 0], parts))
    seconds = alternate(
        {name: repeated(side) for name, side in sides.items()}, options.pairs, options.patience
    )
    return {
        "binary_over_numpy": paired_ratio(seconds["binary"], seconds["numpy"]),
        "resp_over_numpy": paired_ratio(seconds["resp"], seconds["numpy"]),
        **{f"{name}_ms": per_call(values) for name, values in seconds.items()},
    }


def batched(
    layer: Layer, connection: RespConnection, binary: Lane, options: argparse.Namespace
) -> dict[str, Any]:
    """16 queries in one request against 16 requests, on each lane; as many requests in a row."""
    q = normal(6, HEADS, BATCH, DIM)
    empty = normal(0, HEADS, 0, DIM)
    singles = [np.ascontiguousarray(q[:, m : m + 1]) for m in range(BATCH)]
    whole = fused_frame(layer.sid, q, empty, empty)
    frames = [fused_frame(layer.sid, one, empty, empty) for one in singles]
    words = (layer.sid, 0, HEADS, DIM, TOKENS)
    blobs = [one.tobytes() for one in singles]
    for m, one in enumerate(frames):
        must_equal("single", binary.ask(one), attended(q[:, m], [(layer.keys, layer.values)]))
        at_once = binary.ask(whole).reshape(q.shape)[:, m]
        must_equal("batch", at_once, attended(q[:, m], [(layer.keys, layer.values)]))
    sides: dict[str, Callable[[], Any]] = {
        "binary_batch": lambda: binary.ask(whole),
        "binary_singles": lambda: [binary.ask(one) for one in frames],
        "resp_batch": lambda: resp(connection, "QUERY", *words, q.tobytes()),
        "resp_singles": lambda: [resp(connection, "QUERY", *words, blob) for blob in blobs],
    }
    # a connection settles into a run of requests, whatever each of them holds
    times = {name: FEW * BATCH if name.endswith("batch") else FEW for name in sides}
    several = {name: repeated(side, times[name]) for name, side in sides.items()}
    took = alternate(several, options.pairs, options.patience)
    seconds = {name: [x / times[name] for x in values] for name, values in took.items()}
    gain = paired_ratio(seconds["binary_singles"], seconds["binary_batch"])
    return {
        "binary": {**gain, **check(gain["median"], 4.0, at_least=True)},
        "resp": paired_ratio(seconds["resp_singles"], seconds["resp_batch"]),
        **{f"{name}_ms": milliseconds(values) for name, values in seconds.items()},
    }


def at_once(pion: Process, request: bytes, options: argparse.Namespace) -> dict[str, Any]:
    """The same query from one client, and from 16 at once: how many are answered a second."""
    with ExitStack() as stack:
        lanes = [stack.enter_context(lane(pion.port + 1)) for _ in range(CLIENTS)]

        def everyone() -> None:
            threads = [
                threading.Thread(target=repeated(lambda one=one: one.ask(request))) for one in lanes
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        sides = {"one": repeated(lambda: lanes[0].ask(request)), "all": everyone}
        seconds = alternate(sides, options.pairs, options.patience)
    each = [CLIENTS * value for value in seconds["one"]]
    return {
        "count": CLIENTS,
        "times_the_rate_of_one": paired_ratio(each, seconds["all"]),
        "queries_per_second": round(CLIENTS * TIMES / float(np.median(seconds["all"]))),
    }


def sparse(pion: Process, options: argparse.Namespace) -> dict[str, Any]:
    """8 of 1,024 blocks against all 65,536 tokens."""
    layer = Layer("long", normal(7, HEADS, LONG, DIM), normal(8, HEADS, LONG, DIM))
    q = normal(9, HEADS, 1, DIM)
    with pion.connect() as connection:
        layer.store(connection)
        auto = (layer.sid, 0, HEADS, DIM, BLOCK, TOP, HEADS, q.tobytes(), b"", -1)
        tokens = TOP * BLOCK
        indices = np.tile(np.arange(0, LONG, LONG // tokens, dtype="<i4")[:tokens], (HEADS, 1))
        counts = np.full(HEADS, tokens, "<u4")
        given = (layer.sid, 0, HEADS, DIM, tokens, q.tobytes(), indices.tobytes(), counts.tobytes())
        dense = (layer.sid, 0, HEADS, DIM, LONG, q.tobytes())
        sides: dict[str, Callable[[], Any]] = {
            "dense": lambda: resp(connection, "QUERY", *dense),
            "mean": lambda: resp(connection, "QUERY_SPARSE_AUTO", *auto, 0),
            "quest": lambda: resp(connection, "QUERY_SPARSE_AUTO", *auto, 1),
            "given": lambda: resp(connection, "QUERY_SPARSE", *given),
        }
        must_equal("dense", sides["dense"](), attended(q[:, 0], [(layer.keys, layer.values)]))
        rows = [(layer.keys[:, indices[0]], layer.values[:, indices[0]])]
        must_equal("given", sides["given"](), attended(q[:, 0], rows))
        times = {name: FEW if name == "dense" else TIMES for name in sides}
        several = {name: repeated(side, times[name]) for name, side in sides.items()}
        took = alternate(several, options.pairs, options.patience)
        seconds = {name: [x / times[name] for x in values] for name, values in took.items()}
        # a dense query before each leaves nothing of its blocks in the processor's caches
        cold = alternate(
            {"dense": sides["dense"], "mean": sides["mean"]}, options.pairs, options.patience
        )
    gain = paired_ratio(seconds["dense"], seconds["mean"])
    return {
        "dense_over_sparse": {**gain, **check(gain["median"], 20.0, at_least=True)},
        "dense_over_quest": paired_ratio(seconds["dense"], seconds["quest"]),
        "dense_over_given": paired_ratio(seconds["dense"], seconds["given"]),
        **{f"{name}_ms": milliseconds(values) for name, values in seconds.items()},
        "dense_over_sparse_cold": paired_ratio(cold["dense"], cold["mean"]),
        "mean_cold_ms": milliseconds(cold["mean"]),
    }


def types(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The fused query with K/V kept in other types; ``stored``: warmed from mlx4g32 rows."""
    suffix = normal(3, HEADS, 1, DIM), normal(4, HEADS, 1, DIM)
    request = fused_frame("ns", normal(5, HEADS, 1, DIM), *suffix)
    figures = {}
    for dtype in ("fp32", "fp16", "bf16", "stored"):
        with pion_server(folder / dtype, "--attend-dtype", dtype) as pion, pion.connect() as resp_:
            resp_.command("KV.PREFIX.REGISTER", "ns", HEADS * DIM, "mlx4g32", "HEADS", HEADS)
            for seed, side in enumerate(("pk", "pv")):
                rows = normal(seed, TOKENS, HEADS * DIM).tobytes()
                resp_.command("V.STOREBATCH", f"ns_{side}", 0, 0, TOKENS, rows)
            resp_.command("KV.PREFIX.WARM", "ns", HEADS, DIM)
            with lane(pion.port + 1) as binary:
                ask = repeated(lambda one=binary: one.ask(request))
                seconds = alternate({"ask": ask}, options.pairs, options.patience)["ask"]
            held = dict(line.split(":") for line in info(resp_).split("\r\n") if ":" in line)
            figures[dtype] = {"ms": per_call(seconds), "bytes": int(held["sdpa_bytes"])}
    return figures


def info(connection: RespConnection) -> str:
    reply = connection.command("KV.PREFIX.INFO")
    return bytes(reply).decode() if isinstance(reply, (bytes, bytearray, memoryview)) else ""


def measure(options: argparse.Namespace, folder: Path) -> None:
    flags = ("--cuda-attention",) if options.cuda else ()
    with pion_server(folder / "pion", *flags) as pion:
        figures = {
            "server_flags": flags,
            # which kernels numpy's BLAS takes may have been decided for it, on either side
            "openblas": {k: v for k, v in os.environ.items() if k.startswith("OPENBLAS_")},
            "heads": HEADS,
            "dim": DIM,
            "tokens": TOKENS,
            **fused(pion, options),
            "sparse": sparse(pion, options),
        }
    if options.types:
        figures["types"] = types(folder, options)
    report("attention_lanes", options, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--types", action="store_true", help="also K/V kept in other types")
    parser.add_argument("--cuda", action="store_true", help="the server attends on the GPU")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
