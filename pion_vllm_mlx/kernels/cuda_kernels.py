"""The kernels on an NVIDIA GPU: ``cuda/*.cu`` through ``mx.fast.cuda_kernel``."""

from __future__ import annotations

from pion_vllm_mlx.kernels.device_kernels import DeviceKernels
from pion_vllm_mlx.kernels.device_source import CUDA
from pion_vllm_mlx.kernels.mlx_runner import MlxRunner


class CudaKernels(DeviceKernels):
    """Every kernel in CUDA, on mlx arrays."""

    def __init__(self) -> None:
        super().__init__(MlxRunner(CUDA))

    def unavailable(self) -> str | None:
        """Why there is no CUDA here; None where there is."""
        try:
            import mlx.core as mx
        except ImportError:
            return "mlx is not installed"
        return None if mx.cuda.is_available() else "mlx finds no CUDA device"
