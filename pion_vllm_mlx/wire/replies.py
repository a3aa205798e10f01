r"""Replies: bytes from a server become values, without a socket in sight.

Reads RESP2 and RESP3. The caller receives into :meth:`ReplyParser.get_buffer`'s
window and reports the bytes with :meth:`ReplyParser.buffer_updated`, as with
requests. A bulk string longer than ``inline_bulk_bytes`` is received straight into
memory that ``open_bulk`` gives out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from pion_vllm_mlx.errors import CommandError, ProtocolError, from_wire
from pion_vllm_mlx.wire.encode import Map, Set, Simple

_KIB = 1024
INLINE_BULK_BYTES = 32 * _KIB
_CAPACITY = 64 * _KIB
_MAX_LINE = 64 * _KIB
_MAX_DEPTH = 16
_MAX_ITEMS = 4 * 1_048_576
_MAX_BULK = 1024 * _KIB * _KIB
_NUMBERS = {b"%d" % n: n for n in range(-1, 1024)}
_BULK_KINDS = b"$=!"
_AGGREGATES = {ord("*"): 1, ord("~"): 1, ord(">"): 1, ord("%"): 2, ord("|"): 2}


class Push(list["Reply"]):
    """An out-of-band message of RESP3; never the reply of a command."""

    __slots__ = ()


Reply: TypeAlias = (
    "Simple | bytes | memoryview | int | float | None | CommandError"
    " | Map | Set | Push | list[Reply]"
)
OpenReplyBulk: TypeAlias = Callable[[int], memoryview]


def allocate(length: int) -> memoryview:
    """The plain ``open_bulk``: fresh memory of the full length."""
    return memoryview(bytearray(length))


class _Frame:
    """An array, set or map whose items are still coming."""

    __slots__ = ("items", "kind", "left")

    def __init__(self, kind: int, left: int) -> None:
        self.kind = kind
        self.left = left
        self.items: list[Reply] = []

    def value(self) -> Reply:
        """The finished value."""
        if self.kind == 37:
            return Map(zip(self.items[::2], self.items[1::2], strict=True))
        if self.kind == 126:
            return Set(self.items)
        return Push(self.items) if self.kind == 62 else self.items


class ReplyParser:
    """Turns the bytes of one connection into ``replies``.

    A long bulk string becomes the ``memoryview`` that ``open_bulk`` gave for it, a
    short one ``bytes``; an error line becomes a ``CommandError`` value.
    Out-of-band messages go to ``pushes``.
    Raises ProtocolError from :meth:`buffer_updated` for bytes that are not RESP, or
    lie beyond the limits; the parser is of no use after that.
    """

    def __init__(
        self,
        open_bulk: OpenReplyBulk = allocate,
        *,
        inline_bulk_bytes: int = INLINE_BULK_BYTES,
        max_bulk: int = _MAX_BULK,
    ) -> None:
        self.replies: deque[Reply] = deque()
        self.pushes: deque[Push] = deque()
        self._open_bulk = open_bulk
        self._inline_bulk_bytes = min(inline_bulk_bytes, _CAPACITY - _KIB)
        self._max_bulk = max_bulk
        self._view = memoryview(bytearray(_CAPACITY + _MAX_LINE))
        self._start = 0
        self._end = 0
        self._stack: list[_Frame] = []
        self._window: memoryview | None = None
        self._window_kind = 0
        self._filled = 0
        self._raw: list[bytes | memoryview] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is half received and nothing waits to be taken."""
        return not (
            self.replies or self._stack or self._start < self._end or self._window is not None
        )

    @property
    def missing(self) -> int:
        """How many bytes of an open long bulk string are still to come; 0 when none is open."""
        return 0 if self._window is None else len(self._window) - self._filled

    @property
    def item_index(self) -> int:
        """Which item of the outermost array is being read; 0 outside of arrays."""
        return len(self._stack[0].items) if self._stack else 0

    def receive_into(self, open_bulk: OpenReplyBulk, inline_bulk_bytes: int) -> None:
        """From now on, ask ``open_bulk`` for longer bulk strings than that."""
        self._open_bulk = open_bulk
        self._inline_bulk_bytes = min(inline_bulk_bytes, _CAPACITY - _KIB)

    def keep_raw(self, keep: bool) -> None:
        """From now on, keep or do not keep the raw bytes of replies."""
        self._raw = [] if keep else None

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._window is not None and self._filled < len(self._window):
            return self._window[self._filled :]
        held = self._end - self._start
        if self._start:
            self._view[:held] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, held
        return self._view[self._end :]

    def buffer_updated(self, n: int) -> None:
        """Take in ``n`` bytes that were received into ``get_buffer()``'s window."""
        if self._window is not None and self._filled < len(self._window):
            self._filled += n
        else:
            self._end += n
        while self._step():
            pass

    def feed(self, data: bytes) -> None:
        """Take in bytes that were received elsewhere."""
        at = 0
        while at < len(data):
            window = self.get_buffer()
            n = min(len(window), len(data) - at)
            window[:n] = data[at : at + n]
            self.buffer_updated(n)
            at += n

    def take_raw(self) -> bytes:
        """The raw bytes since the last call; only under :meth:`keep_raw`."""
        raw = b"".join(self._raw or [])
        self._raw = []
        return raw

    # -- one value at a time --------------------------------------------------

    def _step(self) -> bool:
        """Parse one more value or header; False when more bytes are needed."""
        if self._window is not None:
            return self._fill_window()
        if self._start == self._end:
            return False
        limit = min(self._end, self._start + _MAX_LINE)
        line = self._line(limit)
        if line is None:
            if limit - self._start >= _MAX_LINE:
                raise ProtocolError("reply line too long")
            return False
        kind, rest = line[0], line[1:]
        if kind in _BULK_KINDS:
            return self._bulk(kind, rest, len(line) + 2)
        self._consume(len(line) + 2)
        if kind in _AGGREGATES:
            self._open_aggregate(kind, rest)
        else:
            self._value(_scalar(kind, rest))
        return True

    def _line(self, limit: int) -> bytes | None:
        """The line at the start of the buffer without CRLF; None when it is cut."""
        short = bytes(self._view[self._start : min(limit, self._start + 64)])
        end = short.find(b"\r\n")
        if end >= 0:
            return short[:end]
        if short[0] not in b"+-:,_#(*~>%|$=!":
            raise ProtocolError("reply starts with a byte that is no RESP type")
        if len(short) < 64:
            return None
        whole = bytes(self._view[self._start : limit])
        end = whole.find(b"\r\n")
        return None if end < 0 else whole[:end]

    def _bulk(self, kind: int, digits: bytes, header: int) -> bool:
        length = _number(digits)
        if length == -1:
            self._consume(header)
            self._value(None)
            return True
        if length < 0 or length > self._max_bulk:
            raise ProtocolError("reply with an invalid bulk length")
        if length > self._inline_bulk_bytes:
            self._consume(header)
            self._window = self._open_bulk(length)
            self._window_kind = kind
            self._filled = 0
            return True
        body = self._start + header
        stop = body + length
        if self._end < stop + 2:
            return False
        if self._view[stop : stop + 2].tobytes() != b"\r\n":
            raise ProtocolError("reply without CRLF after a bulk string")
        data = bytes(self._view[body:stop])
        self._consume(header + length + 2)
        self._value(_bulk_value(kind, data))
        return True

    def _fill_window(self) -> bool:
        """Move what the buffer holds of the open bulk string; True when whole."""
        window = self._window
        assert window is not None
        n = min(len(window) - self._filled, self._end - self._start)
        if n:
            window[self._filled : self._filled + n] = self._view[self._start : self._start + n]
            self._filled += n
            self._start += n
        if self._filled < len(window) or self._end - self._start < 2:
            return False
        if self._view[self._start : self._start + 2].tobytes() != b"\r\n":
            raise ProtocolError("reply without CRLF after a bulk string")
        if self._raw is not None:
            self._raw.append(window)
        self._consume(2)
        self._window = None
        self._value(_bulk_value(self._window_kind, window))
        return True

    def _open_aggregate(self, kind: int, digits: bytes) -> None:
        count = _number(digits)
        if count == -1 and kind == 42:
            self._value(None)
            return
        if count < 0 or count > _MAX_ITEMS:
            raise ProtocolError("reply with an invalid number of items")
        if len(self._stack) >= _MAX_DEPTH:
            raise ProtocolError("reply nested too deeply")
        frame = _Frame(kind, count * _AGGREGATES[kind])
        if frame.left:
            self._stack.append(frame)
        elif kind != 124:
            self._value(frame.value())

    def _value(self, value: Reply) -> None:
        """Put a finished value where it belongs; closes what it completes."""
        while self._stack:
            frame = self._stack[-1]
            frame.items.append(value)
            frame.left -= 1
            if frame.left:
                return
            self._stack.pop()
            if frame.kind == 124:  # an attribute describes the value after it: dropped
                return
            value = frame.value()
        if isinstance(value, Push):
            self.pushes.append(value)
        else:
            self.replies.append(value)

    def _consume(self, n: int) -> None:
        if self._raw is not None:
            self._raw.append(bytes(self._view[self._start : self._start + n]))
        self._start += n


