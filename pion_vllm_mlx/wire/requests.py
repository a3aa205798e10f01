"""Requests: bytes on a connection become commands, without a socket in sight.

The caller asks :meth:`RequestParser.get_buffer` where the next bytes go, receives
into it, and reports them with :meth:`RequestParser.buffer_updated`::

    header, small arguments  ->  the parse buffer  ->  bytes
    a longer bulk string     ->  straight into its BulkTarget's window

A bulk string longer than ``Limits.inline_bulk_bytes`` is announced to ``open_bulk``
before its first byte is read. What of it already lies in the parse buffer is copied
once; the rest never touches the parse buffer. Limits are checked on the header.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pion_vllm_mlx.errors import ProtocolError
from pion_vllm_mlx.wire.inline import split_inline

_KIB = 1024
_BASE_CAPACITY = 16 * _KIB
_SCRATCH_BYTES = 64 * _KIB
_MAX_HEADER = 32
# A web page can make a browser send requests here, whose lines would be commands.
_HTTP_WORDS = frozenset({b"post", b"host:"})
# A header's digits are looked up first: faster than int(), and as strict.
_SMALL_LENGTHS = {b"%d" % n: n for n in range(1024)}


@dataclass(frozen=True)
class Limits:
    """What one connection may ask the parser to hold; sizes in bytes.

    ``unknown_client``: nobody has authenticated yet. What is over a limit then waits until the
    commands before it are taken out of ``commands``: one of them may be AUTH.
    """

    max_bulk: int = 512 * _KIB * _KIB
    max_command: int = 1024 * _KIB * _KIB
    max_args: int = 1_048_576
    max_inline: int = 64 * _KIB
    inline_bulk_bytes: int = 64 * _KIB
    unknown_client: bool = False


#: what redis lets a client ask for that has not given the password.
UNAUTHENTICATED = Limits(max_bulk=16 * _KIB, max_args=10, unknown_client=True)


class BulkTarget(Protocol):
    """Where the bytes of one long bulk string go."""

    @property
    def length(self) -> int:
        """Bytes of the whole bulk string."""

    def buffer(self) -> memoryview | None:
        """Writable window for the next bytes; None while there is no room.

        May be called more than once for the same bytes. A window is valid until
        the next :meth:`advance`.
        """

    def advance(self, n: int) -> None:
        """Take note that the first ``n`` bytes of the window are filled."""


class MemoryBulk:
    """A bulk string in one bytearray of its full length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.view = memoryview(bytearray(length))
        self.filled = 0

    def buffer(self) -> memoryview | None:
        """The part that is not filled yet."""
        return self.view[self.filled :]

    def advance(self, n: int) -> None:
        """Move the window past ``n`` bytes."""
        self.filled += n


