"""Arrays from numpy to mlx and back, and from one float type to another.

bf16 is ``bfloat16`` in mlx and ``uint16`` bit patterns in numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels.problem import Affine, Array, Kernels, Prefix, Side, Suffix

DTYPES = ("fp32", "fp16", "bf16")


def to_host(array: Array) -> NDArray[Any]:
    """An mlx array as a numpy array, without a copy where mlx's memory can be read; evaluates."""
    if isinstance(array, np.ndarray):
        return array
    import mlx.core as mx

    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array, copy=None)


def to_mlx(array: Array) -> Array:
    """A numpy array as an mlx array; ``uint16`` is bf16."""
    if not isinstance(array, np.ndarray):
        return array
    import mlx.core as mx

    moved = mx.array(array)
    return moved.view(mx.bfloat16) if moved.dtype == mx.uint16 else moved


def like(model: Array, array: Array) -> Array:
    """``array`` in the kind of ``model``; results of kernels, which know no bf16."""
    return to_host(array) if isinstance(model, np.ndarray) else to_mlx(array)


def array_for(kernels: Kernels, array: Array) -> Array:
    """``array`` in the kind that ``kernels`` work on."""
    return to_host(array) if kernels.host else to_mlx(array)


def prefix_for(kernels: Kernels, prefix: Prefix) -> Prefix:
    """``prefix`` in the kind that ``kernels`` work on; the same object where it is already."""
    if prefix.is_host == kernels.host:
        return prefix
    return _moved(prefix, to_host if kernels.host else to_mlx)


def device_prefix(prefix: Prefix) -> Prefix:
    """``prefix`` in mlx arrays; the same object where it is already."""
    return _moved(prefix, to_mlx) if prefix.is_host else prefix


def _moved(prefix: Prefix, move: Callable[[Array], Array]) -> Prefix:
    def side(given: Side) -> Side:
        return given.mapped(move) if isinstance(given, Affine) else move(given)

    return Prefix(side(prefix.keys), side(prefix.values), prefix.num_tokens, prefix.table)


def suffix_for(kernels: Kernels, suffix: Suffix | None) -> Suffix | None:
    """``suffix`` in the kind that ``kernels`` work on."""
    if suffix is None:
        return None
    return Suffix(array_for(kernels, suffix.keys), array_for(kernels, suffix.values))


def converter(array: Array, dtype: str) -> Callable[[Array], Array]:
    """The function that turns arrays of the kind of ``array`` into ``dtype``.

    Raises CommandError for a dtype other than fp32, fp16 and bf16.
    """
    if dtype not in DTYPES:
        raise CommandError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if isinstance(array, np.ndarray):
        return lambda given: _host_converted(given, dtype)
    import mlx.core as mx

    kind = {"fp32": mx.float32, "fp16": mx.float16, "bf16": mx.bfloat16}[dtype]
    return lambda given: given.astype(kind)


def _host_converted(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """A host array of values as ``dtype``, rounded to nearest even; the same one if it is that."""
    if array.dtype == {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}[dtype]:
        return array
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "bf16":
        return _bf16_bits(array.astype(np.float32, copy=False))
    with np.errstate(over="ignore"):  # beyond float16 is infinity, as mlx has it
        return array.astype(np.float32 if dtype == "fp32" else np.float16, copy=False)


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32, rounded to nearest even; a NaN stays one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits >> np.uint32(16)) & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    halves: NDArray[np.uint16] = rounded.astype(np.uint16)
    return halves
