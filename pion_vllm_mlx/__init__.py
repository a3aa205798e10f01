"""A prefix KV cache for mlx-lm: a prefix is prefilled once and reused by every process.

The public names load on first use, so importing the package imports neither ``mlx`` nor
``mlx_lm``: the server runs where neither is installed.  Using a name that needs MLX without
it raises ``ImportError`` saying what to install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
    from pion_vllm_mlx.errors import (
        CommandError,
        ConfigError,
        DataFolderBusy,
        PionError,
        PionMlxCompatError,
        StoreUnavailable,
        UnsupportedCache,
    )
    from pion_vllm_mlx.patch import (
        PionPrefixCache,
        install_pion_attention_patch,
        make_pion_prompt_cache,
        mlx_lm_seam_report,
        uninstall_pion_attention_patch,
    )

__version__ = "0.1.0"

__all__ = [
    "CommandError",
    "ConfigError",
    "DataFolderBusy",
    "PionError",
    "PionMlxCompatError",
    "PionPrefixCache",
    "PionPromptCache",
    "StoreUnavailable",
    "UnsupportedCache",
    "__version__",
    "install_pion_attention_patch",
    "make_pion_prompt_cache",
    "mlx_lm_seam_report",
    "uninstall_pion_attention_patch",
]

_HOME = {
    "CommandError": "pion_vllm_mlx.errors",
    "ConfigError": "pion_vllm_mlx.errors",
    "DataFolderBusy": "pion_vllm_mlx.errors",
    "PionError": "pion_vllm_mlx.errors",
    "PionMlxCompatError": "pion_vllm_mlx.errors",
    "PionPrefixCache": "pion_vllm_mlx.patch",
    "PionPromptCache": "pion_vllm_mlx.cache.prompt_cache",
    "StoreUnavailable": "pion_vllm_mlx.errors",
    "UnsupportedCache": "pion_vllm_mlx.errors",
    "install_pion_attention_patch": "pion_vllm_mlx.patch",
    "make_pion_prompt_cache": "pion_vllm_mlx.patch",
    "mlx_lm_seam_report": "pion_vllm_mlx.patch",
    "uninstall_pion_attention_patch": "pion_vllm_mlx.patch",
}

_OPTIONAL = frozenset({"mlx", "mlx_lm"})


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use.

    Raises ``AttributeError`` for an unknown name, ``ImportError`` with advice where MLX or
    mlx-lm is missing.
    """
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OPTIONAL:
            raise
        raise ImportError(
            f"{name} needs the Python module {error.name}, which is not installed: "
            "pip install 'pion-vllm-mlx[mlx]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
