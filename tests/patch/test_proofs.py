"""What nobody proved is never attended: prefixes under one name, halves, foreign ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pion_vllm_mlx
from pion_vllm_mlx import PionPrefixCache
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.errors import PionError, ServerRefused
from tests.conftest import RunningServer
from tests.models import tiny_model, token_ids
from tests.patch.conftest import LANES, Opener, alone, forwards, furthest
from tests.server.attention.asking import connected

IDS = token_ids(40)
OTHER = token_ids(40, seed=11)
Q = np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)

Floats = NDArray[np.float32]

pytestmark = pytest.mark.usefixtures("patched")


def rows(cache: list[Any], layer: int) -> tuple[Floats, Floats]:
    entry = cache[layer]
    keys, values = (np.array(a[0, :, : entry.offset]) for a in (entry.keys, entry.values))
    return keys, values


def attended(cache: list[Any], layer: int) -> Floats:
    """Q over a layer of a cache of mlx-lm's own, in float64."""
    keys, values = rows(cache, layer)
    scores = np.exp(np.einsum("hmd,hnd->hmn", Q.astype("f8"), keys) / np.sqrt(32))
    out: Floats = np.einsum("hmn,hnd->hmd", scores / scores.sum(-1, keepdims=True), values)
    return out


def sees(pc: PionPromptCache, name: str, ids: list[int]) -> bool:
    """Whether both layers under a name are those of these tokens."""
    wanted = mine(pc, ids)
    return all(np.allclose(pc.attend_query(name, n, Q), wanted[n], atol=1e-4) for n in range(2))


def mine(pc: PionPromptCache, ids: list[int]) -> list[Floats]:
    from pion_vllm_mlx.cache.completion import token_ids as checked
    from pion_vllm_mlx.cache.prefill import prefill

    cache = prefill(pc.model, checked(ids)).cache
    return [attended(cache, layer) for layer in range(2)]


# -- stage 2 ----------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["in-process", "resp"])
def test_stage_2_attends_to_what_was_asked_for_last(opened: Opener, lane: str) -> None:
    pc = opened(tiny_model("llama"), lane, stage2=True)
    for ids in (IDS, OTHER, IDS, OTHER):
        pc.get_or_prefill(ids, f"again {lane}")
        assert sees(pc, f"again {lane}", ids)
        assert pc.lookup(f"again {lane}") or lane == "in-process"


def test_stage_2_of_a_prefix_that_is_not_admitted_is_its_own(opened: Opener) -> None:
    model = tiny_model("llama")
    first = opened(model, stage2=True)
    first.get_or_prefill(IDS, "admitted")
    late = opened(model, stage2=True, admission_threshold=2)
    late.get_or_prefill(OTHER, "admitted")
    assert sees(late, "admitted", OTHER) and sees(first, "admitted", IDS)
    assert not late.lookup("admitted") and first.lookup("admitted")


def test_stage_2_of_another_model_is_another_one(opened: Opener) -> None:
    model, wider = tiny_model("llama"), tiny_model("llama", intermediate_size=96)
    first, second = opened(model, stage2=True), opened(wider, stage2=True)
    first.get_or_prefill(IDS, "models")
    second.get_or_prefill(IDS, "models")
    assert sees(second, "models", IDS)
    with pytest.raises(ServerRefused, match="session not found"):  # dropped with its namespace
        first.attend_query("models", 1, Q)


def test_a_half_that_a_dead_client_left_is_made_whole(
    opened: Opener, store: RunningServer
) -> None:
    model = tiny_model("llama")
    cache = opened(model).get_or_prefill(OTHER, "half")
    staged = opened(model, stage2=True)
    assert staged.source is not None
    sid = staged.source.session("half", np.asarray(OTHER, np.uint32))
    with connected(store, sid) as asking:
        asking.at("half_attn", 0).store(*rows(cache, 0))
        asking.at(layer=0).store(*rows(cache, 0))
        assert not staged.lookup("half")
        staged.get_or_prefill(OTHER, "half")
        assert [asking.at(layer=n).lookup() for n in range(2)] == ["HIT", "HIT"]
    assert staged.lookup("half") and sees(staged, "half", OTHER)


def test_who_asked_for_nothing_attends_to_what_the_namespace_has(
    opened: Opener, store: RunningServer
) -> None:
    model = tiny_model("llama")
    staged, plain = opened(model, "resp", stage2=True), opened(None)
    for ids in (IDS, OTHER):
        staged.get_or_prefill(ids, "plainly")
        for layer, wanted in enumerate(mine(staged, ids)):
            assert np.allclose(plain.attend_query("plainly", layer, Q), wanted, atol=1e-4)
    with connected(store) as asking:
        assert asking.wire.ask("KV.PREFIX.DROP", "plainly") == 1
    for pc in (plain, staged):
        with pytest.raises(ServerRefused, match="session not found"):
            pc.attend_query("plainly", 0, Q)


def test_a_cold_layer_is_not_warmed_from_another_prefix(opened: Opener) -> None:
    model = tiny_model("llama")
    staged, filler = opened(model, stage2=True), np.zeros((1, 1, 32), np.float32)
    staged.get_or_prefill(IDS, "cold other")
    for layer in range(256):
        staged.attend_store_layer("filling", layer, filler, filler)
    assert sees(staged, "cold other", IDS) and staged.cold_rehydrates_observed == 2
    for layer in range(256):
        staged.attend_store_layer("filling", layer, filler, filler)
    opened(model).get_or_prefill(OTHER, "cold other")
    with pytest.raises(ServerRefused, match="COLDMISS|session not found"):
        staged.attend_query("cold other", 0, Q)


# -- foreign prefixes -------------------------------------------------------------------


