"""On which device K/V are kept, and with it where queries over them are computed.

The host is always there. Metal and CUDA are reached through MLX, which need not be
installed; everything that touches it runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pion_vllm_mlx.config import forced_kernel
from pion_vllm_mlx.kernels import choice, transfer
from pion_vllm_mlx.kernels.prefix import Prefix
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
    return replace(resident, prefix=transfer.device_prefix(resident.prefix))


def on_host(residents: Sequence[Resident]) -> list[Prefix]:
    """The rows of several in numpy's arrays; what some have in common stays one."""
    return transfer.moved_together([one.prefix for one in residents], to_device=False)


def all_on_device(residents: Sequence[Resident]) -> list[Resident]:
    """The same K/V in MLX's memory; the blocks that some share are moved once."""
    prefixes = transfer.moved_together([one.prefix for one in residents], to_device=True)
    return [replace(one, prefix=prefix) for one, prefix in zip(residents, prefixes, strict=True)]
