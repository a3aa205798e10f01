"""A plain RESP client for tests: says exactly what was sent and what came back."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

Word: TypeAlias = "bytes | str | int"


class Status(str):
    """A simple string."""


class Refusal(str):
    """An error line, without its dash."""


def request(*words: Word) -> bytes:
    """One command as an array of bulk strings."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts += [b"$%d\r\n" % len(data), data, b"\r\n"]
    return b"".join(parts)


@dataclass
class Wire:
    """One connection; ``ask`` sends one command and reads one reply."""

    sock: socket.socket

    def __post_init__(self) -> None:
        self.incoming = self.sock.makefile("rb")

    @classmethod
    def tcp(cls, port: int, timeout: float = 20.0) -> Wire:
        return cls(socket.create_connection(("127.0.0.1", port), timeout=timeout))

    @classmethod
    def unix(cls, path: str) -> Wire:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(20.0)
        sock.connect(path)
        return cls(sock)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.incoming.close()
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, *words: Word) -> Any:
        self.send(request(*words))
        return self.reply()

    def ok(self, *words: Word) -> None:
        """A command that must answer +OK."""
        answer = self.ask(*words)
        assert isinstance(answer, Status) and answer == "OK", (words[:5], answer)

    def together(self, *commands: tuple[Word, ...]) -> list[Any]:
        """Commands in one write, and one reply for each."""
        self.send(b"".join(request(*command) for command in commands))
        return [self.reply() for _ in commands]

    def reply(self) -> Any:
        """One reply. Raises EOFError when the server closed the connection."""
        line = self.incoming.readline()
        if not line.endswith(b"\r\n"):
            raise EOFError("connection closed")
        kind, rest = line[:1], line[1:-2]
        match kind:
            case b"+":
                return Status(rest.decode())
            case b"-":
                return Refusal(rest.decode())
            case b":":
                return int(rest)
            case b"_":
                return None
            case b",":
                return float(rest)
            case b"$":
                return self._bulk(int(rest))
            case b"*":
                return None if rest == b"-1" else [self.reply() for _ in range(int(rest))]
            case b"~":
                return {self.reply() for _ in range(int(rest))}
            case b"%":
                return {self.reply(): self.reply() for _ in range(int(rest))}
        raise AssertionError(f"not RESP: {line!r}")

    def _bulk(self, length: int) -> bytes | None:
        if length < 0:
            return None
        data = self.incoming.read(length + 2)
        if len(data) != length + 2:
            raise EOFError("connection closed inside a bulk string")
        assert data[-2:] == b"\r\n"
        return data[:-2]

    def closed(self) -> bool:
        """Whether the server has closed the connection; waits for it."""
        try:
            return self.incoming.read(1) == b""
        except ConnectionError:
            return True

    def info(self, *words: Word) -> dict[str, str]:
        """The fields of an INFO-like reply."""
        text = self.ask(*words)
        assert isinstance(text, bytes), text
        pairs = (line.partition(":") for line in text.decode().split("\r\n"))
        return {name: value for name, colon, value in pairs if colon}


def refuse(wire: Wire, fragment: str, *words: Word) -> None:
    """The command is refused in these words, the connection is in sync, nothing has changed."""
    before = fingerprint(wire)
    answer, pong = wire.together(words, ("PING",))
    assert isinstance(answer, Refusal), (words[:6], answer)
    assert fragment in answer, (fragment, answer)
    assert pong == "PONG"
    assert fingerprint(wire) == before, words[:6]


def settle(wire: Wire, seconds: float = 10.0) -> None:
    """Wait until the server holds no bytes in flight: a refusal does not wait for its windows."""
    deadline = time.monotonic() + seconds
    while (held := wire.info("INFO", "clients")["in_flight_bytes"]) != "0":
        assert time.monotonic() < deadline, f"{held} bytes are never given back"
        time.sleep(0.002)


_VOLATILE = {"uptime_in_seconds", "vstore_disk_bytes"}


def fingerprint(wire: Wire) -> dict[str, str]:
    """Every counter and size that a refused command must leave alone."""
    seen = wire.info("KV.PREFIX.INFO")
    receipt = wire.ask("PION.STATS")
    pairs = receipt.items() if isinstance(receipt, dict) else zip(*[iter(receipt)] * 2, strict=True)
    seen |= {name.decode(): str(value) for name, value in pairs}
    settle(wire)
    return {name: value for name, value in seen.items() if name not in _VOLATILE}
