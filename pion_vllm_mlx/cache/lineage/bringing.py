"""The bytes of rows where the CPU can read them, shared with the array where that costs nothing.

Looking at an array waits until it is computed. Under CUDA it is then brought to the host, all of
it at the first look, and no other thread of Python runs meanwhile: large ones come over in pieces.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache import evaluation

PIECE_BYTES = 2 << 20
"""An H200 takes a quarter to half of a millisecond to bring so many to the host."""

Bytes = NDArray[np.uint8]


def shared(raw: mx.array) -> Bytes:
    """All bytes of an array of bytes, shared with it."""
    return np.asarray(memoryview(raw))  # type: ignore[arg-type]  # mlx's stubs omit the buffer protocol


def rows_of(raw: mx.array, heads: slice, first: int, last: int) -> Bytes:
    """``[H, last - first, bytes]``: some heads and rows of ``[1, H, n, bytes]``."""
    if raw.nbytes <= PIECE_BYTES or not evaluation.on_cuda():
        return shared(raw)[0, heads, first:last]
    return in_pieces(raw[0, heads, first:last])


def in_pieces(part: mx.array) -> Bytes:
    """The bytes of ``[H, n, bytes]``, brought over in pieces of ``PIECE_BYTES`` and less."""
    heads, count, width = part.shape
    found = np.empty((heads, count, width), np.uint8)
    step = max(1, PIECE_BYTES // max(1, heads * width))
    for start in range(0, count, step):
        piece = part[:, start : start + step] + 0  # a copy: a view would bring all of it
        mx.eval(piece)
        found[:, start : start + step] = shared(piece)
    return found