def _bulk_value(kind: int, data: bytes | memoryview) -> Reply:
    """A bulk string as it is, a verbatim one without its type, an error as such."""
    if kind == 61:
        return data[4:]
    return from_wire(bytes(data).decode("utf-8", "replace")) if kind == 33 else data


def _scalar(kind: int, rest: bytes) -> Reply:
    if kind == 43:
        return Simple(rest.decode("utf-8", "replace"))
    if kind == 45:
        return from_wire(rest.decode("utf-8", "replace"))
    if kind == 58 or kind == 40:
        return _number(rest)
    if kind == 95 and not rest:
        return None
    if kind == 35 and rest in (b"t", b"f"):
        return rest == b"t"
    if kind == 44:
        return _double(rest)
    raise ProtocolError("reply that is not valid RESP")


def _number(digits: bytes) -> int:
    known = _NUMBERS.get(digits)
    if known is not None:
        return known
    unsigned = digits[1:] if digits[:1] in (b"-", b"+") else digits
    if not unsigned.isdigit() or len(digits) > 64:
        raise ProtocolError("reply with a number that is none")
    return int(digits)


def _double(text: bytes) -> float:
    if b"_" in text or text != text.strip():
        raise ProtocolError("reply with a double that is none")
    try:
        return float(text)
    except ValueError:
        raise ProtocolError("reply with a double that is none") from None
