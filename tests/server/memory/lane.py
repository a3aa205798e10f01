"""A plain client of the binary lane, written from the protocol's table of bytes."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

OK, MISS, ERROR = 0, 1, 2

STORE, FETCH, FETCH_BATCH, EXTEND, PING, AUTH = 0x10, 0x11, 0x12, 0x13, 0xFF, 0x37
CREATE, ATTEND_STORE, FINALIZE, QUERY, QUERY_FUSED = 0x20, 0x21, 0x22, 0x23, 0x24


def frame(opcode: int, body: bytes = b"") -> bytes:
    """One request."""
    return b"\x5e\xca" + bytes([opcode]) + len(body).to_bytes(4, "little") + body


def named(sid: str | bytes, *numbers: tuple[str, int], rest: bytes = b"") -> bytes:
    """A body: the session id with its length, fields as struct codes, and what follows."""
    name = sid if isinstance(sid, bytes) else sid.encode()
    fields = b"".join(struct.pack("<" + code, value) for code, value in numbers)
    return struct.pack("<H", len(name)) + name + fields + rest


@dataclass
class Lane:
    """One connection; ``ask`` sends a frame and reads its reply."""

    sock: socket.socket

    def __post_init__(self) -> None:
        self.incoming = self.sock.makefile("rb")

    @classmethod
    def tcp(cls, port: int, timeout: float = 20.0) -> Lane:
        return cls(socket.create_connection(("127.0.0.1", port), timeout=timeout))

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *exc: object) -> None:
        self.incoming.close()
        self.sock.close()

    def ask(self, opcode: int, body: bytes = b"") -> tuple[int, bytes]:
        self.sock.sendall(frame(opcode, body))
        return self.reply()

    def ok(self, opcode: int, body: bytes = b"") -> bytes:
        """A request that must be answered OK; its body."""
        status, answer = self.ask(opcode, body)
        assert status == OK, (hex(opcode), status, answer[:200])
        return answer

    def refuse(self, fragment: str, opcode: int, body: bytes = b"") -> None:
        """The request is refused in these words, and the connection is in step."""
        self.sock.sendall(frame(opcode, body) + frame(PING))
        status, answer = self.reply()
        assert status == ERROR and fragment in answer.decode(), (hex(opcode), status, answer)
        assert not answer.startswith(b"-")
        assert self.reply() == (OK, b"")

    def reply(self) -> tuple[int, bytes]:
        """One reply. Raises EOFError when the server closed the connection."""
        head = self.incoming.read(7)
        if len(head) < 7:
            raise EOFError("connection closed")
        assert head[:2] == b"\x5e\xca"
        status, length = struct.unpack("<BI", head[2:])
        body = self.incoming.read(length)
        if len(body) < length:
            raise EOFError("connection closed inside a body")
        return status, body

    def closed(self) -> bool:
        """Whether the server has closed the connection; waits for it."""
        try:
            return self.incoming.read(1) == b""
        except ConnectionError:
            return True
