"""Launches through mlx: each program is made once, and kept by what decides it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.device_source import Dialect, Launch, Runner, Signature
from pion_vllm_mlx.kernels.device_text import body, header, program_name
from pion_vllm_mlx.kernels.problem import Array

# Launches that may be under way at once with counters of their own: far more than a graph has.
_COUNTERS = 1024

# Head dimensions, types, layouts and tile sizes multiply; a process meets few of them.
_MAX_PROGRAMS = 512


class MlxRunner(Runner):
    """Runs launches on mlx's device; what it returns is lazy."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._program = lru_cache(maxsize=_MAX_PROGRAMS)(self._make_program)
        self._counters = lru_cache(maxsize=None)(self._make_counters)

    def run(self, launch: Launch) -> list[Array]:
        """The outputs of a launch, lazily."""
        import mlx.core as mx

        dtypes = {"f32": mx.float32, "i32": mx.int32}
        x, y, z = launch.groups
        outputs: list[Array] = self._program(launch.signature())(
            inputs=[array for _, array in launch.inputs],
            template=list(launch.template),
            grid=(x * launch.threads, y, z),
            threadgroup=(launch.threads, 1, 1),
            output_shapes=[shape for _, shape, _ in launch.outputs],
            output_dtypes=[dtypes[kind] for _, _, kind in launch.outputs],
        )
        return outputs

    def settle(self, arrays: list[Array]) -> None:
        """Evaluate arrays."""
        import mlx.core as mx

        mx.eval(arrays)

    def given(self, values: NDArray[np.int32]) -> Array:
        """Integers as an mlx array."""
        import mlx.core as mx

        return mx.array(values)

    def constant(self, values: NDArray[np.int32]) -> Array:
        """Integers in the GPU's own memory: what the host makes, it may have to fetch again."""
        import mlx.core as mx

        array = mx.array(values) + 0
        mx.eval(array)
        return array

    def counters(self, count: int) -> Array:
        """Zeros that no other launch under way counts with."""
        return next(self._counters(max(64, 1 << (count - 1).bit_length())))

    def _make_counters(self, count: int) -> Iterator[Array]:
        """Parts of one array in turn: launches of a graph that need not wait run at once."""
        import mlx.core as mx

        zeros = mx.zeros((_COUNTERS, count), mx.int32) + 0
        mx.eval(zeros)
        parts = [zeros[number] for number in range(_COUNTERS)]
        mx.eval(parts)
        return itertools.cycle(parts)

    def _make_program(self, signature: Signature) -> Callable[..., Any]:
        import mlx.core as mx

        make: Any = mx.fast.metal_kernel if self.dialect.name == "metal" else mx.fast.cuda_kernel
        program: Callable[..., Any] = make(
            name=program_name(self.dialect, signature),
            input_names=[name for name, _, _ in signature.inputs],
            output_names=[name for name, _ in signature.outputs],
            header=header(self.dialect, signature),
            source=body(self.dialect, signature),
        )
        return program
