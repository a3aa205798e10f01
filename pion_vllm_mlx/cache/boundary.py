"""Storage formats that differ over the layers: keys and the outer layers in fp16.

With ``boundary_protect=N`` the keys of every layer and the values of the first and the
last N layers are stored in fp16, the values between in ``vquant``. The sessions of such a
prefix are made by V.CREATE SCHEMA, which knows no heads: its rows are token-major.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pion_vllm_mlx.cache.boundary_settings import check_width
from pion_vllm_mlx.cache.lanes_codec import stored_as
from pion_vllm_mlx.cache.leaf import LeafSpec, Side
from pion_vllm_mlx.errors import ConfigError

MAX_LAYERS = 59
PROTECTED = "fp16"


def storage_leaves(leaves: Sequence[LeafSpec], vquant: str | None, protect: int) -> list[LeafSpec]:
    """The leaves in the formats in which they are stored.

    Raises ConfigError for a cache that ``protect`` cannot be had for.
    """
    if not protect or not leaves:
        return [stored_as(leaf, vquant) for leaf in leaves]
    if len(leaves) > MAX_LAYERS:
        raise ConfigError(
            f"boundary_protect is for up to {MAX_LAYERS} layers, this cache has {len(leaves)}"
        )
    inner = range(protect, len(leaves) - protect)
    return [_protected(leaf, vquant if leaf.layer in inner else PROTECTED) for leaf in leaves]


def _protected(leaf: LeafSpec, vquant: str | None) -> LeafSpec:
    if leaf.format.startswith("raw:"):
        raise ConfigError("boundary_protect is for caches of floating point rows")
    wanted = vquant or leaf.format
    check_width(wanted, leaf.v_width)
    return replace(leaf, format=PROTECTED, v_format=wanted, token_major=True)


def schema(leaves: Sequence[LeafSpec], side: Side) -> list[str]:
    """One spec of V.CREATE SCHEMA a leaf; a side without rows is a layer that stays empty."""
    specs = []
    for leaf in leaves:
        width = leaf.width(side)
        name = leaf.format_of(side) if width else PROTECTED
        specs.append(f"fmt={name},dim={width or 1}")
    return specs
