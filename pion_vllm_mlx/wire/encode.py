r"""Replies as bytes, in RESP2 or RESP3.

A value's wire form: ``Simple`` is ``+``, ``int`` is ``:``, ``bytes`` and ``str`` are
bulk strings, ``list`` and ``tuple`` arrays, ``None`` is nil, ``float`` a double (RESP2:
a bulk string), ``Map`` a map (RESP2: a flat array), ``Set`` a set (RESP2: an array),
``CommandError`` an error line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from pion_vllm_mlx.errors import CommandError

CRLF = b"\r\n"
#: longer ones are not copied into a piece with others.
_LONG_BYTES = 64 << 10


class Simple(str):
    """A status such as OK: travels as a simple string."""

    __slots__ = ()


class Map(list[tuple["Value", "Value"]]):
    """Pairs in order: a map in RESP3, a flat array in RESP2."""

    __slots__ = ()


class Set(list["Value"]):
    """Members in order: a set in RESP3, an array in RESP2."""

    __slots__ = ()


class NullArray:
    """Nothing where an array is due: a null array in RESP2, ``_`` in RESP3."""

    __slots__ = ()


NULL_ARRAY = NullArray()

Value: TypeAlias = (
    "Simple | str | bytes | bytearray | memoryview | int | float | None"
    " | CommandError | Map | Set | NullArray | Sequence[Value]"
)


def simple(text: str) -> bytes:
    """A simple string; line ends in it become blanks."""
    return b"+" + _one_line(text) + CRLF


def error(code: str, sentence: str) -> bytes:
    """An error line; line ends in it become blanks."""
    return b"-" + _one_line(f"{code} {sentence}") + CRLF


def integer(n: int) -> bytes:
    """An integer."""
    return b":%d\r\n" % n


def bulk_header(n: int) -> bytes:
    """The header of a bulk string of ``n`` bytes; the bytes and CRLF follow it."""
    return b"$%d\r\n" % n


def bulk(data: bytes | bytearray | memoryview) -> bytes:
    """A bulk string, joined: for small data."""
    return b"".join((bulk_header(memoryview(data).nbytes), data, CRLF))


def nil(proto: int) -> bytes:
    """Nothing: ``_`` in RESP3, the null bulk string in RESP2."""
    return b"_\r\n" if proto >= 3 else b"$-1\r\n"


def array_header(n: int) -> bytes:
    """The header of an array of ``n`` values."""
    return b"*%d\r\n" % n


def map_header(n: int, proto: int) -> bytes:
    """The header of a map of ``n`` pairs; in RESP2 of a flat array of 2n values."""
    return b"%%%d\r\n" % n if proto >= 3 else b"*%d\r\n" % (2 * n)


def set_header(n: int, proto: int) -> bytes:
    """The header of a set of ``n`` members; in RESP2 of an array."""
    return b"~%d\r\n" % n if proto >= 3 else b"*%d\r\n" % n


def double(x: float, proto: int) -> bytes:
    """A double in the shortest form that reads back equal."""
    text = double_text(x).encode()
    return b",%b\r\n" % text if proto >= 3 else bulk(text)


def double_text(x: float) -> str:
    """``3`` for 3.0, ``inf``, ``-inf``, ``nan``, else the shortest exact decimal."""
    if math.isfinite(x) and x == int(x) and abs(x) < 1e15:
        return str(int(x)) if x or math.copysign(1.0, x) > 0 else "-0"
    return repr(x)


def encode(value: Value, proto: int) -> bytes:
    """Any nested value as one joined reply; raises TypeError for other types."""
    out: list[bytes] = []
    _encode(value, proto, out)
    return b"".join(out)


def windows(value: Value, proto: int, nbytes: int) -> Iterator[bytes]:
    """A nested value in pieces of about ``nbytes``, each made when it is asked for.

    Longer replies keep their long ``bytes`` as pieces that are no copies. Raises TypeError
    for other types.
    """
    out: list[bytes] = []
    held, whole = 0, True
    for item in _items(value, proto, out):
        begin = len(out)
        _encode(item, proto, out)
        held += sum(map(len, out[begin:]))
        if held > nbytes:
            yield from _joined(out)
            out.clear()
            held, whole = 0, False
    if whole:
        yield b"".join(out)
    elif out:
        yield from _joined(out)


def _items(value: Value, proto: int, out: list[bytes]) -> Iterator[Value]:
    """What a value consists of, once its header is written; itself where that is nothing."""
    if isinstance(value, Map):
        out.append(map_header(len(value), proto))
        return chain.from_iterable(value)
    if isinstance(value, (list, tuple)):
        n = len(value)
        out.append(set_header(n, proto) if isinstance(value, Set) else array_header(n))
        return iter(value)
    return iter((value,))


def _joined(out: list[bytes]) -> Iterator[bytes]:
    """The pieces, all but long ones put together."""
    begin = 0
    for end, piece in enumerate(out):
        if len(piece) > _LONG_BYTES:
            if end > begin:
                yield b"".join(out[begin:end])
            yield piece
            begin = end + 1
    if begin < len(out):
        yield b"".join(out[begin:])


def _encode(value: Value, proto: int, out: list[bytes]) -> None:
    if value is None:
        out.append(nil(proto))
    elif isinstance(value, Simple):
        out.append(simple(value))
    elif isinstance(value, str):
        out.append(bulk(_bytes(value)))
    elif isinstance(value, bytes) and len(value) > _LONG_BYTES:
        out += (bulk_header(len(value)), value, CRLF)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        out.append(bulk(value))
    elif isinstance(value, int):
        out.append(integer(value))
    elif isinstance(value, float):
        out.append(double(value, proto))
    elif isinstance(value, CommandError):
        out.append(error(value.code, value.sentence))
    else:
        _encode_many(value, proto, out)


def _encode_many(
    value: Map | Set | NullArray | Sequence[Value], proto: int, out: list[bytes]
) -> None:
    if isinstance(value, NullArray):
        out.append(nil(proto) if proto >= 3 else b"*-1\r\n")
        return
    if isinstance(value, Map):
        out.append(map_header(len(value), proto))
        for key, item in value:
            _encode(key, proto, out)
            _encode(item, proto, out)
        return
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"no RESP form for {type(value).__name__}")
    n = len(value)
    out.append(set_header(n, proto) if isinstance(value, Set) else array_header(n))
    for item in value:
        _encode(item, proto, out)


def _one_line(text: str) -> bytes:
    return _bytes(text.replace("\r", " ").replace("\n", " "))


def _bytes(text: str) -> bytes:
    """Text of any origin: a file's name comes back as it is, half a character as ``\\ud800``."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")
