"""The attend_* methods of PionPromptCache against plain numpy, and stage 2."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import pion_vllm_mlx
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.errors import PionError, ServerRefused
from tests.conftest import free_port_block
from tests.models import tiny_model, token_ids
from tests.patch.conftest import Opener

H_KV, H_Q, N, D = 2, 4, 70, 32
MAP = [0, 0, 1, 1]

Floats = NDArray[np.float32]


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, "f4")


K, V = normal(1, H_KV, N, D), normal(2, H_KV, N, D)


def attended(q: Floats, k: Floats, v: Floats, seen: Any = None) -> tuple[Floats, Floats]:
    """Output and log-sum-exp of ``q [H, M, D]`` over rows of as many heads, in float64."""
    scores = np.einsum("hmd,hnd->hmn", q.astype("f8"), k) / np.sqrt(D)
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    return np.einsum("hmn,hnd->hmd", np.exp(scores - lse[..., None]), v), lse


@pytest.fixture
def pc(opened: Opener, request: pytest.FixtureRequest) -> Any:
    cache = opened(None, getattr(request, "param", "binary"))
    cache.attend_store_layer("ns", 0, K, V)
    return cache


def test_a_query_sees_the_prefix_or_its_window(pc: Any) -> None:
    q = normal(3, H_KV, 5, D)
    wanted, lse = attended(q, K, V)
    assert np.allclose(pc.attend_query("ns", 0, q), wanted, atol=1e-5)
    assert np.allclose(pc.attend_query("ns", 0, q[:, 0]), wanted[:, 0], atol=1e-5)
    found = pc.attend_query("ns", 0, q[:, :1], with_lse=True)
    assert np.allclose(found[0], wanted[:, :1], atol=1e-5)
    assert np.allclose(found[1], lse[:, :1], atol=1e-5)
    within = pc.attend_query("ns", 0, q, fa_window=7)
    assert np.allclose(within, attended(q, K[:, -7:], V[:, -7:])[0], atol=1e-5)
    assert pc.attend_query_calls == 4 and pc.attend_query_ms_total > 0


@pytest.mark.parametrize("pc", ["binary", "resp"], indirect=True)
@pytest.mark.parametrize("window", [None, 9])
def test_a_fused_query_sees_the_suffix_causally(pc: Any, window: int | None) -> None:
    q, k, v = normal(4, H_Q, 3, D), normal(5, H_KV, 6, D), normal(6, H_KV, 6, D)
    first = 0 if window is None else N - window
    keys, values = (np.concatenate([a[:, first:], b], 1)[MAP] for a, b in ((K, k), (V, v)))
    at = np.arange(3, 6) + N - first
    seen = np.arange(keys.shape[1]) <= at[:, None]
    found = pc.attend_query_fused("ns", 0, q, k, v, MAP, window)
    assert np.allclose(found, attended(q, keys, values, seen)[0], atol=1e-5)
    even = [head * H_KV // H_Q for head in range(H_Q)]
    named = pc.attend_query_fused("ns", 0, q, k, v, even, fa_window=window)
    assert np.array_equal(pc.attend_query_fused("ns", 0, q, k, v, fa_window=window), named)


def test_a_sparse_query_with_all_blocks_is_dense(pc: Any) -> None:
    q, k, v = normal(7, H_Q, D), normal(8, H_KV, 2, D), normal(9, H_KV, 2, D)
    for selector in ("block_mean", "quest"):
        plain = pc.attend_query_sparse_auto("ns", 0, q, 8, 9, head_map=MAP, selector=selector)
        assert np.allclose(plain, attended(q[:, None], K[MAP], V[MAP])[0][:, 0], atol=1e-5)
        keys, values = (np.concatenate(pair, 1)[MAP] for pair in ((K, k), (V, v)))
        fused = pc.attend_query_sparse_auto_fused("ns", 0, q, 8, 9, k, v, selector=selector)
        assert np.allclose(fused, attended(q[:, None], keys, values)[0][:, 0], atol=1e-5)
    few = pc.attend_query_sparse_auto("ns", 0, q, 8, 1, head_map=MAP, fa_window=0)
    assert not np.allclose(few, plain, atol=1e-3)


def test_refusals_are_runtime_errors_that_say_why(pc: Any) -> None:
    with pytest.raises(ServerRefused, match="session not found"):
        pc.attend_query("nobody", 0, normal(1, H_KV, D))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        pc.attend_query("ns", 0, normal(1, H_KV + 1, D))
    with pytest.raises(ServerRefused, match="shape mismatch"):
        pc.attend_query_fused("ns", 0, *(normal(1, 3, 1, D) for _ in range(3)), [0, 1, 2])
    with pytest.raises(RuntimeError, match="head dim"):
        pc.attend_store_layer("ns", 1, normal(1, 1, 4, 20), normal(1, 1, 4, 20))
    with pytest.raises(ValueError, match="selector"):
        pc.attend_query_sparse_auto("ns", 0, normal(1, H_KV, D), 8, 1, selector="best")


@pytest.mark.parametrize("pc", ["binary", "resp"], indirect=True)
@pytest.mark.parametrize("head_map", [[], [1] * 4, [0] * 7, [0] * 12])
def test_a_head_map_of_another_length_is_refused_before_it_travels(pc: Any, head_map: Any) -> None:
    q, k = normal(10, 8, 1, D), normal(11, H_KV, 2, D)
    for window in (None, 0):
        with pytest.raises(ValueError, match="head_map"):
            pc.attend_query_fused("ns", 0, q, k, k, head_map, window)
    with pytest.raises(ValueError, match="head_map"):
        pc.attend_query_sparse_auto_fused("ns", 0, q[:, 0], 8, 1, k, k, head_map=head_map)


@pytest.mark.parametrize("pc", ["binary", "resp"], indirect=True)
def test_an_empty_head_map_is_the_identity(pc: Any) -> None:
    q, k, v = normal(12, H_KV, 1, D), normal(13, H_KV, 2, D), normal(14, H_KV, 2, D)
    wanted = attended(q, np.concatenate([K, k], 1), np.concatenate([V, v], 1))[0]
    for window in (None, 0, -1):
        assert np.allclose(pc.attend_query_fused("ns", 0, q, k, v, [], window), wanted, atol=1e-5)
    plain = pc.attend_query_sparse_auto("ns", 0, q[:, 0], 8, 9, head_map=[])
    assert np.allclose(plain, attended(q, K, V)[0][:, 0], atol=1e-5)


@pytest.mark.parametrize("pc", ["binary", "resp"], indirect=True)
def test_a_suffix_whose_k_and_v_have_other_shapes_is_refused(pc: Any) -> None:
    q, k = normal(15, H_Q, 1, D), normal(16, H_KV, 5, D)
    pairs = [(k, k.reshape(5, H_KV, D)), (k, k[:, :4]), (k[..., :16], k[..., :16])]
    for keys, values in pairs:
        with pytest.raises(ValueError, match="shape|dimension"):
            pc.attend_query_fused("ns", 0, q, keys, values, MAP)
        with pytest.raises(ValueError, match="shape|dimension"):
            pc.attend_query_sparse_auto_fused("ns", 0, q[:, 0], 8, 1, keys, values)


@pytest.mark.parametrize("pc", ["binary", "resp"], indirect=True)
def test_numbers_that_fit_no_field_are_refused_before_they_travel(pc: Any) -> None:
    q, k = normal(17, H_Q, 1, D), normal(18, H_KV, 1, D)
    for window in (-2, 2**32, 2**40):
        with pytest.raises(ValueError, match="window"):
            pc.attend_query_fused("ns", 0, q, k, k, MAP, window)
        with pytest.raises(ValueError, match="window"):
            pc.attend_query("ns", 0, k, fa_window=window)
    for layer in (-1, 70_000):
        with pytest.raises(ValueError, match="layer"):
            pc.attend_query_fused("ns", layer, q, k, k, MAP)
    with pytest.raises(ValueError, match="session id"):
        pc.attend_query_fused("n" * 70_000, 0, q, k, k, MAP)


def test_stage_2_makes_a_stored_prefix_resident_and_a_lookup_wants_both(opened: Opener) -> None:
    model, ids = tiny_model("llama"), token_ids(20)
    plain = opened(model)
    cache = plain.get_or_prefill(ids, "two stages")
    staged = opened(model, stage2=True)
    assert plain.lookup("two stages") and not staged.lookup("two stages")
    staged.get_or_prefill(ids, "two stages")
    assert staged.hits == 1 and staged.lookup("two stages")
    q = normal(1, H_KV, 2, D)
    for layer, entry in enumerate(cache):
        k, v = (np.array(a[0, :, : len(ids)]) for a in (entry.keys, entry.values))
        assert np.allclose(staged.attend_query("two stages", layer, q), attended(q, k, v)[0], 1e-4)


def test_a_lookup_warms_what_became_cold(opened: Opener) -> None:
    model = tiny_model("llama")
    staged = opened(model, stage2=True)
    staged.get_or_prefill(token_ids(20), "cooling")
    row = normal(1, 1, 1, D)
    for layer in range(256):
        staged.attend_store_layer("other", layer, row, row)
    assert staged.lookup("cooling")
    found = staged.attend_query("cooling", 1, normal(1, H_KV, 1, D), with_lse=True)
    assert np.isfinite(found[1]).all()


def as_mlx(array: Floats, name: str) -> Any:
    import mlx.core as mx

    return mx.array(array).astype(getattr(mx, name))


@pytest.mark.parametrize("pc", ["binary", "resp"], indirect=True)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_arrays_of_mlx_are_taken_as_numpys_are(pc: Any, kind: str) -> None:
    arrays = [normal(20, H_Q, 1, D), normal(21, H_KV, 2, D), normal(22, H_KV, 2, D)]
    mlx = [as_mlx(array, kind) for array in arrays]
    plain = [np.array(array.astype(as_mlx(arrays[0], "float32").dtype)) for array in mlx]
    for layer, (keys, values) in enumerate([mlx[1:], plain[1:]], 7):
        pc.attend_store_layer(kind, layer, keys, values)
        for q, k, v in (mlx, plain):
            assert np.array_equal(
                pc.attend_query_fused(kind, layer, q, k, v, MAP),
                pc.attend_query_fused(kind, 7, *plain, np.array(MAP)),
            )
            single = pc.attend_query_sparse_auto_fused(kind, layer, q[:, 0], 8, 1, k, v)
            assert single.dtype == np.float32 and np.isfinite(single).all()
            assert pc.attend_query(kind, layer, k, with_lse=True)[0].shape == (H_KV, 2, D)


def test_k_and_v_of_two_types_are_refused_by_name(pc: Any) -> None:
    q, half = normal(23, H_Q, 1, D), K.astype("f2")
    for keys, values in ((K, half), (half, K), (as_mlx(K, "bfloat16"), K)):
        with pytest.raises(TypeError, match="K is .*float.* and V is .*float"):
            pc.attend_store_layer("mixed", 0, keys, values)
        with pytest.raises(TypeError, match="K_suf is .* and V_suf is"):
            pc.attend_query_fused("ns", 0, q, keys, values, MAP)
        with pytest.raises(TypeError, match="K_suf is .* and V_suf is"):
            pc.attend_query_sparse_auto_fused("ns", 0, q[:, 0], 8, 1, keys, values)
    pc.attend_store_layer("halves", 0, half, half)
    with pytest.raises(ValueError, match="K of shape .* and V of shape"):
        pc.attend_store_layer("mixed", 0, K, V[:, :3])


@pytest.mark.parametrize("wrong", [K.astype("i4"), K.astype("c8"), K > 0, "text", None])
def test_what_is_no_array_of_floats_is_refused_by_name(pc: Any, wrong: Any) -> None:
    for name, call in {
        "K": lambda: pc.attend_store_layer("wrong", 0, wrong, wrong),
        "Q": lambda: pc.attend_query("ns", 0, wrong),
        "K_suf": lambda: pc.attend_query_fused("ns", 0, normal(1, H_Q, 1, D), wrong, wrong, MAP),
    }.items():
        with pytest.raises(TypeError, match=f"^{name} is an array of floats"):
            call()
    with pytest.raises(TypeError, match="Q is an array of floats, not of int32"):
        pc.attend_query("ns", 0, as_mlx(K, "int32"))


@pytest.mark.parametrize("number", [2.0, 1.5, "7", True, None])
def test_numbers_that_are_not_whole_are_refused_by_name(pc: Any, number: Any) -> None:
    q, k = normal(24, H_Q, 1, D), normal(25, H_KV, 1, D)
    calls = {
        "layer_id": lambda: pc.attend_query("ns", number, k),
        "top_k": lambda: pc.attend_query("ns", 0, k, top_k=number),
        "fa_window": lambda: pc.attend_query("ns", 0, k, fa_window=number),
        "B": lambda: pc.attend_query_sparse_auto("ns", 0, q[:, 0], number, 1, head_map=MAP),
        "K_top": lambda: pc.attend_query_sparse_auto("ns", 0, q[:, 0], 8, number, head_map=MAP),
        "H_kv": lambda: pc.attend_query_sparse_auto("ns", 0, q[:, 0], 8, 1, H_kv=number),
        "head_map": lambda: pc.attend_query_fused("ns", 0, q, k, k, [number] * H_Q),
    }
    for name, call in calls.items():
        if number is None and name in ("fa_window", "H_kv"):
            continue  # None is their default
        with pytest.raises(TypeError, match=f"{name} is a whole number"):
            call()


def test_numbers_of_numpy_are_whole_ones(pc: Any) -> None:
    q = normal(26, H_KV, D)
    one = np.int64(1)
    pc.attend_query("ns", np.uint16(0), q, top_k=one, fa_window=one)
    pc.attend_query_sparse_auto("ns", 0, q, np.int32(8), one, H_kv=np.int64(H_KV))


@pytest.mark.parametrize("pc", ["binary", "resp"], indirect=True)
def test_no_query_no_block_and_heads_that_are_not_there_are_said_clearly(pc: Any) -> None:
    q, k = normal(27, H_Q, 1, D), normal(28, H_KV, 1, D)
    for none in (q[:, :0], normal(1, 0, 1, D)):
        with pytest.raises(ValueError, match="holds no query: M must be 1 or more|head_map"):
            pc.attend_query_fused("ns", 0, none, k, k, MAP)
        with pytest.raises(ValueError, match="holds no query"):
            pc.attend_query("ns", 0, none)
    for name, block, top in (("B", 0, 1), ("B", -8, 1), ("K_top", 8, 0)):
        with pytest.raises(ValueError, match=f"{name} must be 1 or more"):
            pc.attend_query_sparse_auto("ns", 0, q[:, 0], block, top, head_map=MAP)
    for heads in ([0, 0, 1, 2], [0, 0, 1, 256], [0, 0, -1, 1]):
        with pytest.raises(ValueError, match="head_map names head"):
            pc.attend_query_fused("ns", 0, q, k, k, heads)
    with pytest.raises(ValueError, match="H_kv must be 1 or more"):
        pc.attend_query_sparse_auto("ns", 0, q[:, 0], 8, 1, H_kv=0, head_map=MAP)


def test_a_refusal_says_the_same_on_both_lanes_and_its_code_once(opened: Opener) -> None:
    q, k = normal(29, H_Q, 1, D), normal(30, H_KV, 1, D)
    said = []
    for lane in ("binary", "resp"):
        pc = opened(None, lane)
        pc.attend_store_layer("said", 0, K, V)
        texts = []
        for arrays in ((q, k, k), (q[..., :20], k[..., :20], k[..., :20])):
            for layer in (0, 9):
                heads = [0] * H_Q if layer else MAP
                three = [np.concatenate([a, a[:1]])[:3] if layer == 0 else a for a in arrays[1:]]
                with pytest.raises(ServerRefused) as refused:
                    pc.attend_query_fused("said", layer, arrays[0], *three, heads)
                texts.append(str(refused.value))
        assert pc.attention.lane == lane
        said.append(texts)
    assert said[0] == said[1]
    assert [text.count("ERR") for text in said[0]] == [1] * 4
    assert any("shape mismatch" in text for text in said[0]) and "ERR session not found" in said[0]


@pytest.mark.parametrize("pc", ["binary", "resp"], indirect=True)
def test_a_cold_slot_of_grouped_queries_is_warmed_with_the_stored_heads(
    pc: Any, opened: Opener
) -> None:
    """H_q is no width of a row: told that, the server would skip every layer."""
    model, ids = tiny_model("llama"), token_ids(N)
    name = f"grouped {id(pc)}"
    cache = opened(model).get_or_prefill(ids, name)
    k, v = (np.array(a[0, :, :N]) for a in (cache[1].keys, cache[1].values))
    pc.attend_store_layer(name, 1, k, v)
    q, more = normal(31, H_Q, 1, D), normal(32, H_KV, 1, D)
    asked = {
        "fused": lambda: pc.attend_query_fused(name, 1, q, more, more, MAP),
        "auto": lambda: pc.attend_query_sparse_auto(name, 1, q[:, 0], 8, 9, H_KV, MAP),
        "auto, no H_kv": lambda: pc.attend_query_sparse_auto(name, 1, q[:, 0], 8, 9),
        "auto fused": lambda: pc.attend_query_sparse_auto_fused(name, 1, q[:, 0], 8, 9, more, more),
        "dense": lambda: pc.attend_query(name, 1, more),
    }
    row = normal(33, 1, 1, D)
    for count, call in enumerate(asked.values(), 1):
        before = call()
        for layer in range(256):
            pc.attend_store_layer("pushing", layer, row, row)
        assert np.allclose(call(), before, atol=1e-5)
        assert pc.cold_rehydrates_observed == count


@pytest.mark.parametrize("pc", ["binary", "resp"], indirect=True)
def test_the_stored_heads_are_asked_for_where_they_are_not_given(pc: Any) -> None:
    q = normal(34, H_Q, D)
    for heads in (MAP, [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]):
        wanted = attended(q[:, None], K[heads], V[heads])[0][:, 0]
        for stored in (None, H_KV):
            found = pc.attend_query_sparse_auto("ns", 0, q, 8, 9, stored, heads)
            assert np.allclose(found, wanted, atol=1e-5)
            if heads == MAP:
                found = pc.attend_query_sparse_auto("ns", 0, q, 8, 9, stored)
                assert np.allclose(found, wanted, atol=1e-5)
    with pytest.raises(ValueError, match="3 query heads do not share 2 heads evenly"):
        pc.attend_query_sparse_auto("ns", 0, q[:3], 8, 9)
    with pytest.raises(ValueError, match="head_map names head 2 of 2"):
        pc.attend_query_sparse_auto("ns", 0, q, 8, 9, head_map=[0, 1, 1, 2])
    with pytest.raises(ValueError, match="head_map names the stored heads of 2 query heads"):
        pc.attend_query_sparse_auto("ns", 0, q, 8, 9, head_map=[])
    with pytest.raises(ServerRefused, match="session not found: layer 9 .* says H_kv, give it"):
        pc.attend_query_sparse_auto("ns", 9, q, 8, 9)
    with pytest.raises(ServerRefused, match="session not found"):
        pc.attend_query_sparse_auto("ns", 9, q, 8, 9, H_KV)


def test_the_heads_of_a_prefix_by_its_content_are_those_of_its_record(opened: Opener) -> None:
    model, ids = tiny_model("llama"), token_ids(N)
    staged = opened(model, stage2=True)
    cache = staged.get_or_prefill(ids, "its heads")
    k, v = (np.array(a[0, :, :N])[MAP] for a in (cache[1].keys, cache[1].values))
    q = normal(35, H_Q, D)
    for pc in (staged, opened(None)):
        found = pc.attend_query_sparse_auto("its heads", 1, q, 8, 9)
        assert np.allclose(found, attended(q[:, None], k, v)[0][:, 0], atol=1e-4)
        with pytest.raises(ServerRefused, match="session not found: layer 2"):
            pc.attend_query_sparse_auto("its heads", 2, q, 8, 9)


@pytest.mark.parametrize(
    ("namespace", "kind"), [("", ValueError), (None, TypeError), (b"ns", TypeError), (7, TypeError)]
)
def test_a_namespace_that_is_no_text_is_refused_before_anything_is_sent(
    namespace: Any, kind: type[Exception]
) -> None:
    q, k = normal(36, H_Q, 1, D), normal(37, H_KV, 1, D)
    with PionPromptCache(port=free_port_block()) as pc:  # where nobody would answer
        for call in (
            lambda: pc.attend_store_layer(namespace, 0, K, V),
            lambda: pc.attend_query(namespace, 0, k),
            lambda: pc.attend_query_fused(namespace, 0, q, k, k, MAP),
            lambda: pc.attend_query_sparse_auto(namespace, 0, q[:, 0], 8, 9),
            lambda: pc.attend_query_sparse_auto_fused(namespace, 0, q[:, 0], 8, 9, k, k),
        ):
            with pytest.raises(kind, match="namespace .* text"):
                call()


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3_text"])
def test_stage_2_of_a_model_that_cannot_have_it_is_counted_and_never_raised(
    opened: Opener, family: str
) -> None:
    model, ids = tiny_model(family), token_ids(20)
    staged = opened(model, stage2=True)
    assert staged.get_or_prefill(ids, f"latent {family}")[0].offset == len(ids)
    assert staged.stats()["store_failures"] == 1 and not staged.lookup(f"latent {family}")


@pytest.mark.parametrize("switch", ["1", ""])
def test_a_failing_sparse_call_is_told_of_where_the_switch_says_so(
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch: str,
) -> None:
    monkeypatch.setenv("PION_DEBUG_SPARSE_AUTO", switch)
    pc, told = opened(None), "sparse attention over nowhere layer 3: "
    with pytest.raises(ServerRefused):
        pc.attend_query_sparse_auto("nowhere", 3, normal(1, H_Q, D), 8, 2, H_KV, MAP)
    assert (told in caplog.text) == bool(switch)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("switch", ["1", ""])
def test_a_failing_sparse_call_of_the_patch_is_told_of_as_well(
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch: str,
) -> None:
    monkeypatch.setenv("PION_DEBUG_SPARSE_AUTO", switch)
    model, name, ids = tiny_model("llama"), f"told{switch}", token_ids(40)
    pc = opened(model)
    pc.get_or_prefill(ids, name)
    mode = {"K_block": 4, "K_blocks": 2}
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(ids), mode)
    pc.resp.call("KV.PREFIX.DROP", name)
    with pytest.raises(PionError):
        model(mx.array([[1]]), cache=cache)
    assert (f"sparse attention over {name} layer 0: " in caplog.text) == bool(switch)
