"""How long a PING waits while another connection stores, or fetches, 256 MB.

PINGs go one after the other from a process of their own. Each load lasts as long as its
256 MB take, and is repeated; times of all repetitions count together. ``idle`` is the same
measurement beside a connection that does nothing, ``lane`` beside one that sends PING after
PING on the binary lane, at whose socket the server likes to stay.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pion_vllm_mlx.wire.frames import HEADER_BYTES, frame

from .binary_lane import connected, loop
from .common import (
    DEADLINE_SECONDS,
    REPOSITORY,
    Process,
    arguments,
    check,
    environment,
    fresh_folder,
    percentile,
    pion_server,
    report,
    wait_until_quiet,
)
from .prefix import Bytes, Shape, fetch, register, store

#: 16 layers, both sides, 8 MB each: 256 MiB.
SHAPE = Shape(tokens=8192)
LANE_SECONDS, LANE_PINGS = 0.5, 100

PINGER = """
import json, socket, sys, threading, time
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
stop = threading.Event()
print("ready", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
while not stop.is_set():
    started = time.perf_counter()
    sock.sendall(b"PING\\r\\n")
    sock.recv(64)
    times.append(time.perf_counter() - started)
    time.sleep(0.0005)
print(json.dumps(times), flush=True)
"""


def ping_during(pion: Process, load: Callable[[], object]) -> list[float]:
    """Round trips, in seconds, of the PINGs that were sent while ``load`` ran."""
    command = [sys.executable, "-c", PINGER, str(pion.port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), cwd=REPOSITORY
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        load()
        output, _ = child.communicate(timeout=DEADLINE_SECONDS)
    times: list[float] = json.loads(output)
    return times


def hurry(port: int) -> None:
    """PING after PING on the binary lane, for a while."""
    ends_at = time.monotonic() + LANE_SECONDS
    with connected(port) as sock:
        while time.monotonic() < ends_at:
            loop(sock, frame(0xFF), HEADER_BYTES, LANE_PINGS)


def figures_of(times: list[float]) -> dict[str, Any]:
    """Percentiles in ms, against the bar."""
    ms = {f"p{share}": percentile(times, share / 100) * 1e3 for share in (50, 99)}
    worst = max(times) * 1e3
    return {
        "pings": len(times),
        **{name: round(value, 2) for name, value in ms.items()},
        "max": round(worst, 2),
        **check(ms["p99"], 20.0, at_least=False),
    }


def measure(options: argparse.Namespace, folder: Path) -> None:
    layers: list[Bytes] = [SHAPE.random_layer()]
    buffers = SHAPE.buffers()
    times: dict[str, list[float]] = {"idle": [], "lane": [], "store": [], "fetch": []}
    with pion_server(folder / "pion") as pion, pion.connect(unix=options.unix) as connection:
        for turn in range(options.pairs):
            wait_until_quiet(options.patience)
            namespace = f"p{turn}"
            register(connection, namespace, SHAPE)
            loads: dict[str, Callable[[], object]] = {
                "idle": lambda: time.sleep(0.2),
                "lane": lambda: hurry(pion.port + 1),
                "store": lambda name=namespace: store(connection, name, SHAPE, layers),  # type: ignore[misc]
                "fetch": lambda name=namespace: fetch(connection, name, SHAPE, buffers),  # type: ignore[misc]
            }
            for kind, load in loads.items():
                times[kind] += ping_during(pion, load)
            connection.command("KV.PREFIX.DROP", namespace)
    figures = {f"{kind}_ping_ms": figures_of(values) for kind, values in times.items()}
    transport = "unix" if options.unix else "tcp"
    report("latency_under_load", options, {"transport": transport, **figures})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--unix", action="store_true", help="load over the Unix socket")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
