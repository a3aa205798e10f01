"""What a cache says about the tokens that follow it, bit for bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from pion_vllm_mlx.cache.prefill import prefill
from tests.models import token_ids


def unstored(model: Any, ids: list[int], chunk: int | None = None) -> list[Any]:
    """A cache of ``ids`` that was never stored, built with the splits of the prompt cache."""
    return prefill(model, np.array(ids, np.uint32), chunk_tokens=chunk).cache


def continued(model: Any, cache: list[Any], suffix: int = 3, steps: int = 5) -> list[bytes]:
    """The bytes of the logits of a suffix and of the greedy tokens after it."""
    ids = mx.array(token_ids(suffix, seed=11))
    seen = []
    for _ in range(steps):
        logits = model(ids[None], cache=cache)[:, -1].astype(mx.float32)
        mx.eval(logits)
        seen.append(bytes(memoryview(logits)))
        ids = mx.argmax(logits, axis=-1)
    return seen
