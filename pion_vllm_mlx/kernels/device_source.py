"""Programs of the GPU kernels, and what one launch of one is.

A program is the text of a kernel (``device_text``) under macros, which say how K and V are held,
and template arguments, which are integers.  Texts know nothing of mlx: tests run the same ones in
an emulation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.problem import Array

# mlx passes an input of fewer values in Metal's constant address space.
SMALL_INPUT = 8

Kind = Literal["f32", "f16", "bf16", "i32", "u32", "u8"]

_KINDS: dict[str, Kind] = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "uint16": "bf16",  # numpy knows no bfloat16: its bit patterns
    "int32": "i32",
    "uint32": "u32",
    "uint8": "u8",
}


def kind_of(array: Array) -> Kind:
    """The type of an array of numpy or mlx."""
    return _kind(array.dtype)


@lru_cache(maxsize=32)
def _kind(dtype: Any) -> Kind:
    """Spelling a type takes longer than the rest of a launch's signature."""
    return _KINDS[str(dtype).rpartition(".")[2]]


@dataclass(frozen=True)
class Dialect:
    """A language of kernels and what its devices like.

    ``row_quads``: quads of values of all rows of a tile that one thread may keep;
    ``few_rows``: query rows of a KV head up to which keys are split over threads, not rows;
    ``threadgroups``: how many a launch should have; ``part_keys``: the fewest keys of a part;
    ``unroll``: keys of a thread that are under way at once, for one row of 16 bits;
    ``tensor_dim``: head dimension up to which there is ``tensor_rows``, for rows of 16 bits;
    ``thread_values``: values of a key that one thread holds, where the head dimension allows it;
    ``whole_keys``: keys up to which one launch of ``few_rows`` visits them all, without parts to
    merge: in ``whole_simdgroups``, ``whole_unroll`` keys of a thread under way, and with fewer
    rows in a tile where there are less than ``whole_tiles``;
    ``merges``: kernels of few rows merge their parts in the same launch;
    ``includes``: its compiler reads files that a text names;
    ``group_warps``, ``group_blocks``, ``group_keys``: of ``group_rows``, warps of a threadgroup,
    how many of these a launch should have, and the fewest keys of each.
    """

    name: Literal["metal", "cuda"]
    suffix: str
    row_quads: int
    few_rows: int
    threadgroups: int
    unroll: int
    thread_values: int
    part_keys: int = 64
    simdgroups: int = 4
    tensor_dim: int = 0
    whole_keys: int = 256
    whole_simdgroups: int = 8
    whole_unroll: int = 4
    whole_tiles: int = 1
    merges: bool = False
    includes: bool = False
    group_warps: int = 8
    group_blocks: int = 264
    group_keys: int = 128


METAL = Dialect(
    "metal", "metal", row_quads=8, few_rows=8, threadgroups=256, unroll=4, thread_values=24
)
CUDA = Dialect(
    "cuda",
    "cu",
    row_quads=16,
    few_rows=16,
    threadgroups=528,
    unroll=16,
    thread_values=8,
    tensor_dim=128,
    whole_keys=1024,
    whole_unroll=8,
    whole_tiles=128,
    merges=True,
    includes=True,
)


@dataclass(frozen=True)
class Launch:
    """One launch: which kernel, on what, into what.

    ``inputs`` and ``outputs`` in the order of the signature; an output is (name, shape, type).
    Through the arrays that ``exchanged`` names threadgroups tell each other something.
    ``groups`` counts threadgroups, of ``threads`` threads each.
    """

    kernel: str
    defines: tuple[tuple[str, str], ...]
    template: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[str, Array], ...]
    outputs: tuple[tuple[str, tuple[int, ...], Kind], ...]
    groups: tuple[int, int, int]
    threads: int
    exchanged: tuple[str, ...] = ()

    def signature(self) -> Signature:
        """What of this launch decides which program runs."""
        return Signature(
            self.kernel,
            self.defines,
            self.template,
            tuple((name, kind_of(array), array.size < SMALL_INPUT) for name, array in self.inputs),
            tuple((name, kind) for name, _, kind in self.outputs),
        )


@dataclass(frozen=True)
class Signature:
    """A program: a kernel's text with its macros, template arguments and parameter types.

    ``inputs`` are (name, type, whether in the constant address space), ``outputs`` (name, type).
    """

    kernel: str
    defines: tuple[tuple[str, str], ...]
    template: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[str, Kind, bool], ...]
    outputs: tuple[tuple[str, Kind], ...]


class Runner(ABC):
    """Runs launches: on a device through mlx, or in a test's emulation."""

    dialect: Dialect

    @abstractmethod
    def run(self, launch: Launch) -> list[Array]:
        """The outputs of a launch, in its order; those of mlx are lazy."""

    @abstractmethod
    def settle(self, arrays: list[Array]) -> None:
        """Compute lazy arrays now."""

    @abstractmethod
    def given(self, values: NDArray[np.int32]) -> Array:
        """Integers of one launch as an array of the runner's kind."""

    def constant(self, values: NDArray[np.int32]) -> Array:
        """The same for integers that many launches read."""
        return self.given(values)

    @abstractmethod
    def counters(self, count: int) -> Array:
        """At least ``count`` zeros that a launch counts with; it leaves zeros."""
