"""Layers of one model may have heads of their own; what no server computes is refused at once."""

from __future__ import annotations

import pytest

import pion_vllm_mlx
from pion_vllm_mlx import PionMlxCompatError
from tests.models import tiny_model, token_ids
from tests.patch.conftest import LANES, Opener, alone, forwards, furthest
from tests.patch.families import build

IDS, STEPS = token_ids(40), 3

#: settings of gemma4_text: heads of its sliding and of its full layers
HEADS = {
    "equal widths": {
        "num_key_value_heads": 2,
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "other widths": {"num_key_value_heads": 1, "global_head_dim": 64},
}

pytestmark = pytest.mark.usefixtures("patched")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lane", LANES)
def test_layers_of_other_heads_are_each_attended_as_they_are(
    opened: Opener, lane: str, heads: str
) -> None:
    model = build("gemma4_text", num_kv_shared_layers=0, **HEADS[heads])
    name, pc = f"{heads} {lane}", opened(model, lane)
    shapes = {entry.keys.shape[1::2] for entry in pc.get_or_prefill(IDS, name)}
    assert len(shapes) == 2 and (len({a * b for a, b in shapes}) == 1) == (heads == "equal widths")
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS))
    assert furthest(forwards(model, cache, STEPS), alone(model, IDS, STEPS)) < 1e-5


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_heads_without_kernels_are_refused_by_layer_when_the_cache_is_made(
    opened: Opener, lane: str
) -> None:
    model, name = tiny_model("llama", head_dim=48), f"48 {lane}"
    pc = opened(model, lane)
    pc.get_or_prefill(IDS, name)
    with pytest.raises(PionMlxCompatError, match="llama: layer 0 has 2 KV heads of 48"):
        pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS))
    local = opened(model, "in-process")
    local.get_or_prefill(IDS, f"here {name}")
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, f"here {name}", local, len(IDS))
    assert furthest(forwards(model, cache, STEPS), alone(model, IDS, STEPS)) < 1e-5


@pytest.mark.parametrize("settings", [("int8", 0), ("mlx4g32", 0), ("mlx4g32", 1), ("fp8", 1)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_prefix_stored_in_another_format_is_attended_as_it_is_read_back(
    opened: Opener, family: str, settings: tuple[str, int]
) -> None:
    model = tiny_model(family)
    options = dict(zip(("vquant", "boundary_protect"), settings, strict=True))
    name = f"{family} {settings}"
    opened(model, "binary", **options).get_or_prefill(IDS, name)
    pc = opened(model, "binary", **options)
    wanted = forwards(model, pc.get_or_prefill(IDS, name), STEPS)
    assert pc.hits == 1
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS))
    found = forwards(model, cache, STEPS)
    assert cache[0].lane == "binary" and furthest(found, wanted) < 1e-5
    assert furthest(alone(model, IDS, STEPS), wanted) > 1e-5
