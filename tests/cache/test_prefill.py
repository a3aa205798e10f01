"""The local prefill is mlx-lm's own, chunk by chunk."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.cache import prefill as module
from pion_vllm_mlx.cache.completion import token_ids as as_ids
from pion_vllm_mlx.cache.layers import cache_arrays
from tests.models import NAMES, tiny_model, token_ids


@pytest.mark.parametrize("name", NAMES)
def test_prefill_fills_the_cache_as_generate_step_does(name: str) -> None:
    model = tiny_model(name)
    ids = token_ids(75)
    theirs = make_prompt_cache(model)
    # generate_step leaves the last token to compute: 74 in chunks of 30, then one more.
    step = generate_step(mx.array(ids), model, prompt_cache=theirs, prefill_step_size=30,
                         max_tokens=0)  # fmt: skip
    for _ in step:
        pass
    ours = module.prefill(model, as_ids(ids[:74]), chunk_tokens=30)
    module.prefill(model, as_ids(ids[74:]), cache=ours.cache)
    assert ours.elapsed_ms > 0
    for left, right in zip(cache_arrays(theirs), cache_arrays(ours.cache), strict=True):
        assert left.shape == right.shape and mx.array_equal(left, right)


def test_chunks_are_as_long_as_asked_for() -> None:
    seen = []

    class Recording:
        def __init__(self) -> None:
            self.inner = tiny_model("llama")
            self.layers = self.inner.layers

        def __call__(self, ids: mx.array, cache: object = None) -> mx.array:
            seen.append(ids.shape)
            result: mx.array = self.inner(ids, cache=cache)
            return result

    module.prefill(Recording(), as_ids(token_ids(10)), chunk_tokens=4)
    assert seen == [(1, 4), (1, 4), (1, 2)]


def test_an_id_beyond_the_vocabulary_is_refused_before_mlx_reads_outside_of_it() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="beyond the vocabulary"):
        module.prefill(model, as_ids([1, 10**9]))
