"""What the fuzzers of both lanes share: mutations of bytes, and an exchange that cannot block.

The reference parsers in ``fuzz_resp`` and ``fuzz_frames`` say what a server has to answer
to the mutated bytes: so many replies, and whether the connection ends.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

SECONDS = 30.0
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Expected:
    """What bytes call for: ``replies`` of whole requests, and what comes then.

    ``ends``: the server closes, after one reply more if it ``explains``. ``whole``: nothing is
    left over; else a request is half sent.
    """

    replies: int
    ends: bool = False
    explains: bool = False
    whole: bool = True


# -- mutations -------------------------------------------------------------------

NUMBERS = (
    *(b"-1 -2 0 00 01 1 2 3 9 10 65535 65536 65537 1048576 1048577".split()),
    *(b"2147483647 4294967295 4294967296 9223372036854775807 9223372036854775808".split()),
    *(b"536870912 536870913 99999999999999999999999999999999999 1e3 0x10 +5 5.0 x".split()),
    b"",
    b" 1",
    b"1 ",
    b"\x00",
    b"\xd9\xa1",
)


def flip_bits(rng: Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def replace_bytes(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 5)) + data[at + rng.randint(0, 5) :]


def cut_out(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randint(1, 40) :]


def repeat(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    piece = data[at : at + rng.randint(1, 60)]
    return data[:at] + piece * rng.randint(2, 5) + data[at + len(piece) :]


Mutation = Callable[[Random, bytes], bytes]
PLAIN: tuple[Mutation, ...] = (flip_bits, flip_bits, replace_bytes, cut_out, repeat)


def splice(rng: Random, one: bytes, other: bytes) -> bytes:
    """The beginning of one request and the end of another."""
    return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]


def mutated(
    rng: Random, requests: Sequence[bytes], mutations: Sequence[Mutation], times: int
) -> bytes:
    """Requests one after the other, some of them changed; the last may be cut short."""
    parts = list(requests)
    for _ in range(times):
        at = rng.randrange(len(parts))
        kind = rng.random()
        if not parts[at]:
            continue
        if kind < 0.15:
            parts[at] = splice(rng, parts[at], rng.choice(parts))
        elif kind < 0.25:
            parts = parts[: at + 1]
            parts[at] = parts[at][: rng.randrange(len(parts[at]))]
        else:
            parts[at] = rng.choice(mutations)(rng, parts[at])
    return b"".join(parts)


# -- exchanging ------------------------------------------------------------------


def pieces(rng: Random, data: bytes) -> list[bytes]:
    """The data, whole or cut into packets at random places."""
    if rng.random() < 0.6 or len(data) < 2:
        return [data]
    cuts = sorted(rng.randrange(1, len(data)) for _ in range(rng.choice((1, 3, 12))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


class Exchange:
    """One connection: sends and receives at the same time."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = bytearray()
        self.ended = False

    def send(self, parts: Sequence[bytes]) -> None:
        """Send all, or as much as the server takes before it closes."""
        self.sock.setblocking(False)
        for part in parts:
            view = memoryview(part)
            while view and not self.ended:
                readable, writable, _ = select.select([self.sock], [self.sock], [], SECONDS)
                assert readable or writable, "neither takes nor answers"
                if readable:
                    self._receive()
                if writable:
                    try:
                        view = view[self.sock.send(view[:_CHUNK]) :]
                    except BlockingIOError:
                        continue
                    except (BrokenPipeError, ConnectionResetError):
                        self._receive_rest()
        self.sock.settimeout(SECONDS)

    def _receive(self) -> None:
        try:
            data = self.sock.recv(_CHUNK)
        except (ConnectionResetError, BrokenPipeError):
            data = b""
        except BlockingIOError:
            return
        self.received += data
        self.ended = not data

    def _receive_rest(self) -> None:
        while not self.ended:
            self._receive()

    def read(self, enough: Callable[[bytearray], bool]) -> None:
        """Receive until there is enough, or the connection has ended."""
        while not self.ended and not enough(self.received):
            self._receive()

    def close(self) -> None:
        self.sock.close()
