"""Which implementation runs a request: by array kind, device and shape, from a table.

``choices.json`` is a list of rules; the first that fits and whose kernels are available here
decides.  A rule fits where each of these that it names does:

==============  ===================================================================
arrays          ``numpy`` or ``mlx``: what the prefix is made of
device          ``metal``, ``cuda`` or ``cpu``: mlx's default device
operation       a list of ``attend``, ``fused``, ``sparse``, ``blocks``, ``select``
min_tokens      least number of prefix tokens (N)
max_queries     greatest number of query rows (H_q * M)
==============  ===================================================================

``PION_KERNEL`` names one implementation for everything, whatever the table says; arrays of the
other kind are converted for it, which is slow and meant for tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.resources import files

from pion_vllm_mlx.config import forced_kernel
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.kernels.problem import Kernels

_MODULES = {
    "reference": ("pion_vllm_mlx.kernels.reference", "ReferenceKernels"),
    "cpu": ("pion_vllm_mlx.kernels.cpu", "CpuKernels"),
    "mlx": ("pion_vllm_mlx.kernels.mlx_expression", "MlxKernels"),
    "metal": ("pion_vllm_mlx.kernels.metal_kernels", "MetalKernels"),
    "cuda": ("pion_vllm_mlx.kernels.cuda_kernels", "CudaKernels"),
}

OPERATIONS = ("attend", "fused", "sparse", "blocks", "select")


@dataclass(frozen=True)
class Request:
    """What the choice depends on: operation, array kind, N, and query rows H_q * M."""

    operation: str
    host: bool
    num_tokens: int
    num_rows: int


@dataclass(frozen=True)
class Rule:
    """A row of the table; None fits everything."""

    kernel: str
    arrays: str | None = None
    device: str | None = None
    operation: tuple[str, ...] | None = None
    min_tokens: int = 0
    max_queries: int | None = None

    def fits(self, request: Request, device: Callable[[], str]) -> bool:
        """Whether the rule speaks of such a request."""
        return (
            self.arrays in (None, "numpy" if request.host else "mlx")
            and (self.operation is None or request.operation in self.operation)
            and request.num_tokens >= self.min_tokens
            and (self.max_queries is None or request.num_rows <= self.max_queries)
            and (self.device is None or self.device == device())
        )


def kernel_names() -> list[str]:
    """The names that a rule and PION_KERNEL may use."""
    return list(_MODULES)


def named_kernels(name: str) -> Kernels:
    """The implementation called ``name``.

    Raises ConfigError for an unknown name, listing the known ones, and for one that cannot run
    here, with the reason.
    """
    if name not in _MODULES:
        raise ConfigError(f"unknown kernel {name!r}; known: {', '.join(_MODULES)}")
    kernels, reason = _loaded(name)
    if kernels is None or reason is not None:
        raise ConfigError(f"kernel {name!r} cannot run here: {reason}")
    return kernels


def choose(request: Request) -> Kernels:
    """The implementation for a request: the forced one, else the first of the table that fits.

    Raises ConfigError as ``named_kernels`` does, for a forced one.
    """
    forced = forced_kernel()
    if forced is not None:
        return named_kernels(forced)
    for rule in table():
        if rule.fits(request, mlx_device):
            kernels, reason = _loaded(rule.kernel)
            if kernels is not None and reason is None:
                return kernels
    raise ConfigError(f"no kernel for {request.operation} is available here")


@lru_cache(maxsize=1)
def table() -> tuple[Rule, ...]:
    """The rules of ``choices.json``; raises ConfigError for a rule that is not one."""
    text = files("pion_vllm_mlx.kernels").joinpath("choices.json").read_text(encoding="utf-8")
    return tuple(_rule(row) for row in json.loads(text))


def _rule(row: dict[str, object]) -> Rule:
    try:
        rule = Rule(**row)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"choices.json: {error}") from error
    if rule.kernel not in _MODULES:
        raise ConfigError(f"choices.json: unknown kernel {rule.kernel!r}")
    unknown = set(rule.operation or ()) - set(OPERATIONS)
    if unknown:
        raise ConfigError(f"choices.json: unknown operation {', '.join(sorted(unknown))}")
    return rule


@lru_cache(maxsize=len(_MODULES))
def _loaded(name: str) -> tuple[Kernels | None, str | None]:
    """The implementation, and why it cannot run here; both are settled once a process."""
    module, kind = _MODULES[name]
    try:
        kernels: Kernels = getattr(import_module(module), kind)()
    except ImportError as error:
        return None, str(error)
    return kernels, kernels.unavailable()


def mlx_device() -> str:
    """``metal``, ``cuda`` or ``cpu``: where mlx's default device is."""
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
