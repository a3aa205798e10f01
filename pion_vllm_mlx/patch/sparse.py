"""What ``sparse_full_layers`` may say: which blocks of a prefix a single query sees."""

from __future__ import annotations

from typing import Any

from pion_vllm_mlx.cache.attend_request import whole_number
from pion_vllm_mlx.kernels.api import Selection

NAME = "sparse_full_layers"
DEFAULT_SPARSE: dict[str, Any] = {"K_block": 64, "K_blocks": 8, "selector": "block_mean"}
_SELECTORS = {"": "mean", "block_mean": "mean", "block-mean": "mean", "quest": "quest"}


def checked_mode(asked: dict[str, Any] | bool | None) -> dict[str, Any] | None:
    """The whole mode, None for dense attention.

    Raises TypeError for what is no mode, ValueError for one that cannot be, by name.
    """
    if asked is None or asked is False:
        return None
    if asked is not True and not isinstance(asked, dict):
        raise TypeError(
            f"{NAME} is True, False or a dict of {', '.join(DEFAULT_SPARSE)}, not {asked!r}"
        )
    given: dict[str, Any] = {} if asked is True else asked
    unknown = [str(name) for name in given if name not in DEFAULT_SPARSE]
    if unknown:
        known = ", ".join(DEFAULT_SPARSE)
        raise ValueError(f"{NAME} has {known}, not {', '.join(unknown)}")
    mode = {**DEFAULT_SPARSE, **given}
    for name in ("K_block", "K_blocks"):
        mode[name] = whole_number(mode[name], f"{NAME}[{name!r}]")
        if mode[name] < 1:
            raise ValueError(f"{NAME}[{name!r}] must be 1 or more, not {mode[name]}")
    if mode["selector"] not in tuple(_SELECTORS):
        raise ValueError(
            f"{NAME}['selector'] is block_mean or quest, not {mode['selector']!r}"
        )
    return mode


def selection(mode: dict[str, Any] | None) -> Selection | None:
    """What the kernels call a mode of ``checked_mode``."""
    if mode is None:
        return None
    name = _SELECTORS[mode["selector"]]
    return Selection(mode["K_block"], mode["K_blocks"], name)  # type: ignore[arg-type]
