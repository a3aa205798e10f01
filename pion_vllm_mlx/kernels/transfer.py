"""Arrays from numpy to mlx and back, and from one float type to another.

bf16 is ``bfloat16`` in mlx and ``uint16`` bit patterns in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels.problem import Affine, Array, Kernels, Prefix, Side, Suffix
from pion_vllm_mlx.kernels.threads import in_threads
from pion_vllm_mlx.kernels.widening import widened

DTYPES = ("fp32", "fp16", "bf16")
_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint16": "bf16"}

# Values converted by one thread at a time, and of these at once.
_RUN_VALUES = 1024 * 1024
_PART_VALUES = 32 * 1024


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


def dtype_name(array: Array) -> str:
    """``fp32``, ``fp16`` or ``bf16``: what an array of values holds."""
    return _named(array.dtype)


@lru_cache(maxsize=16)
def _named(dtype: Any) -> str:
    """Spelling a type takes as long as a small query."""
    return _NAMES[str(dtype).rpartition(".")[2]]


def like(model: Array, array: Array) -> Array:
    """``array`` in the kind of ``model``; results of kernels, which know no bf16."""
    return to_host(array) if isinstance(model, np.ndarray) else to_mlx(array)


def settle(arrays: Sequence[Array]) -> None:
    """Have mlx evaluate its arrays at once: one after the other they would wait for each other."""
    if not isinstance(arrays[0], np.ndarray):
        import mlx.core as mx

        mx.eval(list(arrays))


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


def moved_together(prefixes: Sequence[Prefix], *, to_device: bool) -> list[Prefix]:
    """Prefixes in mlx arrays, or on the host; an array that several have is moved once."""
    move: Callable[[Array], Array] = to_mlx if to_device else to_host
    arrays: dict[int, Array] = {}

    def once(array: Array) -> Array:
        if id(array) not in arrays:
            arrays[id(array)] = move(array)
        return arrays[id(array)]

    return [one if one.is_host != to_device else _moved(one, once) for one in prefixes]


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
    kind = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}[dtype]
    if array.dtype == kind:
        return array
    source = np.ascontiguousarray(array).reshape(-1)
    out = np.empty(source.shape, kind)

    def convert(first: int) -> None:
        run = slice(first, first + _RUN_VALUES)
        for part in _parts(source[run], out[run]):
            _convert(*part)

    in_threads(range(0, source.size, _RUN_VALUES), convert)
    return out.reshape(array.shape)


def _parts(source: NDArray[Any], out: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Pieces whose temporaries stay in a core's cache."""
    for first in range(0, source.size, _PART_VALUES):
        yield source[first : first + _PART_VALUES], out[first : first + _PART_VALUES]


def _convert(source: NDArray[Any], out: NDArray[Any]) -> None:
    values = widened(source, "source")
    if out.dtype == np.uint16:
        out[...] = _bf16_bits(values)
        return
    with np.errstate(over="ignore"):  # beyond float16 is infinity, as mlx has it
        out[...] = values


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The upper halves of float32 in the low 16 bits, rounded to nearest even; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint32] = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded
