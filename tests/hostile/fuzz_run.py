"""The fuzzer's loop: batches of requests to a running server, and what has to come back.

A batch is hundreds of requests in one go; in most of them some are mutated. A reference
parser says how many replies it calls for and whether the connection ends. Behind every
batch stands a request whose reply is known, so that one reply too many or too few shows.

``python -m tests.hostile.fuzz_run --frames 2000000 [--seed N]`` starts a server and goes on
for so many requests a lane.
"""

from __future__ import annotations

import argparse
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

from tests.conftest import RunningServer, free_port_block
from tests.hostile import fuzz_frames, fuzz_resp
from tests.hostile.fuzz_bytes import Exchange, Expected, Mutation, mutated, pieces
from tests.hostile.watching import anonymous_bytes, open_files
from tests.server.wire import Wire

#: requests that a seed makes before the next one does
CORPUS = 3000
BATCH = 300
#: an established connection is used for so many batches at most
REUSE = 8


class Counting(Protocol):
    def update(self, data: bytearray) -> int: ...


@dataclass(frozen=True, repr=False)
class Lane:
    """What differs between the two lanes."""

    name: str
    port_offset: int
    request: Callable[[Random], bytes]
    mutations: tuple[Mutation, ...]
    expected: Callable[[bytes], Expected]
    replies: Callable[[], Counting]
    sentinel: Callable[[bytes], tuple[bytes, bytes]]

    def __repr__(self) -> str:
        return self.name


def _resp_sentinel(token: bytes) -> tuple[bytes, bytes]:
    """Out of any transaction and memory limit, then an echo; how its reply ends."""
    words = ((b"RESET",), (b"CONFIG", b"SET", b"maxmemory", b"0"), (b"ECHO", token))
    reply = b"+RESET\r\n+OK\r\n$%d\r\n%b\r\n" % (len(token), token)
    return b"".join(map(fuzz_resp.encoded, words)), reply


def _frame_sentinel(token: bytes) -> tuple[bytes, bytes]:
    place = struct.pack("<H", 8) + b"sentinel" + struct.pack("<H", 0)
    sent = fuzz_frames.framed(0x10, place + token) + fuzz_frames.framed(0x11, place)
    return sent, fuzz_frames.framed(0, b"") + fuzz_frames.framed(0, token)


RESP = Lane(
    "resp",
    0,
    fuzz_resp.request,
    fuzz_resp.MUTATIONS,
    fuzz_resp.expected,
    fuzz_resp.Replies,
    _resp_sentinel,
)
FRAMES = Lane(
    "frames",
    1,
    fuzz_frames.request,
    fuzz_frames.MUTATIONS,
    fuzz_frames.expected,
    fuzz_frames.Replies,
    _frame_sentinel,
)


@dataclass
class Report:
    """What a run has seen."""

    requests: int = 0
    batches: int = 0
    mutated: int = 0
    ended: int = 0
    cut: int = 0
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def line(self, lane: str) -> str:
        rate = self.requests / max(self.seconds, 1e-9)
        return (
            f"{lane}: {self.requests} requests, {rate:.0f}/s, {self.batches} batches, "
            f"{self.mutated} mutated, {self.ended} ended by the server, {self.cut} cut short; "
            f"memory {[m >> 20 for m in self.memory]} MiB, files {self.files}"
        )


