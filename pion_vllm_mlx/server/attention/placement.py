"""On which device K/V are kept, and with it where queries over them are computed.

The host is always there. Metal and CUDA are reached through MLX, which need not be
installed; everything that touches it runs on the engine's thread.
"""

from __future__ import annotations

from dataclasses import replace

from pion_vllm_mlx.config import forced_kernel
from pion_vllm_mlx.kernels import api, choice, transfer
from pion_vllm_mlx.kernels.prefix import Side
from pion_vllm_mlx.server.attention.resident import Resident

HOST = "cpu"


def find_device(wanted: str) -> str:
    """Where attention runs: ``cpu``, or what MLX has where anything else is wanted.

    Raises ConfigError for kernels that are forced by name and cannot run here.
    """
    forced = forced_kernel()
    if forced is not None:
        choice.named_kernels(forced)
    if wanted == HOST:
        return HOST
    try:
        return choice.mlx_device()
    except ImportError:
        return HOST


def on_device(resident: Resident) -> Resident:
    """The same K/V in the memory of MLX's default device."""
    prefix = resident.prefix
    keys, values = (_moved(side) for side in (prefix.keys, prefix.values))
    return replace(resident, prefix=api.Prefix(keys, values, prefix.num_tokens))


def _moved(side: Side) -> Side:
    if not isinstance(side, api.Affine):
        return transfer.to_mlx(side)
    codes = transfer.to_mlx(side.codes, bf16=False)
    scales, biases = transfer.to_mlx(side.scales), transfer.to_mlx(side.biases)
    return api.Affine(codes, scales, biases, side.bits, side.group)
