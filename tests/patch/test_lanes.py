"""A patched model says what the unpatched one says, over every lane; and which lane it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import make_prompt_cache

import pion_vllm_mlx
from pion_vllm_mlx.cache import inproc
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.errors import PionMlxCompatError
from pion_vllm_mlx.patch.prefix_cache import PionPrefixCache, PrefixGroup
from tests.models import WINDOW, tiny_model, token_ids
from tests.patch.conftest import LANES, SUFFIX, Opener, alone, forwards, furthest
from tests.serve.tiny_folder import make_folder

STEPS = 20  # with the suffix more than a window
REPLY = 32

pytestmark = pytest.mark.usefixtures("patched")


def attended(
    pc: PionPromptCache, model: Any, ids: list[int], name: str, **options: Any
) -> list[Any]:
    """A cache for the prefix, which is stored first."""
    pc.get_or_prefill(ids, name)
    return pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(ids), **options)


@pytest.mark.parametrize("length", [WINDOW - 6, WINDOW, 40])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("lane", LANES)
def test_logits_are_those_of_the_unpatched_model(
    opened: Opener, family: str, length: int, lane: str
) -> None:
    model, ids = tiny_model(family), token_ids(length)
    pc = opened(model, lane)
    cache = attended(pc, model, ids, f"{family} {length} {lane}")
    assert cache[0].offset == length
    found = forwards(model, cache, STEPS)
    assert furthest(found, alone(model, ids, STEPS)) < 1e-5
    assert cache[0].offset == length + len(SUFFIX) + STEPS
    assert {entry.lane for entry in cache} == {lane}
    assert ("at the server" in repr(cache[0])) == (lane != "in-process")
    used = pc.stats()["attended"]
    assert set(used) <= {lane, "resp"} and used[lane] > STEPS
    if lane == "in-process":
        assert used == {lane: len(cache) * (STEPS + 1)} and pc.attend_query_calls == 0


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_latent_attention_is_served_in_this_process_and_refused_by_name_elsewhere(
    opened: Opener, family: str
) -> None:
    model, ids = tiny_model(family), token_ids(40)
    cache = attended(opened(model, "in-process"), model, ids, family)
    assert furthest(forwards(model, cache, STEPS), alone(model, ids, STEPS)) < 1e-5
    with pytest.raises(pion_vllm_mlx.PionMlxCompatError, match="in this process only"):
        forwards(model, attended(opened(model, "binary"), model, ids, family), 1)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_generation_of_mlx_lm_gives_the_same_tokens(
    opened: Opener, lane: str, family: str, tmp_path: Path
) -> None:
    from mlx_lm import generate, load, stream_generate

    model, tokenizer = load(str(make_folder(tmp_path / family, family)))[:2]
    ids, pc = token_ids(40), opened(model, lane)
    cache = attended(pc, model, ids, f"generated {lane} {family}")
    plain = generate(model, tokenizer, [*ids, *SUFFIX], max_tokens=REPLY)
    assert plain
    assert generate(model, tokenizer, SUFFIX, max_tokens=REPLY, prompt_cache=cache) == plain
    again = pion_vllm_mlx.make_pion_prompt_cache(model, f"generated {lane} {family}", pc, len(ids))
    options = {"max_tokens": REPLY, "prompt_cache": again, "prefill_step_size": 5}
    made = stream_generate(model, tokenizer, SUFFIX, **options)
    wanted = stream_generate(model, tokenizer, [*ids, *SUFFIX], max_tokens=REPLY)
    assert [one.token for one in made] == [one.token for one in wanted]


@pytest.mark.parametrize("lane", LANES)
def test_two_caches_over_one_prefix_do_not_change_each_other(opened: Opener, lane: str) -> None:
    model, ids = tiny_model("llama"), token_ids(40)
    pc = opened(model, lane)
    first = attended(pc, model, ids, f"two {lane}")
    second = pion_vllm_mlx.make_pion_prompt_cache(model, f"two {lane}", pc, 40)
    wanted = alone(model, ids, 4)
    forwards(model, first, 2)
    assert furthest(forwards(model, second, 4), wanted) < 1e-5


def test_without_the_fused_query_the_suffix_is_merged_with_the_prefix_here(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_DISABLE_FUSED_ATTEND", "1")
    model, ids = tiny_model("llama"), token_ids(40)
    pc = opened(model, "binary")
    cache = attended(pc, model, ids, "merged")
    assert furthest(forwards(model, cache, STEPS), alone(model, ids, STEPS)) < 1e-5
    assert set(pc.attention.queries) == {"resp"}


def test_a_suffix_of_more_than_a_megabyte_stays_here_and_is_merged_with_the_prefix(
    opened: Opener,
) -> None:
    model, ids, more = tiny_model("llama"), token_ids(40), token_ids(2050, seed=6)
    pc = opened(model, "binary")
    cache, plain = attended(pc, model, ids, "megabyte"), make_prompt_cache(model)
    model(mx.array([ids]), cache=plain)
    asked = []
    for tokens in (more[:-3], more[-3:], [7]):  # 512 bytes a token and layer
        found, wanted = (model(mx.array([tokens]), cache=one) for one in (cache, plain))
        assert furthest([found], [wanted]) < 1e-5
        asked.append(dict(pc.attention.queries))
    layers = len(cache)
    assert asked == [{"binary": layers}, *({"binary": layers, "resp": n * layers} for n in (1, 2))]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_models_of_half_precision_keep_their_type(
    opened: Opener, lane: str, dtype: mx.Dtype
) -> None:
    model, ids = tiny_model("llama", dtype), token_ids(40)
    cache = attended(opened(model, lane), model, ids, f"{dtype} {lane}")
    found, wanted = forwards(model, cache, 4), alone(model, ids, 4)
    assert found[0].dtype == wanted[0].dtype == dtype
    assert furthest(found, wanted) < 0.03


@pytest.mark.parametrize("selector", ["block_mean", "quest"])
@pytest.mark.parametrize("lane", LANES)
def test_sparse_attention_with_all_blocks_is_dense_and_with_few_is_not(
    opened: Opener, lane: str, selector: str
) -> None:
    model, ids = tiny_model("llama"), token_ids(70)
    pc = opened(model, lane)
    wanted = alone(model, ids, 6)
    for top, same in ((9, True), (1, False)):
        mode = {"K_block": 8, "K_blocks": top, "selector": selector}
        cache = attended(
            pc, model, ids, f"sparse {lane} {selector}", sparse_full_layers=mode
        )
        assert (furthest(forwards(model, cache, 6), wanted) < 1e-5) == same


def test_sparse_attention_in_process_and_over_the_wire_choose_the_same(opened: Opener) -> None:
    model, ids = tiny_model("llama"), token_ids(70)
    mode = {"K_block": 8, "K_blocks": 2}
    found = [
        forwards(model, attended(opened(model, lane), model, ids, lane, sparse_full_layers=mode), 6)
        for lane in LANES
    ]
    assert furthest(found[1], found[0]) < 1e-5 and furthest(found[2], found[0]) < 1e-5


@pytest.mark.parametrize(
    ("mode", "kind", "said"),
    [
        (3, TypeError, "sparse_full_layers is True"),
        ([0, 1], TypeError, "sparse_full_layers is True"),
        ({"layers": 1}, ValueError, "not layers"),
        ({"K_block": 0}, ValueError, r"sparse_full_layers\['K_block'\] must be 1 or more, not 0"),
        ({"K_block": -64}, ValueError, "K_block.* not -64"),
        ({"K_blocks": 0}, ValueError, r"sparse_full_layers\['K_blocks'\] must be 1 or more"),
        ({"K_blocks": 1.5}, TypeError, "K_blocks.* whole number, not 1.5"),
        ({"K_block": "64"}, TypeError, "K_block.* whole number"),
        ({"K_block": True}, TypeError, "K_block.* whole number"),
        ({"selector": "best"}, ValueError, "selector.* block_mean or quest, not 'best'"),
        ({"selector": ["quest"]}, ValueError, "selector"),
    ],
)
def test_a_sparse_mode_that_cannot_be_is_refused_by_name(
    opened: Opener, mode: Any, kind: type[Exception], said: str
) -> None:
    model = tiny_model("llama")
    with pytest.raises(kind, match=said):
        pion_vllm_mlx.make_pion_prompt_cache(model, "nothing", opened(model), 40, mode)
    with pytest.raises((kind, TypeError), match=said):
        pion_vllm_mlx.PionPrefixCache(0, "nothing", opened(model), 40, None, mode)


@pytest.mark.parametrize("length", [40.0, "40", None, True])
def test_a_length_that_is_no_number_of_tokens_is_refused_by_name(
    opened: Opener, length: Any
) -> None:
    model = tiny_model("llama")
    with pytest.raises(TypeError, match="prefix_len is a whole number"):
        pion_vllm_mlx.make_pion_prompt_cache(model, "nothing", opened(model), length)


@pytest.mark.parametrize("kind", ["ConcatenateKVCache", "ChunkedKVCache", "QuantizedKVCache"])
def test_sparse_attention_over_a_cache_of_another_kind_is_refused_by_name(
    opened: Opener, kind: str
) -> None:
    model, ids = tiny_model("llama"), token_ids(40)
    pc = opened(model, "in-process")
    pc.get_or_prefill(ids, f"kind {kind}")
    group = PrefixGroup(pc, f"kind {kind}", len(ids))
    make = getattr(caches, kind)
    native = make(64) if kind == "ChunkedKVCache" else make()
    with pytest.raises(PionMlxCompatError, match=f"layer 1: sparse_full_layers over a {kind}"):
        PionPrefixCache(1, f"kind {kind}", pc, len(ids), None, {}, group=group, native=native)
    PionPrefixCache(1, f"kind {kind}", pc, len(ids), None, None, group=group, native=native)


def test_windowed_layers_are_never_sparse(opened: Opener) -> None:
    model, ids = tiny_model("gemma3_text"), token_ids(70)
    cache = attended(opened(model), model, ids, "windows", sparse_full_layers=True)
    assert [entry.sparse_mode is None for entry in cache] == [True, True, False]
    assert [entry.fa_window for entry in cache] == [WINDOW, WINDOW, None]


@pytest.fixture
def other_process(opened: Opener) -> Iterator[tuple[Any, list[int], PionPromptCache]]:
    """A prefix that an object stored, and another one that never asked for its tokens."""
    model, ids = tiny_model("llama"), token_ids(40)
    opened(model).get_or_prefill(ids, "elsewhere")
    yield model, ids, opened(model)


def test_who_never_had_the_prefix_attends_to_it_by_name_and_length(
    other_process: tuple[Any, list[int], PionPromptCache],
) -> None:
    model, ids, pc = other_process
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, "elsewhere", pc, len(ids))
    assert furthest(forwards(model, cache, 4), alone(model, ids, 4)) < 1e-5
    assert pc.hits == pc.misses == 0


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_over_the_wire_no_row_of_the_prefix_is_here(opened: Opener, lane: str) -> None:
    model, held = tiny_model("llama"), []
    for length in (40, 400):
        ids, name = token_ids(length), f"apart {lane} {length}"
        opened(model, lane).get_or_prefill(ids, name)
        pc = opened(model, lane)  # which never had it
        cache = pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, length)
        assert [entry.nbytes for entry in cache] == [0] * len(cache)
        forwards(model, cache, 2)
        fetched = pc.stats()["bytes_fetched"]
        held.append((fetched, [(e.nbytes, e.keys_and_values()[0].shape) for e in cache]))
    assert held[0] == held[1] and held[0][0] == 0
    assert held[0][1][0][1][2] == len(SUFFIX) + 2


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_process_that_got_the_prefix_from_files_attends_to_it_in_this_process(
    opened: Opener, family: str
) -> None:
    model, ids, name = tiny_model(family), token_ids(40), f"got {family}"
    opened(model).get_or_prefill(ids, name)
    pc = opened(model, "in-process")
    for lane in ("mapped", "in-process"):
        kept = pc.get_or_prefill(ids, name)
        assert pc.stats()["lane"] == lane and kept[0].offset == len(ids)
        cache = pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(ids))
        assert cache[0].lane == "in-process"
        assert furthest(forwards(model, cache, 3), alone(model, ids, 3)) < 1e-5
    assert pc.hits == 2 and pc.attend_query_calls == 0


def test_a_process_without_room_for_the_prefix_attends_to_it_at_the_server(opened: Opener) -> None:
    model, ids = tiny_model("llama"), token_ids(40)
    opened(model).get_or_prefill(ids, "no room")
    try:
        pc = opened(model, "in-process", inproc_bytes=0)
        pc.get_or_prefill(ids, "no room")
        assert pc.stats()["lane"] == "mapped"
        cache = pion_vllm_mlx.make_pion_prompt_cache(model, "no room", pc, len(ids))
        assert cache[0].lane == "binary" and inproc.PROCESS.nbytes == 0
        assert furthest(forwards(model, cache, 3), alone(model, ids, 3)) < 1e-5
    finally:
        inproc.PROCESS.set_cap(inproc.DEFAULT_CAP_BYTES)