@pytest.fixture
def foreign(opened: Opener, request: pytest.FixtureRequest) -> tuple[Any, PionPromptCache, str]:
    """A model, a cache of it, and a name under which somebody put K and V of IDS."""
    model, name = tiny_model("llama"), f"foreign {request.node.name}"
    pc = opened(model)
    cache = opened(model).get_or_prefill(IDS, f"source of {name}")
    for layer in range(2):
        pc.attend_store_layer(name, layer, *rows(cache, layer))
    return model, pc, name


def test_a_prefix_without_a_record_is_not_attended_unasked(foreign: Any) -> None:
    model, pc, name = foreign
    with pytest.raises(ValueError, match="no completion record .*foreign=True"):
        pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS))
    with pytest.raises(ValueError, match="no completion record"):
        _ = PionPrefixCache(0, name, pc, len(IDS)).lane
    made = pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS), foreign=True)
    assert furthest(forwards(model, made, 3), alone(model, IDS, 3)) < 1e-5


@pytest.mark.parametrize("length", [1, 39, 100])
def test_a_foreign_prefix_of_another_length_is_refused(foreign: Any, length: int) -> None:
    model, pc, name = foreign
    with pytest.raises(ValueError, match=f"holds 40 tokens in layer 0, {length} were asked for"):
        pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, length, foreign=True)


def test_a_foreign_prefix_that_lacks_a_layer_or_has_another_length_in_one_is_refused(
    foreign: Any,
) -> None:
    model, pc, name = foreign
    keys = np.zeros((2, 39, 32), np.float32)
    pc.attend_store_layer(name, 1, keys, keys)
    with pytest.raises(ValueError, match="holds 39 tokens in layer 1"):
        pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS), foreign=True)
    deeper = tiny_model("llama", num_hidden_layers=3)
    pc.attend_store_layer(name, 1, keys[:, :1].repeat(40, 1), keys[:, :1].repeat(40, 1))
    with pytest.raises(ValueError, match="layer 2 of 3 is not there"):
        pion_vllm_mlx.make_pion_prompt_cache(
            deeper, name, PionPromptCache(port=pc.port), len(IDS), foreign=True
        )


def test_a_foreign_prefix_is_none_that_was_asked_for(opened: Opener, foreign: Any) -> None:
    model, _, name = foreign
    pc = opened(model, admission_threshold=5)
    pc.get_or_prefill(OTHER, name)
    for foreign_too in (False, True):
        with pytest.raises(ValueError, match="no completion record"):
            pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, 40, foreign=foreign_too)


def test_a_cache_without_a_model_proves_nothing(opened: Opener) -> None:
    model, wider = tiny_model("llama"), tiny_model("llama", intermediate_size=96)
    opened(model, stage2=True).get_or_prefill(IDS, "recorded")
    for foreign_too in (False, True):
        with pytest.raises(ValueError, match=r"only PionPromptCache\(model\) can tell"):
            pion_vllm_mlx.make_pion_prompt_cache(
                wider, "recorded", opened(None), 40, foreign=foreign_too
            )


def test_a_foreign_layer_that_became_cold_is_not_warmed_from_a_prefix_of_its_own(
    opened: Opener, foreign: Any
) -> None:
    model, pc, name = foreign
    made = pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS), foreign=True)
    filler = np.zeros((1, 1, 32), np.float32)
    for layer in range(256):
        pc.attend_store_layer("filling", layer, filler, filler)
    opened(model).get_or_prefill(OTHER, name)
    with pytest.raises(PionError):
        forwards(model, made, 0)


# -- arguments --------------------------------------------------------------------------


def test_arguments_that_cannot_be_are_refused_by_name(opened: Opener) -> None:
    model, pc = tiny_model("llama"), opened(tiny_model("llama"))
    make: Any = pion_vllm_mlx.make_pion_prompt_cache
    for kind, said, words in (
        (ValueError, "prefix_len is the number of tokens .* not -5", ("n", pc, -5)),
        (TypeError, "prefix_len is a whole number, not '40'", ("n", pc, "40")),
        (TypeError, "namespace is a text, not None", (None, pc, 40)),
        (TypeError, "namespace is a text, not b'n'", (b"n", pc, 40)),
        (ValueError, "namespace must be a text that is not empty", ("", pc, 40)),
        (TypeError, "prompt_cache is a PionPromptCache, not None", ("n", None, 40)),
    ):
        with pytest.raises(kind, match=said):
            make(model, *words)
    for wrong in (None, "llama", (model, "tokenizer")):
        with pytest.raises(TypeError, match="^model is the first of what mlx_lm.load returns, not"):
            make(wrong, "n", pc, 40)
    for kind, said, window in (
        (TypeError, "fa_window is a whole number, not 2.5", 2.5),
        (ValueError, "fa_window is 1 or more", -1),
    ):
        with pytest.raises(kind, match=said):
            PionPrefixCache(0, "n", pc, 40, window)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_window_given_by_hand_is_the_same_on_every_lane(opened: Opener, family: str) -> None:
    model, window = tiny_model(family), 8
    found = {}
    for lane in LANES:
        pc = opened(model, lane)
        own = pc.get_or_prefill(IDS, f"by hand {family} {lane}")
        for given in (window, 0, None):
            cache = [
                PionPrefixCache(layer, f"by hand {family} {lane}", pc, len(IDS), given)
                for layer in range(len(own))
            ]
            assert cache[0].offset == len(IDS)
            found[lane, given] = forwards(model, cache, 20)
        if family == "llama":
            assert furthest(found[lane, None], alone(model, IDS, 20)) < 1e-5
            assert furthest(found[lane, 0], found[lane, None]) < 1e-5
            assert furthest(found[lane, window], found[lane, None]) > 1e-2
    for lane in LANES[1:]:
        assert furthest(found[lane, window], found["in-process", window]) < 1e-5
