"""Which implementation runs a request: by array kind, device and shape, from a table.

``choices.json`` is a list of rules; the first that fits and whose kernels are available here
decides.  A rule fits where each of these that it names does:

==============  ===================================================================
arrays          ``numpy`` or ``mlx``: what the prefix is made of
device          ``metal``, ``cuda`` or ``cpu``: mlx's default device
operation       a list of ``attend``, ``fused``, ``sparse``, ``blocks``, ``select``
min_tokens      least number of prefix tokens (N)
max_queries     greatest number of query rows (H_q * M)
min_sharing     least number of query rows that share a KV head (H_q * M / H_kv)
min_dim         least head dimension (D)
dtype           a list of ``fp32``, ``fp16``, ``bf16``: K and V, or their scales
quantized       true or false: whether K and V are groups of codes
==============  ===================================================================

The rule of ``cuda`` that names ``mlx`` stands for rows of ``batched`` in the results of
``benchmarks/reproducers/kernels.py --device cuda``: where many query rows of 512 values share a KV
head, the expression takes half as long; ``tests/kernels/test_choice.py`` compares them row by row.
They are measured as servers run, without TF32: with it the expression would be faster in more
rows, and lose bits that float32 has.  mlx's own attention is not among the kernels: it gives no
log-sum-exp, and wants Q, and returns its output, in the type of K and V, where ours are float32.

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
# What the fields of a rule may be.
_SIZES = ("min_tokens", "max_queries", "min_sharing", "min_dim")
_LISTS = {"operation": OPERATIONS, "dtype": ("fp32", "fp16", "bf16")}
_WORDS = {
    "kernel": tuple(_MODULES),
    "arrays": ("numpy", "mlx"),
    "device": ("metal", "cuda", "cpu"),
}


@dataclass(frozen=True)
class Request:
    """What the choice depends on.

    Operation, whether the arrays are numpy's, N, query rows H_q * M, H_kv, D, the type of K and V
    (of their scales, where they are quantized).
    """

    operation: str
    host: bool
    num_tokens: int
    num_rows: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    quantized: bool


@dataclass(frozen=True)
class Rule:
    """A row of the table; None fits everything."""

    kernel: str
    arrays: str | None = None
    device: str | None = None
    operation: tuple[str, ...] | None = None
    min_tokens: int = 0
    max_queries: int | None = None
    min_sharing: int = 0
    min_dim: int = 0
    dtype: tuple[str, ...] | None = None
    quantized: bool | None = None

    def fits(self, request: Request, device: Callable[[], str]) -> bool:
        """Whether the rule speaks of such a request."""
        return (
            self.arrays in (None, "numpy" if request.host else "mlx")
            and (self.operation is None or request.operation in self.operation)
            and self._fits_sizes(request)
            and (self.dtype is None or request.dtype in self.dtype)
            and self.quantized in (None, request.quantized)
            and (self.device is None or self.device == device())
        )

    def _fits_sizes(self, request: Request) -> bool:
        return (
            request.num_tokens >= self.min_tokens
            and (self.max_queries is None or request.num_rows <= self.max_queries)
            and request.num_rows >= self.min_sharing * request.num_kv_heads
            and request.head_dim >= self.min_dim
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
    return tuple(rule_of(row) for row in json.loads(text))


def rule_of(row: object) -> Rule:
    """The rule that a row of the file says.

    Raises ConfigError for what is no object, for a field that no rule has, and for a value that
    its field cannot have.
    """
    if not isinstance(row, dict) or "kernel" not in row:
        raise ConfigError(f"choices.json: {row!r} is no rule with a kernel")
    values = {}
    for field, value in row.items():
        if field in _SIZES:
            known = type(value) is int and value >= 0
        elif field == "quantized":
            known = type(value) is bool
        elif field in _LISTS:
            known = isinstance(value, list) and all(one in _LISTS[field] for one in value)
            value = tuple(value) if known else value
        else:
            known = field in _WORDS and value in _WORDS[field]
        if not known:
            raise ConfigError(f"choices.json: {field} cannot be {value!r}")
        values[field] = value
    return Rule(**values)


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
