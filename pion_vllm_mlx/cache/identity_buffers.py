"""Whether an array was assigned into, seen by the memory its numbers lie in.

``array[0] = x`` and ``array += x`` give the same Python object another buffer. The old one
is kept alive here, so that its address cannot be given to the new one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import mlx.core as mx


class Buffers:
    """The buffers of evaluated arrays. Half a microsecond an array to look at."""

    def __init__(self, arrays: Iterable[mx.array] = ()) -> None:
        self._kept: list[tuple[mx.array, mx.array, int]] = []
        if not _readable_where_they_are():
            return
        for array in arrays:
            address = _address(array)
            # The flat array shares the buffer of a contiguous one; others are not watched.
            flat = array.reshape(-1)
            if address is not None and address == _address(flat):
                self._kept.append((array, flat, address))

    def changed(self) -> list[mx.array]:
        """The arrays that lie elsewhere now."""
        return [array for array, _, address in self._kept if _address(array) != address]


def _readable_where_they_are() -> bool:
    """Not under CUDA, where looking at an array would copy it to the host."""
    return mx.default_device().type == mx.DeviceType.cpu or mx.metal.is_available()


def _address(array: mx.array) -> int | None:
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # not contiguous, or empty
        return None
