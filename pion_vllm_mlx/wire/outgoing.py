"""Commands as buffers to send: small arguments joined, large ones left where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Part: TypeAlias = bytes | bytearray | memoryview | str | int | NDArray[Any]

_JOIN_BELOW = 16 * 1024


def request_buffers(commands: Iterable[Sequence[Part]]) -> list[memoryview]:
    """The bytes of the commands, in order, as buffers for scatter/gather sending.

    An argument of 16 KiB or more becomes a buffer of its own that shares its memory,
    unless it is an array that isn't C-contiguous. Raises TypeError for another type
    of argument, a bool or a float included.
    """
    buffers: list[memoryview] = []
    joined = bytearray()
    for parts in commands:
        joined += b"*%d\r\n" % len(parts)
        for part in parts:
            data = _octets(part)
            joined += b"$%d\r\n" % len(data)
            if len(data) < _JOIN_BELOW:
                joined += data
            else:
                buffers += (memoryview(joined), memoryview(data))
                joined = bytearray()
            joined += b"\r\n"
    if joined:
        buffers.append(memoryview(joined))
    return buffers


def _octets(part: Part) -> bytes | bytearray | memoryview:
    """The argument's bytes; ``len`` of the result counts them."""
    if isinstance(part, (bytes, bytearray)):
        return part
    if isinstance(part, str):
        return part.encode("utf-8", "surrogateescape")
    if isinstance(part, int) and not isinstance(part, bool):
        return b"%d" % part
    if isinstance(part, np.ndarray):
        flat = np.ascontiguousarray(part).reshape(-1)
        return flat.view(np.uint8).data if flat.size else b""
    if isinstance(part, memoryview):
        return part.cast("B") if part.nbytes and part.c_contiguous else part.tobytes()
    raise TypeError(f"{type(part).__name__} cannot be an argument of a command")
