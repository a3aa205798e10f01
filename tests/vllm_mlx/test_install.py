"""Installing and uninstalling: nothing is replaced that is not known, and all of it comes back."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache import (  # noqa: E402
    install_vllm_mlx_backend,
    uninstall_vllm_mlx_backend,
)
from pion_vllm_mlx.cache.vllm_mlx_backend import BackendSettings, PionPrefixCache  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend_seams import CONSULTED, REPLACED, Seam  # noqa: E402
from pion_vllm_mlx.errors import ConfigError, PionMlxCompatError  # noqa: E402
from tests.models import token_ids  # noqa: E402
from tests.vllm_mlx.engines import running_engine  # noqa: E402
from tests.vllm_mlx.families import FAMILIES  # noqa: E402

IN_PROCESS = BackendSettings(options=None)
pytestmark = pytest.mark.usefixtures("uninstalled")


def objects() -> dict[str, Any]:
    """The objects that stand at every seam now."""
    return {seam.label: vars(seam.owner())[seam.name] for seam in REPLACED}


def test_uninstalling_puts_the_very_objects_back() -> None:
    from vllm_mlx.server import app

    before, layers = objects(), list(app.user_middleware)
    install_vllm_mlx_backend(settings=IN_PROCESS)
    assert all(now is not before[label] for label, now in objects().items())
    assert len(app.user_middleware) == len(layers) + 1
    uninstall_vllm_mlx_backend()
    assert all(now is before[label] for label, now in objects().items())
    assert app.user_middleware == layers
    uninstall_vllm_mlx_backend()  # nothing is installed: nothing happens


def test_replaced_methods_keep_their_names_and_parameters() -> None:
    before = {label: value for label, value in objects().items() if not inspect.isclass(value)}
    install_vllm_mlx_backend(settings=IN_PROCESS)
    for label, now in objects().items():
        if label in before:
            assert now.__name__ == before[label].__name__
            assert inspect.signature(now) == inspect.signature(before[label])


def test_installing_twice_is_refused() -> None:
    install_vllm_mlx_backend(settings=IN_PROCESS)
    with pytest.raises(PionMlxCompatError, match="installed already"):
        install_vllm_mlx_backend(settings=IN_PROCESS)


@pytest.mark.parametrize("seam", [*REPLACED, *CONSULTED], ids=lambda seam: seam.label)
def test_a_seam_that_is_missing_is_refused_by_name_and_nothing_is_replaced(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(seam.owner(), seam.name)
    others = [other for other in REPLACED if other is not seam]
    before = [vars(other.owner()).get(other.name) for other in others]
    with pytest.raises(PionMlxCompatError, match=f"{seam.label} is missing"):
        install_vllm_mlx_backend(settings=IN_PROCESS)
    assert [vars(other.owner()).get(other.name) for other in others] == before


@pytest.mark.parametrize(
    "seam", [s for s in (*REPLACED, *CONSULTED) if s.parameters], ids=lambda seam: seam.label
)
def test_a_seam_with_other_parameters_is_refused_saying_which(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(self: Any, something: Any, *, new: Any) -> None:
        """A later version's."""

    monkeypatch.setattr(seam.owner(), seam.name, changed)
    with pytest.raises(PionMlxCompatError) as refused:
        install_vllm_mlx_backend(settings=IN_PROCESS)
    assert f"{seam.label} takes (self, something, new), not (" in str(refused.value)


def test_what_somebody_else_replaced_meanwhile_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_mlx.scheduler import Scheduler

    before = objects()
    install_vllm_mlx_backend(settings=IN_PROCESS)
    theirs = lambda self, request: None  # noqa: E731
    ours = vars(Scheduler)["add_request"]
    Scheduler.add_request = theirs
    try:
        with pytest.raises(PionMlxCompatError, match="Scheduler.add_request"):
            uninstall_vllm_mlx_backend()
        assert vars(Scheduler)["add_request"] is theirs
    finally:
        Scheduler.add_request = before["vllm_mlx.scheduler.Scheduler.add_request"]
    assert ours is not before["vllm_mlx.scheduler.Scheduler.add_request"]
    assert all(now is before[label] for label, now in objects().items())


def test_an_engine_built_before_the_backend_goes_on_with_its_own_cache() -> None:
    prompt = token_ids(80)
    with running_engine(FAMILIES["plain"]) as engine:
        first = engine.ask(prompt)
        install_vllm_mlx_backend(settings=IN_PROCESS)
        assert engine.ask(prompt).tokens == first.tokens
        assert not isinstance(engine.cache, PionPrefixCache)


def test_an_engine_outlives_the_backend() -> None:
    prompt = token_ids(80)
    install_vllm_mlx_backend(settings=IN_PROCESS)
    with running_engine(FAMILIES["plain"]) as engine:
        first = engine.ask(prompt)
        uninstall_vllm_mlx_backend()
        assert engine.ask(prompt).tokens == first.tokens


def test_what_the_scheduler_reads_of_a_cache_is_there() -> None:
    install_vllm_mlx_backend(settings=IN_PROCESS)
    with running_engine(FAMILIES["plain"], cache_memory_mb=3) as engine:
        cache = engine.cache
        assert cache.memory_limit_mb == 3
        prompt = token_ids(50)
        engine.ask(prompt)
        assert len(cache._entries) == 1
        assert cache._current_memory > 0
        caches, rest = cache.fetch(prompt)
        assert rest == prompt[-1:]
        assert (cache._last_match_type, cache._last_matched_key) == ("prefix", prompt[:-1])
        assert [type(layer).__name__ for layer in caches] == ["KVCache", "KVCache"]
        stats = asyncio.run(asyncio.to_thread(cache.get_stats))
        assert (stats["entry_count"], stats["hits"], stats["max_memory_mb"]) == (1, 1, 3.0)
        assert cache.load_from_disk("nowhere") == 0
        assert cache.save_to_disk("nowhere") is False
        assert not cache.remove([1, 2, 3])
        assert engine.core.clear_runtime_caches()["memory_aware_cache"]
        assert len(cache._entries) == cache._current_memory == 0


def test_the_budget_of_the_process_holds_and_what_is_too_big_for_it_is_not_kept() -> None:
    install_vllm_mlx_backend(settings=IN_PROCESS)
    with running_engine(FAMILIES["gated delta"], cache_memory_mb=1) as engine:
        for seed in range(6):
            engine.ask(token_ids(300, seed=70 + seed))
            assert engine.cache._current_memory <= 1 << 20
        assert engine.cache.get_stats()["evictions"] > 0
        engine.ask(token_ids(2000, seed=80))
        assert engine.cache._current_memory <= 1 << 20
        assert engine.cache.get_stats()["store_rejections"] > 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"budget_gb": "8"}, "budget_gb"),
        ({"budget_gb": None}, "budget_gb"),
        ({"budget_gb": True}, "budget_gb"),
        ({"budget_gb": float("nan")}, "budget_gb"),
        ({"budget_gb": float("inf")}, "budget_gb"),
        ({"budget_gb": -1}, "budget_gb"),
        ({"url": "garbage"}, "garbage"),
        ({"url": 5}, "url"),
        ({"settings": "x"}, "settings"),
    ],
)
def test_an_argument_that_is_none_is_refused_and_nothing_is_replaced(
    wrong: dict[str, Any], named: str
) -> None:
    before = objects()
    with pytest.raises(ConfigError, match=named):
        install_vllm_mlx_backend(**wrong)
    assert all(now is before[label] for label, now in objects().items())