class Fuzzer:
    """One lane of one server. ``run`` raises AssertionError with the batch that went wrong."""

    def __init__(self, server: RunningServer, lane: Lane, seed: int) -> None:
        self.server, self.lane, self.seed = server, lane, seed
        self.rng = Random(f"{lane.name} {seed}")
        self.report = Report()
        self._connection: Exchange | None = None
        self._used = 0
        self._corpus: list[bytes] = []

    def run(self, requests: int) -> Report:
        """At least so many requests; memory and files are noted after a tenth and at the end."""
        with Wire.tcp(self.server.port) as other:
            self._go_on(requests // 10, other)
            self._note()
            self._go_on(requests - self.report.requests, other)
            self._note()
        return self.report

    def _go_on(self, requests: int, other: Wire) -> None:
        begin, goal = time.monotonic(), self.report.requests + requests
        while self.report.requests < goal:
            if self.report.batches % (CORPUS * 4 // BATCH) == 0:
                self._corpus = [self.lane.request(self.rng) for _ in range(CORPUS)]
            self._batch(other)
        self._close()
        self.report.seconds += time.monotonic() - begin

    def _batch(self, other: Wire) -> None:
        rng, report = self.rng, self.report
        chosen = rng.choices(self._corpus, k=rng.choice((1, 20, BATCH, BATCH, BATCH)))
        times = rng.choice((0, 0, 1, 1, 2, 20))
        token = b"%x" % rng.getrandbits(64)
        asked, answer = self.lane.sentinel(token)
        data = mutated(rng, chosen, self.lane.mutations, times)
        whole = self.lane.expected(data).whole
        data += asked if whole else b""
        wanted = self.lane.expected(data)
        try:
            self._exchange(data, wanted, answer, other)
        except (AssertionError, OSError, ValueError) as error:
            self._keep(data)
            raise AssertionError(
                f"{self.lane.name}, seed {self.seed}, {wanted}: {error}"
            ) from error
        report.requests += wanted.replies
        report.batches += 1
        report.mutated += times > 0
        report.ended += wanted.ends
        report.cut += not wanted.whole

    def _exchange(self, data: bytes, wanted: Expected, answer: bytes, other: Wire) -> None:
        connection = self._connection or Exchange(self.server.port + self.lane.port_offset)
        self._connection = connection
        counting = self.lane.replies()
        connection.received.clear()
        connection.send(pieces(self.rng, data))
        assert other.ask("PING") == "PONG", "another connection"
        count = wanted.replies + wanted.explains
        connection.read(lambda data: counting.update(data) >= count)
        seen, received = counting.update(connection.received), connection.received
        assert seen >= count, f"{seen} replies instead of {count}"
        if wanted.ends:
            connection.read(lambda data: False)
            seen = counting.update(received)
        assert seen == count, f"{seen} replies instead of {count}"
        assert b"internal error" not in received, "internal error"
        if wanted.explains:
            assert b"-ERR Protocol error" in received[-120:], bytes(received[-120:])
        elif wanted.whole and not wanted.ends:
            assert received.endswith(answer), bytes(received[-120:])
        self._used += 1
        if wanted.ends or not wanted.whole or connection.ended or self._used >= REUSE:
            assert wanted.ends or not connection.ended, "the server closed"
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._used = None, 0

    def _keep(self, data: bytes) -> None:
        """The batch that went wrong, beside the server's log."""
        path = self.server.dir.parent / f"fuzz-{self.lane.name}-{self.seed}.bin"
        path.write_bytes(data)

    def _note(self) -> None:
        """Memory and open files, with the tables as full as they get."""
        fill_tables(self.server)
        self.report.memory.append(anonymous_bytes(self.server))
        self.report.files.append(open_files(self.server))


def fill_tables(server: RunningServer) -> None:
    """Bring what a server holds to the same state whatever came before."""
    with Wire.tcp(server.port) as wire:
        wire.ask("FLUSHALL")
        names = [f"table{n}" for n in range(256)]
        wire.together(*[("ATTEND.CREATE", name, 2, 2) for name in names])
        wire.together(*[("V.CREATE", name, 8) for name in names])
        wire.together(*[("V.DROP", name) for name in names])
        for n in range(0, 1000, 50):
            vector = struct.pack("<f", 1.0) * 768
            wire.together(*[("KV.STORE", f"{n + k}", vector, b"") for k in range(50)])
    lane = Exchange(server.port + 1)
    place = [struct.pack("<H", 8) + b"table%03d" % n + struct.pack("<H", 0) for n in range(256)]
    lane.send([b"".join(fuzz_frames.framed(0x10, one) for one in place)])
    counting = fuzz_frames.Replies()
    lane.read(lambda data: counting.update(data) >= len(place))
    lane.close()


def problems(log: str) -> str:
    """What a server has logged that is more than a client's fault."""
    signs = (" ERROR ", " WARNING ", "Warning", "Traceback", "  File ")
    return "\n".join([line for line in log.splitlines() if any(s in line for s in signs)][:60])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--frames", type=int, default=200_000, help="requests a lane")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--lane", choices=["resp", "frames", "both"], default="both")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        server = RunningServer(free_port_block(), Path(name) / "data").start()
        try:
            for lane in (RESP, FRAMES):
                if chosen.lane in (lane.name, "both"):
                    print(Fuzzer(server, lane, chosen.seed).run(chosen.frames).line(lane.name))
        finally:
            server.stop()
            print(problems(server.output()))


if __name__ == "__main__":
    main()