class DiscardBulk:
    """A bulk string of a refused command: read to stay in sync, kept nowhere."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))

    def buffer(self) -> memoryview | None:
        """The same small window every time."""
        return self._scratch

    def advance(self, n: int) -> None:
        """Forget ``n`` bytes."""


Arg: TypeAlias = bytes | BulkTarget
OpenBulk: TypeAlias = Callable[[list[Arg], int], BulkTarget]


def open_in_memory(args: list[Arg], length: int) -> BulkTarget:
    """The plain ``open_bulk``: every long bulk string in memory of its own."""
    return MemoryBulk(length)


class RequestParser:
    """Turns the bytes of one connection into ``commands``.

    ``commands`` holds complete commands in order; an argument is ``bytes``, or the
    filled target of a long bulk string. ``error`` is set once, by the first bytes
    that are not RESP; commands before it stay valid, nothing after it is parsed.
    ``limits`` may be replaced between two calls. ``waits``: what comes next is over a limit
    that a command before it may lift; ``buffer_updated(0)`` once they are executed goes on.
    """

    def __init__(self, limits: Limits, open_bulk: OpenBulk = open_in_memory) -> None:
        self.limits = limits
        self.commands: deque[list[Arg]] = deque()
        self.error: ProtocolError | None = None
        self.waits = False
        self._open_bulk = open_bulk
        self._view = memoryview(bytearray(_BASE_CAPACITY))
        self._start = 0
        self._end = 0
        self._args: list[Arg] = []
        self._args_left = 0
        self._command_bytes = 0
        self._need = 1  # bytes from _start on before parsing can go further
        self._last_read = 0
        self._target: BulkTarget | None = None
        self._target_left = 0

    @property
    def in_bulk(self) -> bool:
        """Whether a long bulk string is half received."""
        return self._target is not None and self.error is None

    @property
    def open_target(self) -> tuple[BulkTarget | None, int]:
        """The target of the half received long bulk string, and how many bytes it lacks."""
        return (self._target, self._target_left) if self.in_bulk else (None, 0)

    @property
    def mid_command(self) -> bool:
        """Whether a command is half received."""
        return self.error is None and (self._args_left > 0 or self._start < self._end)

    @property
    def args_so_far(self) -> list[Arg]:
        """The arguments of the half received command, the open target left out."""
        return self._args

    def abandon(self) -> list[Arg]:
        """Give up the half received command: its arguments, the open target included.

        After an error these are what the refused bytes had opened: what the targets
        hold has to be given back.
        """
        args = self._args if self._target is None else [*self._args, self._target]
        self._args, self._args_left, self._target = [], 0, None
        return args

    def get_buffer(self) -> memoryview | None:
        """Where the next bytes go; None while the open target has no room.

        After None, call ``buffer_updated(0)`` once the target has room again: bytes
        that arrived earlier may still wait in the parse buffer.
        """
        if self.error is not None:
            return self._view
        if self.waits:
            return None
        if self._target is not None and self._target_left:
            if self._start < self._end:
                return None
            window = self._target.buffer()
            return None if not window else window[: self._target_left]
        self._make_room()
        return self._view[self._end :]

    def buffer_updated(self, n: int) -> None:
        """Take in ``n`` bytes that were received into ``get_buffer()``'s window."""
        if self.error is not None:
            return
        if self._target is not None and self._target_left and n:
            self._target.advance(n)
            self._target_left -= n
        else:
            self._end += n
            self._last_read = n
        self.waits = False
        try:
            self._parse()
        except ProtocolError as error:
            self.error = error
            self._start = self._end = 0

    def bulk_received(self, n: int) -> None:
        """Take note of ``n`` bytes that the open target got, and counted, by another way."""
        self._target_left -= n
        self.buffer_updated(0)

    # -- the parse buffer ---------------------------------------------------

    def _make_room(self) -> None:
        """Leave free space behind ``_end``, enough for what is being waited for."""
        held = self._end - self._start
        capacity = len(self._view)
        if held == 0 and capacity > _BASE_CAPACITY and self._last_read < _BASE_CAPACITY:
            self._view = memoryview(bytearray(_BASE_CAPACITY))
        elif self._need > capacity:
            view = memoryview(bytearray(self._need + _BASE_CAPACITY))
            view[:held] = self._view[self._start : self._end]
            self._view = view
        elif self._start + self._need > capacity or capacity - self._end < capacity // 4:
            self._view[:held] = bytes(self._view[self._start : self._end])
        elif held:
            return
        self._start, self._end = 0, held

    # -- parsing ------------------------------------------------------------

    def _parse(self) -> None:
        while True:
            if self._target is not None:
                if not self._fill_target():
                    return
            if self._end - self._start < self._need:
                return
            if not self._parse_buffer():
                return

    def _fill_target(self) -> bool:
        """Move what the parse buffer holds of the open bulk string; True when whole."""
        target = self._target
        assert target is not None
        while self._target_left:
            n = min(self._target_left, self._end - self._start)
            window = target.buffer() if n else None
            if not window:
                return False
            n = min(n, len(window))
            window[:n] = self._view[self._start : self._start + n]
            self._start += n
            self._target_left -= n
            target.advance(n)
        if self._end - self._start < 2:
            self._need = 2
            return False
        if self._view[self._start : self._start + 2].tobytes() != b"\r\n":
            raise ProtocolError("Protocol error: expected CRLF after bulk string")
        self._start += 2
        self._target = None
        self._take(target)
        return True

    def _take(self, arg: Arg) -> None:
        self._args.append(arg)
        self._args_left -= 1
        self._need = 1
        if not self._args_left:
            self.commands.append(self._args)
            self._args = []
            self._command_bytes = 0

    def _parse_buffer(self) -> bool:
        """Parse what the buffer holds; True when a long bulk string was opened.

        Works on one ``bytes`` copy: finding, slicing and keeping arguments is then
        one step each, which is what many small pipelined commands cost.
        """
        data = bytes(self._view[self._start : self._end])
        base = self._start
        at = 0
        lengths = _SMALL_LENGTHS
        self._need = 1
        while at < len(data):
            if not self._args_left:
                at, whole = self._command_header(data, at)
                if not whole:
                    break
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0 or data[at] != 36 or line_end - at > _MAX_HEADER:
                _refuse_bulk_header(data, at)
                break
            digits = data[at + 1 : line_end]
            length = lengths.get(digits)
            if length is None:
                length = _decimal(digits, "Protocol error: invalid bulk length")
            if not self._admits(length):
                break
            if length > self.limits.inline_bulk_bytes:
                self._start = base + line_end + 2
                self._command_bytes += length
                self._target = self._open_bulk(self._args, length)
                self._target_left = length
                return True
            body = line_end + 2
            stop = body + length
            if stop + 2 > len(data):
                self._need = stop + 2 - at
                break
            if data[stop : stop + 2] != b"\r\n":
                raise ProtocolError("Protocol error: expected CRLF after bulk string")
            self._command_bytes += length
            self._args.append(data[body:stop])
            at = stop + 2
            self._args_left -= 1
            if not self._args_left:
                self.commands.append(self._args)
                self._args = []
                self._command_bytes = 0
        self._start = base + at
        return False

    def _admits(self, length: int) -> bool:
        """Refuse a bulk string over a limit, before any of it is read; False: it has to wait."""
        limits = self.limits
        if length <= limits.max_bulk and self._command_bytes + length <= limits.max_command:
            return True
        if not limits.unknown_client or length > Limits.max_bulk:
            raise ProtocolError("Protocol error: invalid bulk length")
        return self._may_be_lifted("Protocol error: unauthenticated bulk length")

    def _may_be_lifted(self, refusal: str) -> bool:
        """Raise the refusal unless commands have to be executed first; then False."""
        if not self.commands:
            raise ProtocolError(refusal)
        self.waits = True
        return False

    def _command_header(self, data: bytes, at: int) -> tuple[int, bool]:
        """Read ``*<count>`` or an inline command; where it ends, and whether whole."""
        if data[at] != 42:
            return self._inline_command(data, at)
        line_end = data.find(b"\r\n", at, at + _MAX_HEADER)
        if line_end < 0:
            if len(data) - at >= _MAX_HEADER:
                raise ProtocolError("Protocol error: too big mbulk count string")
            return at, False
        digits = data[at + 1 : line_end]
        count = _SMALL_LENGTHS.get(digits)
        if count is None:
            if digits[:1] == b"-" and digits[1:].isdigit():
                count = 0
            else:
                count = _decimal(digits, "Protocol error: invalid multibulk length")
        if count > self.limits.max_args:
            if not self.limits.unknown_client or count > Limits.max_args:
                raise ProtocolError("Protocol error: invalid multibulk length")
            return at, self._may_be_lifted("Protocol error: unauthenticated multibulk length")
        self._args_left = count
        return line_end + 2, True

    def _inline_command(self, data: bytes, at: int) -> tuple[int, bool]:
        line_end = data.find(b"\n", at)
        length = (line_end if line_end >= 0 else len(data)) - at
        if length > self.limits.max_inline:
            raise ProtocolError("Protocol error: too big inline request")
        if line_end < 0:
            self._need = length + 1
            return at, False
        line = data[at:line_end].removesuffix(b"\r")
        words = split_inline(line)
        if words:
            if words[0].lower() in _HTTP_WORDS:
                raise ProtocolError("Protocol error: HTTP is not spoken here")
            self.commands.append(list(words))
        return line_end + 1, True


def _decimal(digits: bytes, refusal: str) -> int:
    """Digits as a number; a sign, a blank or a leading zero is a ProtocolError."""
    if not digits.isdigit() or (digits[0] == 48 and len(digits) > 1):
        raise ProtocolError(refusal)
    return int(digits)


def _refuse_bulk_header(data: bytes, at: int) -> None:
    """Raise for a bulk header that can't become valid; return if it is only cut."""
    if data[at] != 36:
        got = chr(data[at]) if 32 <= data[at] < 127 else f"\\x{data[at]:02x}"
        raise ProtocolError(f"Protocol error: expected '$', got '{got}'")
    if len(data) - at > _MAX_HEADER:
        raise ProtocolError("Protocol error: too big bulk count string")
