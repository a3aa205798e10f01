"""What mlx-lm does with caches between requests: copied and trimmed as its own, or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

import pion_vllm_mlx
from pion_vllm_mlx import PionMlxCompatError
from tests.models import tiny_model, token_ids
from tests.patch.conftest import LANES, SUFFIX, Opener, alone, forwards, furthest

IDS = token_ids(40)

pytestmark = pytest.mark.usefixtures("patched")


def made(opened: Opener, model: Any, lane: str, name: str, **options: Any) -> list[Any]:
    pc = opened(model, lane)
    pc.get_or_prefill(IDS, name)
    return pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS), **options)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("lane", LANES)
def test_a_copy_goes_on_by_itself(opened: Opener, lane: str, family: str) -> None:
    model = tiny_model(family)
    cache = made(opened, model, lane, f"copied {lane} {family}")
    first = model(mx.array([SUFFIX]), cache=cache)
    other = copy.deepcopy(cache)
    assert len({id(entry.group) for entry in other}) == 1
    assert other[0].group is not cache[0].group and other[0].prompt_cache is cache[0].prompt_cache
    steps = token_ids(6, seed=9)
    for entries in (cache, other, copy.deepcopy(other)):
        found = [first] + [model(mx.array([[token]]), cache=entries) for token in steps]
        assert furthest(found, alone(model, IDS, 6)) < 1e-5
        model(mx.array([SUFFIX]), cache=cache)  # what the original does changes no copy


@pytest.mark.parametrize("lane", LANES)
def test_a_sparse_cache_can_be_copied_too(opened: Opener, lane: str) -> None:
    model = tiny_model("llama")
    cache = made(opened, model, lane, f"sparse copy {lane}", sparse_full_layers={"K_block": 8})
    model(mx.array([SUFFIX]), cache=cache)
    other = copy.deepcopy(cache)
    token = mx.array([[3]])
    found, wanted = model(token, cache=other), model(token, cache=cache)
    assert float(mx.abs(found - wanted).max()) < 1e-6


def test_a_copy_of_a_cache_that_failed_is_one_that_failed(opened: Opener) -> None:
    model = tiny_model("llama")
    cache = made(opened, model, "binary", "failed copy")
    cache[0].group.broken = "layer 0"
    with pytest.raises(pion_vllm_mlx.StoreUnavailable, match="new cache"):
        forwards(model, copy.deepcopy(cache), 0)


@pytest.mark.parametrize("lane", LANES)
def test_the_prompt_cache_of_mlx_lms_server_finds_it_again(opened: Opener, lane: str) -> None:
    from mlx_lm.models.cache import LRUPromptCache

    model = tiny_model("llama")
    cache = made(opened, model, lane, f"lru {lane}")
    reply = token_ids(4, seed=9)
    forwards(model, cache, 4)
    kept = LRUPromptCache()
    kept.insert_cache("m", [*IDS, *SUFFIX, *reply], cache)
    assert kept.nbytes > 0
    found, rest = kept.fetch_nearest_cache("m", [*IDS, *SUFFIX, *reply, 5])
    assert rest == [5]
    fresh = mx.array([[*IDS, *SUFFIX, *reply, 5]])
    wanted = model(fresh, cache=None)[:, -1:]
    assert float(mx.abs(model(mx.array([[5]]), cache=found) - wanted).max()) < 1e-4
    edited, rest = kept.fetch_nearest_cache("m", [*IDS, *SUFFIX[:6], 7, 8])
    assert rest == [7, 8]
    wanted = model(mx.array([[*IDS, *SUFFIX[:6], 7, 8]]), cache=None)[:, -2:]
    assert float(mx.abs(model(mx.array([[7, 8]]), cache=edited) - wanted).max()) < 1e-4
    with pytest.raises(ValueError, match="stays whole"):  # never a cache that is too long
        kept.fetch_nearest_cache("m", IDS[:20])


@pytest.mark.parametrize("lane", LANES)
def test_a_cache_is_trimmed_back_to_its_prefix_and_no_further(opened: Opener, lane: str) -> None:
    from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

    model, name = tiny_model("llama"), f"trimmed {lane}"
    cache = made(opened, model, lane, name)
    first = forwards(model, cache, 3)
    assert can_trim_prompt_cache(cache)
    with pytest.raises(ValueError, match=f"namespace {name}: 16 tokens .* 15 are behind"):
        trim_prompt_cache(cache, len(SUFFIX) + 4)
    assert cache[0].offset == len(IDS) + len(SUFFIX) + 3
    assert trim_prompt_cache(cache, len(SUFFIX) + 3) == len(SUFFIX) + 3
    assert cache[0].offset == len(IDS)
    assert furthest(forwards(model, cache, 3), first) < 1e-6


@pytest.mark.parametrize("lane", LANES)
def test_no_file_is_made_of_it_that_could_not_be_read(
    opened: Opener, lane: str, tmp_path: Path
) -> None:
    from mlx_lm.models.cache import save_prompt_cache

    model = tiny_model("llama")
    cache = made(opened, model, lane, f"saved {lane}")
    forwards(model, cache, 1)
    with pytest.raises((ValueError, PionMlxCompatError), match="what get_or_prefill returns"):
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    assert not list(tmp_path.iterdir())
    mx.eval([entry.state for entry in cache])  # as generation does


@pytest.mark.parametrize("lane", LANES)
def test_quantized_kv_is_honoured_here_and_refused_over_the_wire(
    opened: Opener, lane: str
) -> None:
    from mlx_lm.generate import generate_step

    model = tiny_model("llama")
    cache = made(opened, model, lane, f"quantized {lane}")
    options = {"max_tokens": 4, "prompt_cache": cache, "kv_bits": 8, "kv_group_size": 32}
    steps = generate_step(mx.array(SUFFIX), model, quantized_kv_start=0, **options)
    if lane != "in-process":
        with pytest.raises(PionMlxCompatError, match="kv_bits=8"):
            list(steps)
        return
    found = [token for token, _ in steps]
    assert type(cache[0]).__name__ == "QuantizedKVCache" and cache[0].bits == 8
    options["prompt_cache"] = None
    whole = mx.array([*IDS, *SUFFIX])
    plain = [t for t, _ in generate_step(whole, model, quantized_kv_start=0, **options)]
    assert len(found) == len(plain)


@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_caches_of_this_process_are_batched_as_mlx_lms_own(
    opened: Opener, family: str, length: int
) -> None:
    """Beside each other, and beside one of mlx-lm's own; windows that are full, and not."""
    model, ids = tiny_model(family), IDS[:length]
    pc = opened(model, "in-process")
    name = f"batched {family} {length}"
    pc.get_or_prefill(ids, name)

    def own() -> list[Any]:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([ids]), cache=cache))
        return list(cache)

    def ours() -> list[Any]:
        return pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(ids))

    def said(*caches: list[Any]) -> list[list[int]]:
        generator = BatchGenerator(model, max_tokens=8)
        uids = generator.insert([SUFFIX, SUFFIX[:3]], caches=list(caches))
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        while True:
            _, responses = generator.next()
            for one in responses:
                tokens[one.uid].append(one.token)
            if all(len(found) == 8 for found in tokens.values()):
                generator.close()
                return list(tokens.values())

    wanted = said(own(), own())
    assert said(ours(), ours()) == said(ours(), own()) == said(own(), ours()) == wanted
