"""What another model in the same process finds: the memory that the one before it took."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.conftest import RunningServer

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, Seen  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402

LENGTH = 1000
POOL = 12_345_678


def kept(cache: LineageCache, model: Any, seed: int) -> None:
    """Has a prompt kept, of which nobody else holds the caches."""
    prompt, caches = token_ids(LENGTH, seed), make_prompt_cache(model)
    mx.eval(model(mx.array([prompt]), cache=caches))
    cache.insert_cache("m", Seen(prompt, Plan([*prompt, 1])), caches, cache_type="final")
    cache.spread.finish()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_change_of_model_gives_back_what_its_caches_took(
    family: str, pion_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays first, then MLX's pool, into which they go where it has one."""
    first, second = tiny_model(family), tiny_model(family, rope_theta=77.0)
    cache = LineageCache(LineageOptions(url=f"tcp://127.0.0.1:{pion_server.port}"), CacheLimits(64))
    cache.attach(first, None)
    gc.collect()  # what tests before this one left
    before = mx.get_active_memory()
    for seed in range(4):
        kept(cache, first, seed)
    assert cache.store is not None and cache.store.flush(30)
    gc.collect()
    taken, bound = cache.nbytes, cache.stats()["live_bytes"]
    assert mx.get_active_memory() - before >= taken == bound > 0
    in_use: list[int] = []
    clear = mx.clear_cache

    def cleared() -> None:
        in_use.append(mx.get_active_memory())
        clear()

    monkeypatch.setattr(mx, "clear_cache", cleared)
    cache.attach(second, None)
    cache.beside(gc.collect)  # what is freed, is freed there
    assert cache.nbytes == cache.stats()["live_entries"] == 0
    assert in_use and in_use[-1] - before < taken / 10
    kept(cache, second, 9)
    assert 0 < cache.stats()["live_bytes"] < taken
    cache.attach(second, None)
    assert len(in_use) == 1, "which was no change"
    cache.close()


def test_the_allocator_s_own_pool_is_told(
    pion_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LineageCache(LineageOptions(url=f"tcp://127.0.0.1:{pion_server.port}"), CacheLimits(64))
    cache.attach(tiny_model("llama"), None)
    assert cache.stats()["allocator_bytes"] == mx.get_cache_memory()
    monkeypatch.setattr(mx, "get_cache_memory", lambda: POOL)  # on a CPU there is none
    assert cache.stats()["allocator_bytes"] == POOL
    cache.close()
