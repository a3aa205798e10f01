"""Buffers that a thread uses again: fresh memory costs more to touch than a chunk to compute."""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

# What is larger is not kept: a thread holds a few of these for good.
_KEPT_VALUES = 1024 * 1024


class Scratch(threading.local):
    """Float32 arrays by name, each thread's own.

    An array is good until the same thread asks for the same name again; nothing that a caller
    sees may lie in one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.float32]] = {}

    def floats(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array of ``shape`` with anything in it."""
        size = math.prod(shape)
        if size > _KEPT_VALUES:
            return np.empty(shape, np.float32)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.float32)
        return buffer[:size].reshape(shape)


SCRATCH = Scratch()
