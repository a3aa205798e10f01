"""The binary lane's PING and LAYER.FETCH of 4 MB against a bare socket loop.

The bare server is a blocking loop that reads seven bytes and sends a reply of the same
length; the same ``recv_into`` client talks to both, in turn.
"""

from __future__ import annotations

import argparse
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pion_vllm_mlx.wire.frames import HEADER_BYTES, Status, frame

from .common import (
    alternate,
    arguments,
    check,
    fresh_folder,
    paired_ratio,
    pion_server,
    rates,
    report,
    spread,
)

LAYER_BYTES = 4_000_000
PINGS, FETCHES = 2000, 20
FETCH_BODY = struct.pack("<H", 2) + b"s1" + struct.pack("<H", 7)
BARE_SERVER = """
import socket, sys
request, size = int(sys.argv[1]), int(sys.argv[2])
body = bytes(range(256)) * (size // 256 + 1)
data = bytes.fromhex("5eca00") + (size - 7).to_bytes(4, "little") + body[: size - 7]
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while peer.recv(request, socket.MSG_WAITALL):
    peer.sendall(data)
"""


def loop(sock: socket.socket, request: bytes, reply_bytes: int, times: int) -> None:
    """Send and receive so many times; SystemExit for a reply that is not OK."""
    view = memoryview(bytearray(reply_bytes))
    for _ in range(times):
        sock.sendall(request)
        at = 0
        while at < reply_bytes:
            count = sock.recv_into(view[at:])
            if not count:
                raise SystemExit("the server closed the connection")
            at += count
    if view[2] != Status.OK:
        raise SystemExit("the server refused")


@contextmanager
def bare(request: bytes, reply_bytes: int) -> Iterator[socket.socket]:
    """A connection to a bare server."""
    command = [sys.executable, "-c", BARE_SERVER, str(len(request)), str(reply_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        with connected(int(child.stdout.readline())) as sock:
            yield sock


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def compare(
    port: int, request: bytes, reply_bytes: int, times: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of ``times`` round trips on either side, and their ratio."""
    with connected(port) as lane, bare(request, reply_bytes) as plain:
        sides: dict[str, Callable[[], None]] = {
            "bare": lambda: loop(plain, request, reply_bytes, times),
            "lane": lambda: loop(lane, request, reply_bytes, times),
        }
        seconds = alternate(sides, options.pairs, options.patience)
    ratio = paired_ratio(seconds["bare"], seconds["lane"])
    figures: dict[str, Any] = {"ratio": ratio, **check(ratio["median"], 0.8, at_least=True)}
    for name, values in seconds.items():
        figures[f"{name}_us"] = spread([1e6 * value / times for value in values])
        if reply_bytes > HEADER_BYTES:
            figures[f"{name}_gb_s"] = rates(times * reply_bytes, values)
    return figures


def measure(options: argparse.Namespace, folder: Path) -> None:
    with pion_server(folder / "pion") as pion:
        port = pion.port + 1
        tensor = np.random.default_rng(0).bytes(LAYER_BYTES)
        with connected(port) as sock:
            loop(sock, frame(0x10, FETCH_BODY + tensor), HEADER_BYTES, 1)
        reply_bytes = HEADER_BYTES + LAYER_BYTES
        figures = {
            "ping": compare(port, frame(0xFF), HEADER_BYTES, PINGS, options),
            "layer_fetch_4mb": compare(
                port, frame(0x11, FETCH_BODY), reply_bytes, FETCHES, options
            ),
        }
    report("binary_lane", options, figures)


def main() -> None:
    options = arguments(__doc__).parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
