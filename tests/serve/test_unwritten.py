"""What memory has no room for is found all the same while it waits to be written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from pion_vllm_mlx.cache.layers import cache_arrays  # noqa: E402
from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, PlannedPrompt  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402

KINDS = ("llama", "gemma3_text", "qwen3_5")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


def filled(model: Any, tokens: list[int]) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=caches)
    mx.eval(cache_arrays(caches))
    return caches


def opened(server: RunningServer, model: Any, test: str, conversations: float) -> LineageCache:
    """A cache whose memory holds so many conversations of 100 tokens."""
    size = sum(array.nbytes for array in cache_arrays(filled(model, token_ids(100, 1))))
    options = LineageOptions(url=f"tcp://127.0.0.1:{server.port}", key_parts={"test": test})
    cache = LineageCache(options, CacheLimits(num_bytes=int(conversations * size)))
    cache.attach(model, None)
    return cache


@contextmanager
def busy(cache: LineageCache) -> Iterator[None]:
    """Nothing is written meanwhile."""
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)

    assert cache.store is not None
    cache.store._in_background(slow)
    assert begun.wait(30)
    try:
        yield
    finally:
        go_on.set()


def asked(cache: LineageCache, prompt: list[int]) -> tuple[Plan, list[Any] | None]:
    """The plan of a request, and the caches that it is given."""
    plan = Plan(prompt)
    cache.look_up(plan, lambda: None)
    cache.plan(plan, None)
    caches, _ = cache.fetch_nearest_cache("m", PlannedPrompt(plan))
    return plan, caches


def keep(cache: LineageCache, model: Any, tokens: list[int]) -> None:
    cache.insert_cache("m", tokens, filled(model, tokens), cache_type="final")


@pytest.mark.parametrize("conversations", [1.5, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_to_be_written_is_found_where_memory_has_no_room_for_it(
    server: RunningServer, kind: str, conversations: float
) -> None:
    """Neither for a second conversation, nor for a single one."""
    model = tiny_model(kind)
    cache = opened(server, model, f"found {kind} {conversations}", conversations)
    prompts = [token_ids(100, seed) for seed in range(10, 14)]
    budget = cache._live.budget_bytes
    with busy(cache):
        for prompt in prompts:
            keep(cache, model, prompt)
        for prompt in prompts:
            plan, caches = asked(cache, [*prompt, *token_ids(40, 20)])
            assert caches is not None and (plan.reused, plan.tier) == (100, "memory")
            expected = model(mx.array([[5]]), cache=filled(model, prompt))
            assert mx.array_equal(model(mx.array([[5]]), cache=caches), expected)
        stats = cache.stats()
        assert stats["unwritten_bytes"] > 0 and stats["live_bytes"] <= budget
    assert cache.store is not None and cache.store.flush(30)
    stats = cache.stats()
    assert stats["unwritten_bytes"] == 0 and stats["live_bytes"] <= budget
    plan, _ = asked(cache, [*prompts[0], *token_ids(40, 21)])
    assert plan.reused == 100 and plan.tier != "memory"
    assert not cache._live._held
    cache.close()


def test_more_than_may_be_set_aside_is_missed_and_said_to_wait(server: RunningServer) -> None:
    model = tiny_model("llama")
    cache = opened(server, model, "bound", 1.5)
    bound = cache._live._aside.budget_bytes = cache._live.budget_bytes
    prompts = [token_ids(100, seed) for seed in range(30, 34)]
    with busy(cache):
        for prompt in prompts:
            keep(cache, model, prompt)
        assert 0 < cache.stats()["unwritten_bytes"] <= bound
        found = [asked(cache, [*prompt, *token_ids(40, 35)])[0] for prompt in prompts]
    why = "100 tokens of it wait to be stored, and memory had no room for them"
    assert [plan.reused for plan in found] == [0, 0, 100, 100]
    assert [plan.why for plan in found[:2]] == [why, why]
    stats = cache.stats()
    assert stats["not_yet"] == 2 and stats["reasons"]["not_yet"] == why
    assert cache.store is not None and cache.store.flush(30)
    assert asked(cache, [*prompts[0], *token_ids(40, 36)])[0].reused == 100
    cache.close()


def test_as_much_is_set_aside_as_may_wait_to_be_written(server: RunningServer) -> None:
    options = LineageOptions(url=f"tcp://127.0.0.1:{server.port}", queue_bytes=12345)
    cache = LineageCache(options, CacheLimits(num_bytes=1000))
    cache.attach(tiny_model("llama"), None)
    assert cache._live._aside.budget_bytes == 12345
    cache.close()


def failing(cache: LineageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise OSError("no room on the disk")

    monkeypatch.setattr(cache.store, "_write", fail)


def full(cache: LineageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.store is not None
    monkeypatch.setattr(cache.store._background, "_most_bytes", -1)


def refused(cache: LineageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.store, "_bypass", "as the test has it")


@pytest.mark.parametrize("goes_wrong", [failing, full, refused])
def test_nothing_is_set_aside_any_longer_for_what_will_not_be_written(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    goes_wrong: Callable[[LineageCache, pytest.MonkeyPatch], None],
) -> None:
    model = tiny_model("llama")
    cache = opened(server, model, f"wrong {goes_wrong.__name__}", 1.5)
    goes_wrong(cache, monkeypatch)
    with busy(cache):
        cache.store and cache.store._in_background(lambda: None)  # with one more, a queue is full
        for seed in range(40, 43):
            keep(cache, model, token_ids(100, seed))
    assert cache.store is not None and cache.store.flush(30)
    assert not cache._live._held and not cache.stats()["unwritten_bytes"]
    cache.close()
