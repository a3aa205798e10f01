"""The attention patch: mlx-lm computes the attention over a prefix where the prefix lives.

``install_pion_attention_patch()`` replaces the one function through which mlx-lm's models
attend; ``make_pion_prompt_cache(model, namespace, prompt_cache, n)`` makes the cache whose
prefix is elsewhere. Without MLX the names are there, and raise PionMlxCompatError.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pion_vllm_mlx.errors import PionMlxCompatError
from pion_vllm_mlx.patch.seam import mlx_lm_seam_report

__all__ = [
    "PionPrefixCache",
    "install_pion_attention_patch",
    "make_pion_prompt_cache",
    "mlx_lm_seam_report",
    "uninstall_pion_attention_patch",
]

try:
    from pion_vllm_mlx.patch.build import (
        install_pion_attention_patch,
        make_pion_prompt_cache,
        uninstall_pion_attention_patch,
    )
    from pion_vllm_mlx.patch.prefix_cache import PionPrefixCache
except ImportError as _error:
    if (_error.name or "").partition(".")[0] not in ("mlx", "mlx_lm"):
        raise
    _missing = _error

    def _refused(*args: Any, **options: Any) -> NoReturn:
        """Raises PionMlxCompatError: MLX or mlx-lm is not installed."""
        raise PionMlxCompatError(
            f"{_missing}: pip install 'pion-vllm-mlx[mlx]'"
        ) from _missing

    install_pion_attention_patch = _refused
    uninstall_pion_attention_patch = _refused
    make_pion_prompt_cache = _refused
    PionPrefixCache = None  # type: ignore[assignment,misc]
