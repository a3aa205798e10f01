"""The kernels on an Apple GPU: ``metal/*.metal`` through ``mx.fast.metal_kernel``.

Not run on Apple hardware: the texts are tested in a host emulation (tests/metal_emulation).
"""

from __future__ import annotations

from pion_vllm_mlx.kernels.device_kernels import DeviceKernels
from pion_vllm_mlx.kernels.device_source import METAL
from pion_vllm_mlx.kernels.mlx_runner import MlxRunner


class MetalKernels(DeviceKernels):
    """Every kernel in Metal, on mlx arrays."""

    def __init__(self) -> None:
        super().__init__(MlxRunner(METAL))

    def unavailable(self) -> str | None:
        """Why there is no Metal here; None where there is."""
        try:
            import mlx.core as mx
        except ImportError:
            return "mlx is not installed"
        return None if mx.metal.is_available() else "mlx finds no Metal device"
