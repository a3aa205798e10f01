"""Bytes into a parser in pieces, as a transport would bring them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pion_vllm_mlx.wire.resp import BulkTarget, Limits, MemoryBulk, RequestParser


def feed(parser: RequestParser, data: bytes) -> None:
    """Bring ``data`` in whatever pieces the parser's windows allow."""
    at = 0
    while at < len(data):
        window = parser.get_buffer()
        assert window is not None, "the parser asks to pause"
        n = min(len(window), len(data) - at)
        window[:n] = data[at : at + n]
        parser.buffer_updated(n)
        at += n


def feed_at(parser: RequestParser, data: bytes, cuts: Sequence[int]) -> None:
    """Bring ``data`` cut at the given positions."""
    for start, stop in pairwise([0, *sorted(cuts), len(data)]):
        feed(parser, data[start:stop])


def commands_of(parser: RequestParser) -> list[list[bytes]]:
    """The parsed commands with every argument as bytes."""
    return [[plain(arg) for arg in command] for command in parser.commands]


def plain(arg: bytes | BulkTarget) -> bytes:
    if isinstance(arg, bytes):
        return arg
    assert isinstance(arg, MemoryBulk)
    assert arg.filled == arg.length
    return bytes(arg.view)


def small_parser(inline_bulk_bytes: int = 8) -> RequestParser:
    """A parser that gives a target to every bulk string over a few bytes."""
    return RequestParser(Limits(inline_bulk_bytes=inline_bulk_bytes))


def request(*args: bytes) -> bytes:
    """A command in its wire form, written independently of the product."""
    head = f"*{len(args)}\r\n".encode()
    return head + b"".join(b"$" + str(len(a)).encode() + b"\r\n" + a + b"\r\n" for a in args)
