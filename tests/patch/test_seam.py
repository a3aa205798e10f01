"""Installing and taking back, what is refused by name, and foreign caches."""

from __future__ import annotations

import sys
import types
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, gemma2, llama
from mlx_lm.models.cache import make_prompt_cache

import pion_vllm_mlx
from pion_vllm_mlx import PionMlxCompatError, PionPrefixCache
from pion_vllm_mlx.patch import seam
from tests.models import tiny_model, token_ids
from tests.patch.conftest import SUFFIX, Opener, alone, forwards
from tests.patch.families import made, names
from tests.test_package import WITHOUT_MLX, run_python

NAME = seam.NAME


def test_taking_back_restores_the_very_objects_and_twice_is_once() -> None:
    before = {name: vars(module).get(NAME) for name, module in models().items()}
    pion_vllm_mlx.install_pion_attention_patch()
    inside = vars(llama)[NAME]
    pion_vllm_mlx.install_pion_attention_patch()
    assert vars(llama)[NAME] is inside is vars(base)[NAME]
    assert inside is not before["mlx_lm.models.llama"]
    pion_vllm_mlx.uninstall_pion_attention_patch()
    pion_vllm_mlx.uninstall_pion_attention_patch()
    assert {name: vars(module).get(NAME) for name, module in models().items()} == before


def models() -> dict[str, types.ModuleType]:
    return {n: m for n, m in sys.modules.items() if n.startswith("mlx_lm") and m is not None}


@pytest.mark.usefixtures("patched")
def test_models_imported_later_are_patched_and_taken_back_too() -> None:
    sys.modules.pop("mlx_lm.models.qwen2", None)
    import mlx_lm.models.qwen2 as qwen2

    assert vars(qwen2)[NAME] is vars(base)[NAME]
    pion_vllm_mlx.uninstall_pion_attention_patch()
    assert vars(qwen2)[NAME] is vars(base)[NAME]
    assert not seam.SEAM.installed()


@pytest.mark.usefixtures("patched")
def test_foreign_caches_are_attended_by_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), token_ids(20)
    patched = forwards(model, make_prompt_cache(model), 3)
    no_cache = model(mx.array([ids]))
    pion_vllm_mlx.uninstall_pion_attention_patch()
    plain = forwards(model, make_prompt_cache(model), 3)
    assert all(mx.array_equal(a, b) for a, b in zip(patched, plain, strict=True))
    assert mx.array_equal(no_cache, model(mx.array([ids])))


def test_the_report_names_versions_and_parameters() -> None:
    report = pion_vllm_mlx.mlx_lm_seam_report()
    assert report["signature_ok"] and report["missing_symbols"] == []
    assert report["sdpa_params"] == report["expected_sdpa_params"] == list(seam.EXPECTED)
    assert report["mlx_lm_version"].startswith("0.3")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NAME, lambda q, k, v, scale: None, "takes .'q', 'k', 'v', 'scale'"),
        ("create_causal_mask", None, "lacks mlx_lm.models.base.create_causal_mask"),
    ],
)
def test_an_unknown_seam_is_refused_with_what_differs(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str
) -> None:
    if value is None:
        monkeypatch.delattr(base, name)
    else:
        monkeypatch.setattr(base, name, value)
    with pytest.raises(PionMlxCompatError, match=message):
        pion_vllm_mlx.install_pion_attention_patch()
    assert not seam.SEAM.installed()
    assert pion_vllm_mlx.mlx_lm_seam_report()["mlx_lm_version"]


@pytest.mark.parametrize(("version", "refused"), [("0.20.0", True), ("9.0", False)])
def test_an_old_mlx_lm_is_refused_and_a_new_one_warned_of(
    monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    monkeypatch.setattr(seam, "_version", lambda: version)
    if refused:
        with pytest.raises(PionMlxCompatError, match="older"):
            seam.check_seam()
    else:
        with pytest.warns(UserWarning, match="newer than the newest tested"):
            seam.check_seam()


def test_without_mlx_the_names_are_there_and_say_what_is_missing() -> None:
    result = run_python(
        WITHOUT_MLX + "import pion_vllm_mlx as p\n"
        "assert p.PionPrefixCache is None\n"
        "assert p.mlx_lm_seam_report()['mlx_lm_version'] is None\n"
        "for call in (p.install_pion_attention_patch, p.uninstall_pion_attention_patch,\n"
        "             lambda: p.make_pion_prompt_cache(None, 'n', None, 1)):\n"
        "    try:\n"
        "        call()\n"
        "    except p.PionMlxCompatError as error:\n"
        "        assert isinstance(error.__cause__, ImportError)\n"
        "        print(error)\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("pip install 'pion-vllm-mlx[mlx]'") == 3


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "falcon_h1", "rwkv7"])
def test_recurrent_layers_are_refused_by_name(opened: Opener, family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(PionMlxCompatError, match=f"{family}: a layer with ArraysCache"):
        pion_vllm_mlx.make_pion_prompt_cache(model, "n", opened(model), 4)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma2", r"gemma2\.Attention computes attention itself"),
        ("olmo", r"olmo\..* computes attention itself"),
        ("plamo2", "plamo2: a layer with ArraysCache"),
        ("deepseek_v41", "deepseek_v41: a layer with LayerCache"),
    ],
)
def test_a_model_that_attends_by_itself_is_refused_by_name(
    opened: Opener, family: str, why: str
) -> None:
    if family not in names():
        pytest.skip("this mlx-lm has no such model")
    model = made(family)
    with pytest.raises(PionMlxCompatError, match=why):
        pion_vllm_mlx.make_pion_prompt_cache(model, "n", opened(model), 4)
    assert not hasattr(gemma2, NAME)


