"""The binary lane's framing, sans-io: ``magic · code · body length · body``.

======  ====  =========================================================
offset  type  meaning
======  ====  =========================================================
0       u16   0xCA5E, little endian: ``5e ca`` on the wire
2       u8    opcode of a request, status of a reply
3       u32   length of the body, at most 1 GiB
7       ..    the body
======  ====  =========================================================

The caller receives into :meth:`FrameParser.get_buffer` and pulls frames one by one.
A body longer than ``INLINE_BODY_BYTES`` goes straight into the target that
``open_body`` names when the frame before it has been pulled: what one frame does
may decide where the next one's body goes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from pion_vllm_mlx.errors import CommandError, ProtocolError
from pion_vllm_mlx.wire.requests import BulkTarget, MemoryBulk

MAGIC = 0xCA5E
MAX_BODY_BYTES = 1 << 30
INLINE_BODY_BYTES = 16 << 10
_HEADER = struct.Struct("<HBI")
HEADER_BYTES = _HEADER.size
_CAPACITY = 2 * INLINE_BODY_BYTES

OpenBody: TypeAlias = Callable[[int, int], BulkTarget]


class Status(IntEnum):
    """How a request went."""

    OK = 0x00
    MISS = 0x01
    ERROR = 0x02
    COLDMISS = 0x03


class Frame(NamedTuple):
    """A whole frame: ``code`` is an opcode or a status, ``body`` bytes or a filled target."""

    code: int
    body: bytes | BulkTarget


#: frames without a body, which are most of the short ones.
_BODILESS = tuple(Frame(code, b"") for code in range(256))


def header(code: int, body_bytes: int) -> bytes:
    """The seven bytes before a body."""
    return _HEADER.pack(MAGIC, code, body_bytes)


def header_of(received: memoryview) -> tuple[int, int, int]:
    """Magic, code and length of the body that the first seven bytes say."""
    magic, code, length = _HEADER.unpack_from(received)
    return magic, code, length


def frame(code: int, body: bytes = b"") -> bytes:
    """A whole frame, joined: for short bodies."""
    return header(code, len(body)) + body


def open_in_memory(code: int, length: int) -> BulkTarget:
    """The plain ``open_body``: every long body in memory of its own."""
    return MemoryBulk(length)


class FrameParser:
    """Turns the bytes of one connection into frames."""

    def __init__(
        self, open_body: OpenBody = open_in_memory, max_body: int = MAX_BODY_BYTES
    ) -> None:
        self.max_body = max_body
        self._short = min(max_body, INLINE_BODY_BYTES)
        self._open_body = open_body
        self._view = memoryview(bytearray(_CAPACITY))
        self._start = 0
        self._end = 0
        self._code = 0
        self._target: BulkTarget | None = None
        self._left = 0

    @property
    def mid_frame(self) -> bool:
        """Whether a frame is half received, or whole and not pulled yet."""
        return self._target is not None or self._start < self._end

    @property
    def in_body(self) -> bool:
        """Whether a long body is half received."""
        return self._target is not None

    def abandon(self) -> BulkTarget | None:
        """Give up the half received body: its target, whose memory has to be given back."""
        target, self._target = self._target, None
        return target

    def get_buffer(self) -> memoryview | None:
        """Where the next bytes go; None until a frame is pulled or the target has room."""
        if self._target is not None and self._left:
            if self._start < self._end:
                return None
            window = self._target.buffer()
            return None if not window else window[: self._left]
        if not self._end:
            return self._view
        if self._end == len(self._view):
            held = self._end - self._start
            if held == len(self._view):
                return None
            self._view[:held] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, held
        return self._view[self._end :]

    def buffer_updated(self, n: int) -> None:
        """Take note of ``n`` bytes received into ``get_buffer()``'s window."""
        if self._target is not None and self._left:
            self._target.advance(n)
            self._left -= n
        else:
            self._end += n

    def take(self, received: memoryview) -> int:
        """Take in bytes that were received elsewhere; for how many of them there was room."""
        window = self.get_buffer()
        if not window:
            return 0
        n = min(len(window), len(received))
        window[:n] = received[:n]
        self.buffer_updated(n)
        return n

    def only_frame(self, n: int) -> Frame | None:
        """What ``n`` bytes received into the empty buffer are, if they are one short frame.

        ``buffer_updated`` and ``next_frame`` in one; None where those have more to say: then
        the bytes are held, and ``next_frame`` goes on.
        """
        magic, code, length = _HEADER.unpack_from(self._view)
        if HEADER_BYTES + length == n and length <= self._short and magic == MAGIC:
            return Frame(code, bytes(self._view[HEADER_BYTES:n])) if length else _BODILESS[code]
        self._end = n
        return None

    def next_frame(self) -> Frame | None:
        """The next whole frame, if it is there. Raises ProtocolError, for good."""
        if self._target is None:
            start, end = self._start, self._end
            if end - start < HEADER_BYTES:
                return None
            magic, code, length = _HEADER.unpack_from(self._view, start)
            if magic != MAGIC:
                raise ProtocolError(f"a frame begins with {magic:#06x}, not with {MAGIC:#06x}")
            body = start + HEADER_BYTES
            if length <= INLINE_BODY_BYTES:
                return self._short_frame(code, body, body + length)
            if length > self.max_body:
                raise ProtocolError(f"a body of {length} bytes is too long")
            self._code, self._left, self._start = code, length, body
            self._target = self._open_body(code, length)
        if not self._fill():
            return None
        target, self._target = self._target, None
        return Frame(self._code, target)

    def _short_frame(self, code: int, body: int, end: int) -> Frame | None:
        """The frame whose body lies from ``body`` to ``end``, if all of it is there."""
        if end < self._end:
            self._start = end
        elif end == self._end:
            self._start = self._end = 0
        else:
            return None
        return Frame(code, bytes(self._view[body:end])) if body < end else _BODILESS[code]

    def _fill(self) -> bool:
        """Move what the parse buffer holds of the open body; whether the body is whole."""
        assert self._target is not None
        while self._left and self._start < self._end:
            window = self._target.buffer()
            if not window:
                return False
            n = min(self._left, self._end - self._start, len(window))
            window[:n] = self._view[self._start : self._start + n]
            self._target.advance(n)
            self._start += n
            self._left -= n
        if self._start == self._end:
            self._start = self._end = 0
        return not self._left


class BodyReader:
    """Reads the fields of a request's body in order; what is left is a view, not a copy."""

    def __init__(self, body: bytes | memoryview) -> None:
        self._view = memoryview(body)
        self._at = 0

    def _take(self, length: int) -> memoryview:
        end = self._at + length
        if end > len(self._view):
            raise CommandError("malformed body: it ends too early")
        part = self._view[self._at : end]
        self._at = end
        return part

    def u16(self) -> int:
        return int.from_bytes(self._take(2), "little")

    def u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        """Several numbers at once."""
        return layout.unpack(self._take(layout.size))

    def sid(self) -> bytes:
        """A length and as many bytes, at least one."""
        name = bytes(self._take(self.u16()))
        if not name:
            raise CommandError("a session id has 1 to 65535 bytes")
        return name

    def rest(self) -> memoryview:
        """All bytes that are left."""
        return self._take(len(self._view) - self._at)

    def end(self) -> None:
        """Raise CommandError when anything is left."""
        if self._at != len(self._view):
            raise CommandError("malformed body: bytes are left over")
