"""When the lazily loaded arrays of a mapped file are read.

Under CUDA many large reads at a time slow each other down: 64 arrays, 1.08 GB, took an H200
980 ms all at once and 360 ms one after the other; 270 MB took 85 ms either way. Elsewhere MLX
reads several at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

#: more bytes than this are read array by array under CUDA.
CUDA_AT_ONCE_BYTES = 200_000_000


def begin(arrays: Sequence[mx.array]) -> None:
    """Starts reading beside what the caller does before it calls ``finish``.

    On the arrays' own stream: waiting on a GPU for what the CPU's stream was given so, hangs.
    """
    if not _one_at_a_time(arrays):
        mx.async_eval(list(arrays))  # type: ignore[no-untyped-call]


def finish(arrays: Sequence[mx.array]) -> None:
    """Evaluates all. Raises RuntimeError for a file that cannot be read."""
    if _one_at_a_time(arrays):
        for array in arrays:
            mx.eval(array)
    else:
        mx.eval(list(arrays))


def settle(arrays: Sequence[mx.array]) -> None:
    """Evaluates all, and leaves nothing in them that a later use would have to wait for.

    The first look at an evaluated array takes the event off it that it was computed behind;
    two threads must not do so at once.
    """
    mx.eval(list(arrays))
    mx.eval(list(arrays))


def on_cuda() -> bool:
    """Whether MLX computes on an NVIDIA GPU."""
    return bool(mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available())


def _one_at_a_time(arrays: Sequence[mx.array]) -> bool:
    return on_cuda() and sum(array.nbytes for array in arrays) > CUDA_AT_ONCE_BYTES
