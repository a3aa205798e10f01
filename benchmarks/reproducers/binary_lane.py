"""The binary lane's PING and LAYER.FETCH of 4 MB against a bare socket loop.

The bare server is a blocking loop that reads seven bytes and sends a reply of the same
length; the same ``recv_into`` client talks to both, in turn. For PING there is a third side,
the least that an event loop costs: uvloop with a protocol that writes the same reply to
whatever it receives.

``--one-core`` keeps the client and all servers on one processor, as real-time processes
where that is allowed: then neither the scheduler's choice of a processor, nor the time that a
sleeping one takes to wake up, nor other work is in the figure, but what each side computes.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pion_vllm_mlx.wire.frames import HEADER_BYTES, Status, frame

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
    spread,
)

LAYER_BYTES = 4_000_000
PINGS, FETCHES = 2000, 20
PRIORITY = 10
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
if sys.platform == "linux":  # as pion's own sockets
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
while peer.recv(request, socket.MSG_WAITALL):
    peer.sendall(data)
"""
UVLOOP_SERVER = """
import asyncio, sys, uvloop
request, size = int(sys.argv[1]), int(sys.argv[2])
data = bytes.fromhex("5eca00") + (size - 7).to_bytes(4, "little") + bytes(size - 7)
class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, received):
        self.transport.write(data)
async def main():
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
uvloop.run(main())
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
def serving(program: str, request: bytes, reply_bytes: int) -> Iterator[tuple[int, socket.socket]]:
    """A process that answers every request so; its id and a connection to it."""
    command = [sys.executable, "-c", program, str(len(request)), str(reply_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            with connected(int(child.stdout.readline())) as sock:
                yield child.pid, sock
        finally:
            child.terminate()


@contextmanager
def one_core(pids: Sequence[int]) -> Iterator[str]:
    """This process and others on one processor; says how they are scheduled there."""
    tasks = [int(task) for pid in (os.getpid(), *pids) for task in os.listdir(f"/proc/{pid}/task")]
    before = os.sched_getaffinity(0)
    how = "real-time"
    try:
        for task in tasks:
            os.sched_setaffinity(task, {min(before)})
            try:
                os.sched_setscheduler(task, os.SCHED_FIFO, os.sched_param(PRIORITY))
            except PermissionError:
                how = "pinned"
        yield how
    finally:
        for task in tasks:
            os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(task, before)


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def compare(
    pion: Process, request: bytes, reply_bytes: int, times: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of ``times`` round trips on every side, and their ratios."""
    programs = {"bare": BARE_SERVER}
    if reply_bytes == HEADER_BYTES and find_spec("uvloop") is not None:
        programs["uvloop_echo"] = UVLOOP_SERVER
    with ExitStack() as stack:
        socks = {"lane": stack.enter_context(connected(pion.port + 1))}
        pids = [pion.pid]
        for name, program in programs.items():
            pid, socks[name] = stack.enter_context(serving(program, request, reply_bytes))
            pids.append(pid)
        placed = stack.enter_context(one_core(pids)) if options.one_core else "anywhere"
        sides: dict[str, Callable[[], None]] = {
            name: partial(loop, sock, request, reply_bytes, times)
            for name, sock in sorted(socks.items())
        }
        seconds = alternate(sides, options.pairs, options.patience)
    ratio = paired_ratio(seconds["bare"], seconds["lane"])
    figures: dict[str, Any] = {"ratio": ratio, **check(ratio["median"], 0.8, at_least=True)}
    figures["processes"] = placed
    if "uvloop_echo" in seconds:
        figures["uvloop_echo_ratio"] = paired_ratio(seconds["bare"], seconds["uvloop_echo"])
    for name, values in seconds.items():
        figures[f"{name}_us"] = spread([1e6 * value / times for value in values])
        if reply_bytes > HEADER_BYTES:
            figures[f"{name}_gb_s"] = rates(times * reply_bytes, values)
    return figures


def measure(options: argparse.Namespace, folder: Path) -> None:
    with pion_server(folder / "pion") as pion:
        tensor = np.random.default_rng(0).bytes(LAYER_BYTES)
        with connected(pion.port + 1) as sock:
            loop(sock, frame(0x10, FETCH_BODY + tensor), HEADER_BYTES, 1)
        reply_bytes = HEADER_BYTES + LAYER_BYTES
        figures = {
            "ping": compare(pion, frame(0xFF), HEADER_BYTES, PINGS, options),
            "layer_fetch_4mb": compare(
                pion, frame(0x11, FETCH_BODY), reply_bytes, FETCHES, options
            ),
        }
    report("binary_lane_one_core" if options.one_core else "binary_lane", options, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--one-core", action="store_true", help="all on one processor")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
