"""Prompts of different lengths that are prefilled at once get what each would get alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402

from pion_vllm_mlx.cache.padding import pads_wrongly  # noqa: E402
from tests.models import NAMES, tiny_model, token_ids  # noqa: E402

MOST = 8
CLOSE = 1e-4
PROMPTS = [token_ids(size, 300 + size) for size in (20, 24, 33, 47)]


def first_logits(model: Any, prompts: list[list[int]], at_once: int) -> list[Any]:
    """The log probabilities of each prompt's first new token, ``at_once`` prefilled together."""
    batch: Any = BatchGenerator(model, prefill_batch_size=at_once, completion_batch_size=MOST)
    uids = batch.insert(prompts, max_tokens=[1] * len(prompts))
    found: dict[int, Any] = {}
    while len(found) < len(prompts):
        for reply in batch.next()[1]:
            found.setdefault(reply.uid, np.array(reply.logprobs.astype(mx.float32)))
    batch.close()
    return [found[uid] for uid in uids]


@pytest.mark.parametrize("family", NAMES)
def test_prompts_of_different_lengths_at_once_have_the_logits_of_each_alone(family: str) -> None:
    model = tiny_model(family)
    at_once = 1 if pads_wrongly(model) else MOST
    together = first_logits(model, PROMPTS, at_once)
    for prompt, logits in zip(PROMPTS, together, strict=True):
        (alone,) = first_logits(model, [prompt], 1)
        assert np.abs(logits - alone).max() < CLOSE
