"""``PION_LINEAGE=0``: vllm-mlx's engine reuses whole prompts and replies, and no part of one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    PionPrefixCache,
    install_vllm_mlx_backend,
)
from tests.conftest import RunningServer  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402
from tests.vllm_mlx.engines import Engine, running_engine  # noqa: E402
from tests.vllm_mlx.families import FAMILIES  # noqa: E402

pytestmark = pytest.mark.usefixtures("uninstalled")

PROMPT = token_ids(620, seed=800)
EDITED = [*PROMPT[:400], *token_ids(220, seed=801)]
SUFFIX = [*PROMPT[:610], *token_ids(20, seed=802)]
#: what of an edit and of another suffix is reused where lineages are on
PARTS = {"plain": (400, 610), "sliding window": (400, 610), "gated delta 3.5": (0, 604)}


def reused(engine: Engine, prompt: list[int], expected: list[int]) -> int:
    """How much of a prompt was not computed; the reply is that of no cache."""
    reply, computed = engine.computed(prompt)
    assert reply.tokens == expected
    assert reply.cached == len(prompt) - computed
    return reply.cached


@pytest.mark.parametrize("lineage", [True, False], ids=["lineages", "whole prompts"])
@pytest.mark.parametrize("family", PARTS)
def test_with_the_switch_off_only_a_whole_kept_prompt_or_reply_is_reused(
    family: str,
    lineage: bool,
    pion_server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_engine(FAMILIES[family], enable_prefix_cache=False) as engine:
        first, edited, suffix = (engine.ask(one).tokens for one in (PROMPT, EDITED, SUFFIX))
        longer = [*PROMPT, *first, *token_ids(30, seed=803)]
        after = engine.ask(longer).tokens
    if not lineage:
        monkeypatch.setenv("PION_LINEAGE", "0")
    url = f"tcp://127.0.0.1:{pion_server.port}"
    install_vllm_mlx_backend(settings=BackendSettings(LineageOptions(url=url, deadline_seconds=30)))
    parts = PARTS[family] if lineage else (0, 0)
    with running_engine(FAMILIES[family]) as engine:
        assert reused(engine, PROMPT, first) == 0
        assert reused(engine, PROMPT, first) == len(PROMPT) - 1
        assert engine.cache.save_to_disk("")
    with running_engine(FAMILIES[family]) as engine:  # all of it is in the store
        assert reused(engine, PROMPT, first) == len(PROMPT) - 1
        told = tuple(reused(engine, *one) for one in ((EDITED, edited), (SUFFIX, suffix)))
        whole = reused(engine, longer, after)
        assert engine.cache.pion_stats()["restores"] > 0
    assert told == parts
    assert whole >= len(PROMPT) - 1


@pytest.mark.parametrize("lineage", ["1", "0"])
def test_prompts_of_models_that_see_are_stored_with_lineages_and_without(
    lineage: str, pion_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scheduler hands over prompts where that of others hands over replies."""
    monkeypatch.setenv("PION_LINEAGE", lineage)
    model, prompt = tiny_model("llama"), token_ids(100, seed=900)
    url = f"tcp://127.0.0.1:{pion_server.port}"
    settings = BackendSettings(LineageOptions(url=url, deadline_seconds=30))

    def opened() -> PionPrefixCache:
        config = SimpleNamespace(compute_memory_limit=lambda: 10**8, max_entries=100)
        return PionPrefixCache(model, config, settings)

    cache, caches = opened(), make_prompt_cache(model)
    model(mx.array([prompt]), cache=caches)
    assert cache.store(prompt, caches)
    assert cache.save_to_disk("")
    cache.close()
    after = opened()
    found, rest = after.fetch([*prompt, 1, 2])
    assert found is not None and rest == [1, 2]
    assert after.pion_stats()["restores"] == 1
    after.close()
