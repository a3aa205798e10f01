"""What the slots of a cache are made of, as a record lists them: classes, arrays, conversions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pion_vllm_mlx.cache.leaf import ArraySpec


def classes(slots: list[dict[str, Any]]) -> list[Any]:
    """The class of each slot, with those inside of it."""
    return [(slot["class"], classes(slot.get("caches", []))) for slot in slots]


def array_specs(slots: list[dict[str, Any]]) -> Iterator[ArraySpec]:
    """All arrays, depth first."""
    for slot in slots:
        yield from array_specs(slot.get("caches", []))
        yield from map(ArraySpec.from_json, slot.get("arrays", []))


_NATIVE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def conversion_of(slots: list[dict[str, Any]], leaves: list[dict[str, Any]]) -> str | None:
    """From which dtype to which format rows were converted, or None."""
    for spec in array_specs(slots):
        leaf = leaves[spec.layer]
        stored = str(leaf.get(f"{spec.side}_format", leaf["format"]))
        if spec.dim and not stored.startswith("raw:") and _NATIVE.get(stored) != spec.dtype:
            return f"{spec.dtype} -> {stored}"
    return None
