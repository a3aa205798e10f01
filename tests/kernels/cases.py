"""Requests to try kernels with: dimensions combined pairwise, fresh random values each run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels import transfer
from pion_vllm_mlx.kernels.api import Affine, Prefix, Suffix
from pion_vllm_mlx.kernels.problem import HEAD_DIMS

HEAD_MAPS = {
    "identity": [0, 1, 2],
    "groups of 4": [0, 0, 0, 0, 1, 1, 1, 1],
    "one KV head": [0, 0, 0],
    "interleaved": [0, 1, 2, 0, 1, 2],
    "uneven, one unused": [3, 0, 3, 1, 0, 3],
}
STORED = (
    *("fp32", "fp16", "bf16"),
    *("4 bits of 32", "8 bits of 32", "4 bits of 32, fp32", "8 bits of 32, bf16"),
)

AXES: dict[str, tuple[Any, ...]] = {
    "head_dim": HEAD_DIMS,
    "stored": STORED,
    "page": (None, 16, 48),
    "num_tokens": (1, 5, 63, 64, 65, 300, 1025),
    "window": (0, 1, 40, 299, 5000),
    "head_map": tuple(HEAD_MAPS),
    "num_queries": (None, 1, 3, 17),
    "num_suffix": (None, 0, 1, 3, 70),
    "q_type": ("fp32", "fp16", "bf16"),
}


@dataclass(frozen=True)
class Case:
    """One request: Q ``[H_q, D]`` or ``[H_q, M, D]``, prefix, suffix, map, window; on the host."""

    q: NDArray[Any]
    prefix: Prefix
    suffix: Suffix | None
    head_map: NDArray[np.uint8]
    window: int

    @property
    def start(self) -> int:
        """The first token of the window."""
        num = self.prefix.num_tokens
        return num - self.window if 0 < self.window < num else 0


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every pair of values of two axes occurs; greedy, the same for a seed."""
    rng = np.random.default_rng(seed)
    names = list(axes)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }

    def covered(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}

    rows = []
    while missing:
        a, i, b, j = min(missing)
        tries = []
        for _ in range(30):
            row = [int(rng.integers(len(axes[name]))) for name in names]
            row[a], row[b] = i, j
            tries.append(row)
        best = max(tries, key=lambda row: len(covered(row) & missing))
        missing -= covered(best)
        rows.append({name: axes[name][at] for name, at in zip(names, best, strict=True)})
    return rows


def label(row: Mapping[str, Any]) -> str:
    """A test id."""
    return "-".join(str(value).replace(" ", "_") for value in row.values())


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Random values of ``fp32``, ``fp16`` or ``bf16`` (bit patterns)."""
    drawn = rng.standard_normal(shape).astype(np.float32)
    return transfer.converter(drawn, dtype)(drawn)


def affine(
    rng: np.random.Generator, shape: tuple[int, ...], bits: int, group: int, of: str = "fp16"
) -> Affine:
    """Random codes whose values are about as large as those of ``values``.

    Scales and biases are ``of`` fp32, fp16 or bf16.
    """
    *outer, dim = shape
    codes = rng.integers(0, 2**32, (*outer, dim * bits // 32), dtype=np.uint32)
    grouped = (*outer, dim // group)
    scales = (rng.uniform(2.0, 4.0, grouped) / 2**bits).astype(np.float32)
    biases = rng.uniform(-2.0, -1.0, grouped).astype(np.float32)
    if of != "fp32":
        scales, biases = (transfer.converter(part, of)(part) for part in (scales, biases))
    return Affine(codes, scales, biases, bits, group)


def side(rng: np.random.Generator, shape: tuple[int, ...], stored: str) -> Any:
    """Random rows ``shape`` as they are stored."""
    if stored[0] in "48":
        return affine(rng, shape, int(stored[0]), 32, stored.partition(", ")[2] or "fp16")
    return values(rng, shape, stored)


def prefix(
    rng: np.random.Generator, shape: tuple[int, int, int], stored: str, page: int | None = None
) -> Prefix:
    """A random prefix of ``shape`` (H_kv, N, D); paged: its blocks lie in the pool in any order."""
    num_heads, num_tokens, dim = shape
    if page is None:
        # Rows behind the last token, as caches that grow in steps have them, count for nothing.
        full = (num_heads, num_tokens + 7, dim)
        return Prefix(side(rng, full, stored), side(rng, full, stored), num_tokens)
    num_pages = -(-num_tokens // page)
    pool = (num_pages + 2, num_heads, page, dim)
    table = rng.permutation(num_pages + 2)[: num_pages + 1].astype(np.int32)
    return Prefix(side(rng, pool, stored), side(rng, pool, stored), num_tokens, table)


def suffix(rng: np.random.Generator, shape: tuple[int, int, int], dtype: str = "fp32") -> Suffix:
    """A random suffix of ``shape`` (H_kv, S, D)."""
    return Suffix(values(rng, shape, dtype), values(rng, shape, dtype))


def case(rng: np.random.Generator, row: Mapping[str, Any]) -> Case:
    """A random request of the dimensions of ``row``, which has the names of ``AXES``."""
    head_map = np.array(HEAD_MAPS[row["head_map"]], np.uint8)
    num_kv_heads, dim = int(head_map.max()) + 1, row["head_dim"]
    num_queries = row["num_queries"]
    q_shape = (len(head_map), dim) if num_queries is None else (len(head_map), num_queries, dim)
    num_suffix = row["num_suffix"]
    return Case(
        values(rng, q_shape, row["q_type"]),
        prefix(rng, (num_kv_heads, row["num_tokens"], dim), row["stored"], row["page"]),
        None if num_suffix is None else suffix(rng, (num_kv_heads, num_suffix, dim)),
        head_map,
        row["window"],
    )
