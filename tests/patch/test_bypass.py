"""A model of which some layer attends by itself is refused when its cache is made."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

import pion_vllm_mlx
from pion_vllm_mlx import PionMlxCompatError
from tests.models import token_ids
from tests.patch.conftest import Opener, alone, forwards, furthest
from tests.patch.families import build

HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 4, 2, 32, 64, 128
IDS = token_ids(40)

pytestmark = pytest.mark.usefixtures("patched")


class Attention(nn.Module):
    """Attention through the seam, or, of some layers, past it."""

    def __init__(self, past: bool) -> None:
        super().__init__()
        self.past = past
        self.q, self.k, self.v, self.o = (
            nn.Linear(a, b, bias=False)
            for a, b in [(WIDTH, HEADS * DIM), *[(WIDTH, KV_HEADS * DIM)] * 2, (HEADS * DIM, WIDTH)]
        )

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        rows, tokens = x.shape[:2]
        q, k, v = (
            made.reshape(rows, tokens, -1, DIM).transpose(0, 2, 1, 3)
            for made in (self.q(x), self.k(x), self.v(x))
        )
        keys, values = cache.update_and_fetch(k, v)
        if self.past:
            seen = "causal" if isinstance(mask, str) else mask
            out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=DIM**-0.5, mask=seen)
        else:
            attend = base.scaled_dot_product_attention
            out = attend(q, keys, values, cache=cache, scale=DIM**-0.5, mask=mask)
        joined: mx.array = self.o(out.transpose(0, 2, 1, 3).reshape(rows, tokens, -1))
        return joined


class Model(nn.Module):
    """Attention alone, ``past[l]`` says of which layers past the seam."""

    def __init__(self, past: tuple[bool, ...]) -> None:
        super().__init__()
        self.args = {"past": list(past)}
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = [Attention(one) for one in past]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.embedding(tokens)
        cache = cache or [None] * len(self.layers)
        mask = create_attention_mask(x, cache[0])
        for layer, entry in zip(self.layers, cache, strict=True):
            x = x + layer(x, mask, entry)
        logits: mx.array = self.embedding.as_linear(x)
        return logits


def seen_by_name(queries: Any, *rest: Any) -> Any:
    """What tells the check by code that this module knows the seam; never called."""
    return scaled_dot_product_attention(queries, *rest)


@pytest.mark.parametrize("past", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("lane", ["binary", "resp", "in-process"])
def test_no_layer_attends_past_the_seam_unnoticed(
    opened: Opener, lane: str, past: tuple[bool, ...]
) -> None:
    model, name = Model(past), f"past {past} {lane}"
    mx.eval(model.parameters())
    pc = opened(model, lane)
    pc.get_or_prefill(IDS, name)
    make = pion_vllm_mlx.make_pion_prompt_cache
    wanted = alone(model, IDS, 2)
    for mode in (None, {"K_block": 8, "K_blocks": 1}):
        if lane == "in-process" and mode is None:  # its caches hold prefix and suffix
            assert furthest(forwards(model, make(model, name, pc, 40), 2), wanted) < 1e-5
            continue
        with pytest.raises(PionMlxCompatError, match=f"layer {past.index(True)}: .* bypasses"):
            make(model, name, pc, 40, mode)
    assert pc.attend_query_calls == 0


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_what_the_wire_cannot_attend_is_refused_when_the_cache_is_made(
    opened: Opener, lane: str
) -> None:
    for family in ("gpt_oss", "deepseek_v3", "glm4_moe_lite", "afm7"):
        model = build(family)
        pc = opened(model, lane)
        pc.get_or_prefill(IDS, f"{family} {lane}")
        with pytest.raises((PionMlxCompatError, NotImplementedError)):
            pion_vllm_mlx.make_pion_prompt_cache(model, f"{family} {lane}", pc, 40)


def test_attention_sinks_are_served_in_this_process(opened: Opener) -> None:
    model = build("gpt_oss")
    pc = opened(model, "in-process")
    pc.get_or_prefill(IDS, "sinks")
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, "sinks", pc, len(IDS))
    assert furthest(forwards(model, cache, 20), alone(model, IDS, 20)) < 1e-5
