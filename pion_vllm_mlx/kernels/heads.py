"""Which queries share a KV head, so that one matrix product serves them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class HeadGroups:
    """The query heads of each KV head, as the rows of a table.

    ``slots`` ``[U, G]``: the query heads that use the u-th of the U used KV heads; a shorter row is
    filled up by repeating its first head.  ``rows`` ``[H_q]``: where in the flattened table a query
    head stands.  ``used`` ``[U]``: the KV heads, None where all H_kv are used.  ``in_order``: the
    flattened table is 0 ... H_q - 1, so that a reshape groups the queries.
    """

    slots: NDArray[np.intp]
    rows: NDArray[np.intp]
    used: NDArray[np.intp] | None
    in_order: bool


def head_groups(head_map: NDArray[np.uint8], num_kv_heads: int) -> HeadGroups:
    """The groups of ``head_map`` u8 ``[H_q]``, entries below ``num_kv_heads``; for reading only."""
    return _groups(head_map.tobytes(), num_kv_heads)


@lru_cache(maxsize=64)
def _groups(head_map_bytes: bytes, num_kv_heads: int) -> HeadGroups:
    """A model has one map, and a small query takes no longer than this."""
    head_map = np.frombuffer(head_map_bytes, np.uint8)
    num_heads = len(head_map)
    order = np.argsort(head_map, kind="stable")
    used, first, counts = np.unique(head_map[order], return_index=True, return_counts=True)
    widest = int(counts.max())
    inside = np.arange(widest)[None, :]
    at = first[:, None] + np.where(inside < counts[:, None], inside, 0)
    slots = order[at]
    rows = np.empty(num_heads, np.intp)
    group = np.repeat(np.arange(len(used)), counts)
    rows[order] = group * widest + np.arange(num_heads) - first[group]
    every = len(used) == num_kv_heads
    in_order = every and np.array_equal(slots.reshape(-1), np.arange(num_heads))
    return HeadGroups(slots, rows, None if every else used.astype(np.intp), in_order)
