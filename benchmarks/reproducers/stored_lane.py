"""The stored lane against what carries it, and against redis-server.

1. ``RespConnection.fetch_into`` of a whole prefix over loopback TCP, against a bare
   ``recv_into`` loop that gets the same bytes from a bare ``sendall`` server.
2. The server's replies against redis-server's (one GET a layer and side, pipelined), both
   received by the same raw ``recv_into`` client; over TCP and over a Unix socket.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pion_vllm_mlx.wire.resp import request_buffers

from .common import (
    Process,
    alternate,
    arguments,
    check,
    fresh_folder,
    milliseconds,
    paired_ratio,
    pion_server,
    rates,
    redis_server,
    report,
)
from .prefix import SIDES, Bytes, Shape, fetch, fetch_words, register, store

BARE_SERVER = """
import socket, sys
size = int(sys.argv[1])
data = bytes(range(256)) * (size // 256)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
if sys.platform == "linux":  # as pion's own sockets
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
while peer.recv(1):
    peer.sendall(data)
"""


def receive(sock: socket.socket, buffers: Sequence[Bytes]) -> None:
    """The bare loop: fill every buffer."""
    for buffer in buffers:
        view = buffer.data
        while view:
            count = sock.recv_into(view)
            if not count:
                raise ConnectionError("closed")
            view = view[count:]


@contextmanager
def bare_side(layer_bytes: int, buffers: Sequence[Bytes]) -> Iterator[Callable[[], None]]:
    """A request to the bare server for both sides of a prefix, and its reply's end."""
    total = layer_bytes * len(buffers)
    command = [sys.executable, "-c", BARE_SERVER, str(total)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        with socket.create_connection(("127.0.0.1", int(child.stdout.readline()))) as sock:

            def run() -> None:
                for _ in SIDES:
                    sock.sendall(b"x")
                    receive(sock, buffers)

            yield run


def raw_exchange(
    sock: socket.socket, requests: Sequence[tuple[bytes, int]], memory: Bytes
) -> Callable[[], None]:
    """Send each request and receive its reply of known length into ``memory``."""

    def run() -> None:
        for request, length in requests:
            sock.sendall(request)
            receive(sock, [memory[:length]])

    return run


def wire(*commands: Sequence[Any]) -> bytes:
    """Commands as bytes."""
    return b"".join(bytes(buffer) for buffer in request_buffers(commands))


def pion_requests(namespace: str, shape: Shape) -> list[tuple[bytes, int]]:
    """One BATCH a side, and the length of its reply."""
    bulk = len(b"$%d\r\n\r\n" % shape.layer_bytes) + shape.layer_bytes
    length = len(b"*%d\r\n" % shape.layers) + shape.layers * bulk
    return [(wire(fetch_words(namespace, side, shape)), length) for side in SIDES]


def redis_requests(shape: Shape) -> list[tuple[bytes, int]]:
    """One pipeline of GETs a side, and the length of its replies."""
    bulk = len(b"$%d\r\n\r\n" % shape.layer_bytes) + shape.layer_bytes
    return [
        (
            wire(*(["GET", f"{shape.tokens}{side}{n}"] for n in range(shape.layers))),
            shape.layers * bulk,
        )
        for side in SIDES
    ]


def against_bare(pion: Process, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Figure 1 for one prefix."""
    namespace = f"n{shape.tokens}"
    buffers = shape.buffers()
    with pion.connect() as connection, bare_side(shape.layer_bytes, buffers) as bare:
        sides = {"bare": bare, "pion": lambda: fetch(connection, namespace, shape, buffers)}
        seconds = alternate(sides, options.pairs, options.patience)
    ratio = paired_ratio(seconds["bare"], seconds["pion"])
    return {
        **{f"{name}_gb_s": rates(shape.total_bytes, s) for name, s in seconds.items()},
        "throughput_ratio": ratio,
        **check(ratio["median"], 0.8, at_least=True),
    }


def against_redis(
    pion: Process, redis: Process, shape: Shape, options: argparse.Namespace, unix: bool
) -> dict[str, Any]:
    """Figure 2 for one prefix over one kind of socket."""
    memory = np.ones(shape.layers * (shape.layer_bytes + 64) + 64, np.uint8)
    with pion.raw_socket(unix=unix) as ours, redis.raw_socket(unix=unix) as theirs:
        sides = {
            "redis": raw_exchange(theirs, redis_requests(shape), memory),
            "pion": raw_exchange(ours, pion_requests(f"n{shape.tokens}", shape), memory),
        }
        seconds = alternate(sides, options.pairs, options.patience)
    ratio = paired_ratio(seconds["redis"], seconds["pion"])
    return {
        **{f"{name}_ms": milliseconds(s) for name, s in seconds.items()},
        **{f"{name}_gb_s": rates(shape.total_bytes, s) for name, s in seconds.items()},
        "throughput_ratio": ratio,
        **check(ratio["median"], 1.0, at_least=True),
    }


def fill(pion: Process, redis: Process | None, shape: Shape) -> None:
    """The same bytes into both."""
    layers = [shape.random_layer(n) for n in range(2)]
    with pion.connect() as connection:
        register(connection, f"n{shape.tokens}", shape)
        store(connection, f"n{shape.tokens}", shape, layers)
    if redis is None:
        return
    with redis.connect() as connection:
        for side in SIDES:
            for number in range(shape.layers):
                name = f"{shape.tokens}{side}{number}"
                connection.command("SET", name, layers[number % len(layers)])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 4100])
    parser.add_argument("--no-redis", action="store_true", help="only the first figure")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


def measure(options: argparse.Namespace, folder: Path) -> None:
    figures: dict[str, Any] = {}
    redis_or_none = nullcontext(None) if options.no_redis else redis_server(folder / "redis")
    with pion_server(folder / "pion") as pion, redis_or_none as redis:
        for tokens in options.tokens:
            shape = replace(Shape(), tokens=tokens)
            fill(pion, redis, shape)
            found: dict[str, Any] = {"bytes": shape.total_bytes}
            found["tcp_vs_bare_recv_into"] = against_bare(pion, shape, options)
            if redis is not None:
                for unix in (False, True):
                    key = f"{'unix' if unix else 'tcp'}_vs_redis"
                    found[key] = against_redis(pion, redis, shape, options, unix)
            figures[f"N={tokens}"] = found
    report("stored_lane", options, figures)


if __name__ == "__main__":
    main()
