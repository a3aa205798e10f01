"""Launches through mlx: each program is made once, and kept by what decides it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.device_source import Dialect, Launch, Runner, Signature, body, header
from pion_vllm_mlx.kernels.problem import Array

# Head dimensions, types, layouts and tile sizes multiply; a process meets few of them.
_MAX_PROGRAMS = 512


class MlxRunner(Runner):
    """Runs launches on mlx's device; what it returns is lazy."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._program = lru_cache(maxsize=_MAX_PROGRAMS)(self._make_program)

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

    def constant(self, values: NDArray[np.int32]) -> Array:
        """Integers as an mlx array."""
        import mlx.core as mx

        return mx.array(values)

    def _make_program(self, signature: Signature) -> Callable[..., Any]:
        import mlx.core as mx

        make: Any = mx.fast.metal_kernel if self.dialect.name == "metal" else mx.fast.cuda_kernel
        program: Callable[..., Any] = make(
            name=signature.name(self.dialect),
            input_names=[name for name, _, _ in signature.inputs],
            output_names=[name for name, _ in signature.outputs],
            header=header(self.dialect, signature),
            source=body(self.dialect, signature),
        )
        return program
