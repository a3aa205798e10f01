"""How long KV.PREFIX.MEMBERSHIP takes: 1,562 probes against a table of 1,562 hashes.

From the call to the bitmap, through a bare socket over loopback TCP; a PING over the same
socket in the same turns is what a round trip costs here anyway. Half of the probes are in
the table; every bitmap is compared with what a set says.
"""

from __future__ import annotations

import argparse
import random
import socket
import struct
import time
from pathlib import Path

from .common import arguments, check, fresh_folder, percentile, pion_server, report

COUNT = 1562
WARM_UP = 200
BAR_US = 250.0


def request(*words: bytes) -> bytes:
    """One command as an array of bulk strings."""
    parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n%s" % (len(words), b"".join(parts))


def packed(hashes: list[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def bitmap(table: set[int], probes: list[int]) -> bytes:
    """The answer, the slow way."""
    bits = bytearray(-(-len(probes) // 8))
    for index, probe in enumerate(probes):
        bits[index >> 3] |= (probe in table) << (index & 7)
    return bytes(bits)


def timed(sock: socket.socket, command: bytes, expected: bytes) -> float:
    """Microseconds of one round trip."""
    reply = bytearray()
    started = time.perf_counter()
    sock.sendall(command)
    while len(reply) < len(expected):
        reply += sock.recv(4096)
    took = time.perf_counter() - started
    if reply != expected:
        raise SystemExit(f"wrong answer: {bytes(reply[:80])!r}")
    return took * 1e6


def measure(options: argparse.Namespace, folder: Path) -> None:
    dice = random.Random(1562)
    table = [dice.getrandbits(64) for _ in range(COUNT)]
    probes = [dice.choice(table) if n % 2 else dice.getrandbits(64) for n in range(COUNT)]
    bits = bitmap(set(table), probes)
    blocks = (b"BLOCKS", b"64", b"%d" % COUNT, packed(table))
    register = request(b"KV.PREFIX.REGISTER", b"ns", b"64", b"fp16", *blocks)
    ask = request(b"KV.PREFIX.MEMBERSHIP", b"ns", b"%d" % COUNT, packed(probes))
    answer = b"$%d\r\n%s\r\n" % (len(bits), bits)
    with pion_server(folder / "pion") as pion, pion.raw_socket() as sock:
        timed(sock, register, b"+OK\r\n")
        membership, ping = [], []
        for turn in range(WARM_UP + options.probes):
            took = timed(sock, ask, answer), timed(sock, b"PING\r\n", b"+PONG\r\n")
            if turn >= WARM_UP:
                membership.append(took[0])
                ping.append(took[1])
    figures = {
        f"{name}_us": {f"p{share}": round(percentile(times, share / 100), 1) for share in (50, 99)}
        for name, times in (("membership", membership), ("ping", ping))
    }
    gate = {"p50_us": check(percentile(membership, 0.5), BAR_US, at_least=False)}
    report("membership", options, {"hashes": COUNT, "turns": options.probes, **figures, **gate})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--probes", type=int, default=3000, help="round trips that are timed")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
