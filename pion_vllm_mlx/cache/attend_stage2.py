"""The layers of a plain cache as attention slots want them: float32 ``[H_kv, N, D]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import UnsupportedCache

Floats = NDArray[np.float32]


def plain_layers(cache: list[Any], num_tokens: int) -> Iterator[tuple[Floats, Floats]]:
    """K and V of every layer, one after the other.

    Raises UnsupportedCache, before the first, where a slot is no plain KVCache, or its keys are
    of another shape than its values: such a prefix cannot be made resident by ``stage2``.
    """
    for index, entry in enumerate(cache):
        if type(entry).__name__ != "KVCache":
            raise UnsupportedCache(f"stage2 needs plain caches; slot {index} is a {type(entry)}")
        shapes = entry.keys.shape, entry.values.shape
        if shapes[0] != shapes[1]:
            raise UnsupportedCache(
                f"stage2 needs keys and values of one shape; slot {index} has {shapes}"
            )
    return ((_rows(c.keys, num_tokens), _rows(c.values, num_tokens)) for c in cache)


def _rows(buffer: mx.array, num_tokens: int) -> Floats:
    return np.array(buffer[0, :, :num_tokens].astype(mx.float32))