@pytest.mark.usefixtures("patched")
def test_a_layer_that_bypasses_the_seam_at_run_time_is_found_out(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), token_ids(20)
    pc = opened(model)
    pc.get_or_prefill(ids, "bypass")
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, "bypass", pc, len(ids))
    monkeypatch.setattr(llama, NAME, lambda q, *_, **__: q)
    with pytest.raises(PionMlxCompatError, match="layer 0: the model bypasses"):
        forwards(model, cache, 1)


@pytest.mark.usefixtures("patched")
def test_keys_that_were_changed_after_the_cache_are_refused(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), token_ids(20)
    pc = opened(model)
    pc.get_or_prefill(ids, "changed")
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, "changed", pc, len(ids))
    place = vars(base)[NAME]

    def turned(q: Any, k: Any, *rest: Any, **named: Any) -> Any:
        return place(q, 2 * k, *rest, **named)

    monkeypatch.setattr(llama, NAME, turned)
    with pytest.raises(PionMlxCompatError, match="changes K or V"):
        forwards(model, cache, 1)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("lane", ["in-process", "binary"])
def test_taking_the_patch_back_under_a_cache_is_no_wrong_number(opened: Opener, lane: str) -> None:
    model, ids = tiny_model("llama"), token_ids(20)
    pc = opened(model, lane)
    pc.get_or_prefill(ids, "taken back")
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, "taken back", pc, len(ids))
    pion_vllm_mlx.uninstall_pion_attention_patch()
    with pytest.raises(PionMlxCompatError, match="not in place"):
        forwards(model, cache, 1)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("lane", ["in-process", "binary"])
def test_sinks_and_batches_are_refused(opened: Opener, lane: str) -> None:
    model, ids = tiny_model("llama"), token_ids(20)
    pc = opened(model, lane)
    pc.get_or_prefill(ids, "refused")
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, "refused", pc, len(ids))
    q, k = mx.zeros((1, 4, 1, 32)), mx.zeros((1, 2, 1, 32))
    keys, values = cache[0].update_and_fetch(k, k)
    if lane != "in-process":  # there mlx-lm's own function has them
        with pytest.raises(NotImplementedError, match="sinks"):
            vars(base)[NAME](q, keys, values, cache[0], 1.0, None, mx.zeros(4))
    fresh = pion_vllm_mlx.make_pion_prompt_cache(model, "refused", pc, len(ids))
    with pytest.raises(NotImplementedError, match="batch"):
        model(mx.array([SUFFIX, SUFFIX]), cache=fresh)


@pytest.mark.usefixtures("patched")
def test_no_prefix_is_plain_attention(opened: Opener) -> None:
    model = tiny_model("llama")
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, "none", opened(model), 0)
    found = forwards(model, cache, 3)
    wanted = forwards(model, make_prompt_cache(model), 3)
    assert all(mx.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_cache_is_not_made_where_the_patch_is_not_in_place(opened: Opener) -> None:
    model = tiny_model("llama")
    with pytest.raises(PionMlxCompatError, match="install_pion_attention_patch"):
        pion_vllm_mlx.make_pion_prompt_cache(model, "n", opened(model), 4)


@pytest.mark.usefixtures("patched")
def test_layers_may_be_made_one_by_one(opened: Opener) -> None:
    model, ids = tiny_model("llama"), token_ids(20)
    pc = opened(model)
    pc.get_or_prefill(ids, "one by one")
    cache = [PionPrefixCache(layer, "one by one", pc, len(ids)) for layer in range(2)]
    found, wanted = forwards(model, cache, 3), alone(model, ids, 3)
    assert max(float(mx.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)) < 1e-5


@pytest.mark.parametrize("place", ["base", "model"])
def test_a_replacement_that_reached_some_models_only_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    before = vars(llama)[NAME]

    def theirs(  # noqa: PLR0913
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        return before(queries, keys, values, cache, scale, mask, sinks)

    monkeypatch.setattr(base if place == "base" else llama, NAME, theirs)
    with pytest.raises(PionMlxCompatError, match=r"mlx_lm.models.*another package.*test_seam"):
        pion_vllm_mlx.install_pion_attention_patch()
    assert not seam.SEAM.installed()
    assert vars(llama)[NAME] is (before if place == "base" else theirs)


def test_a_replacement_that_reached_all_models_is_kept_below_ours() -> None:
    before = vars(base)[NAME]
    theirs = types.FunctionType(
        before.__code__, before.__globals__, NAME, before.__defaults__, before.__closure__
    )
    seam._replace(before, theirs)
    try:
        pion_vllm_mlx.install_pion_attention_patch()
        assert seam.SEAM.original is theirs and vars(llama)[NAME] is vars(base)[NAME] is not theirs
        pion_vllm_mlx.uninstall_pion_attention_patch()
        assert vars(llama)[NAME] is vars(base)[NAME] is theirs
    finally:
        seam._replace(theirs, before)
