"""A process that is started again has the conversations that were used last in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from pion_vllm_mlx.cache.layers import cache_arrays  # noqa: E402
from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, PlannedPrompt  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402
from tests.serve.front import until  # noqa: E402

FAMILIES = ["llama", "gemma3_text", "qwen3_next", "mamba"]
ENOUGH = 10**9


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


def options(server: RunningServer, test: str, preload_bytes: int = ENOUGH) -> LineageOptions:
    url = f"tcp://127.0.0.1:{server.port}"
    return LineageOptions(url=url, key_parts={"test": test}, preload_bytes=preload_bytes)


def started(
    server: RunningServer, model: Any, test: str, preload_bytes: int = ENOUGH
) -> LineageCache:
    """The cache of a serve that was just started, when it has read what it reads ahead."""
    cache = LineageCache(options(server, test, preload_bytes), CacheLimits())
    cache.attach(model, None)
    until(lambda: not cache.stats()["reading_ahead"], "everything is read")
    return cache


def filled(model: Any, tokens: list[int]) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=caches)
    mx.eval(cache_arrays(caches))
    return caches


def store(server: RunningServer, model: Any, test: str, *prompts: list[int]) -> None:
    """Stores prompts, the last one used last."""
    keeper = LineageStore(model, options(server, test))
    for prompt in prompts:
        assert keeper.keep(prompt, filled(model, prompt)) and keeper.flush()
    keeper.close()


def asked(cache: LineageCache, prompt: list[int]) -> tuple[Plan, list[Any] | None]:
    """What a request for a prompt gets."""
    plan = Plan(prompt)
    cache.look_up(plan, lambda: None)
    cache.plan(plan, None)
    return plan, cache.fetch_nearest_cache("m", PlannedPrompt(plan))[0]


def goes_on(model: Any, caches: list[Any] | None, rest: list[int]) -> mx.array:
    """The last logits behind caches, which are written to."""
    assert caches is not None
    return model(mx.array(rest)[None], cache=caches)[:, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_restart_the_latest_conversation_is_in_memory_and_right(
    server: RunningServer, family: str
) -> None:
    model, prompt = tiny_model(family), token_ids(300, 5)
    store(server, model, f"latest {family}", prompt)
    cache = started(server, model, f"latest {family}")
    without = started(server, model, f"latest {family}", preload_bytes=0)
    assert len(cache) == 1 and not len(without)
    rest = [7, 8]
    plan, caches = asked(cache, [*prompt, *rest])
    assert (plan.reused, plan.tier) == (len(prompt), "memory")
    same, restored = asked(without, [*prompt, *rest])
    assert (same.reused, same.tier == "memory") == (len(prompt), False)
    found = goes_on(model, caches, rest)
    assert mx.array_equal(found, goes_on(model, restored, rest)).item()
    # generating behind it changes nothing of what stays in memory
    again, caches = asked(cache, [*prompt, 9])
    assert (again.reused, again.tier) == (len(prompt), "memory")
    assert again.reused == asked(without, [*prompt, 9])[0].reused
    fresh = goes_on(model, asked(without, [*prompt, 9])[1], [9])
    assert mx.array_equal(goes_on(model, caches, [9]), fresh).item()
    for one in (cache, without):
        one.close()


def test_what_is_read_ahead_is_neither_a_hit_nor_a_use(server: RunningServer) -> None:
    model = tiny_model("llama")
    store(server, model, "uncounted", token_ids(200, 1), token_ids(200, 2))
    keeper = LineageStore(model, options(server, "uncounted"))
    before = [(one.id, one.last_used) for one in keeper.conversations()]
    cache = started(server, model, "uncounted")
    told = cache.stats()
    assert (told["read_ahead"], told["tokens_read_ahead"]) == (2, 400)
    assert not told["restores"] and not told.get("matches")
    assert cache.store is not None and cache.store.flush()
    assert [(one.id, one.last_used) for one in keeper.conversations()] == before
    cache.close()
    keeper.close()


def test_the_latest_come_first_and_what_is_too_large_is_passed_over(server: RunningServer) -> None:
    model = tiny_model("llama")
    old, large, recent, last = (token_ids(n, n) for n in (128, 900, 129, 130))
    store(server, model, "room", old, large, recent, last)
    keeper = LineageStore(model, options(server, "room"))
    sizes = {one.tokens: one.num_bytes for one in keeper.conversations()}
    keeper.close()
    assert sizes[900] > sizes[128]
    cache = started(server, model, "room", sizes[130] + sizes[129] + sizes[900] - 1)
    # what memory serves counts as used, too: the last one is the last one again
    tiers = [asked(cache, [*prompt, 1])[0].tier for prompt in (large, old, recent, last)]
    assert tiers[1:] == ["memory"] * 3 and tiers[0] not in ("memory", "none")
    cache.close()
    cache = started(server, model, "room", sizes[130] + sizes[129] - 1)
    tiers = [asked(cache, [*prompt, 1])[0].tier for prompt in (last, recent)]
    assert tiers[0] == "memory" and tiers[1] not in ("memory", "none")
    cache.close()


def test_what_conversations_share_is_in_memory_with_each_of_them(server: RunningServer) -> None:
    model, root = tiny_model("llama"), token_ids(512, 11)
    both = [[*root, *token_ids(192, seed)] for seed in (12, 13)]
    store(server, model, "shared", *both)
    keeper = LineageStore(model, options(server, "shared"))
    together = sum(one.num_bytes for one in keeper.conversations())
    keeper.close()
    each = together * 704 // 896
    for preload_bytes, tiers in (
        (2 * each * 9 // 10, ["mapped", "memory"]),
        (2 * each * 3 // 2, ["memory"] * 2),  # a branch is read into room for some more rows
    ):
        cache = started(server, model, "shared", preload_bytes)
        assert [asked(cache, [*prompt, 1])[0].tier for prompt in both] == tiers
        cache.close()


def test_rows_that_take_more_in_memory_than_in_the_store_are_counted_as_in_memory(
    server: RunningServer,
) -> None:
    model = tiny_model("llama")  # float32 rows, a fourth of it in the store
    prompts = [token_ids(256, seed) for seed in range(60, 66)]
    settings = replace(options(server, "fp8"), vquant="fp8")
    keeper = LineageStore(model, settings)
    for prompt in prompts:
        assert keeper.keep(prompt, filled(model, prompt)) and keeper.flush()
    stored_bytes = sum(one.num_bytes for one in keeper.conversations())
    keeper.close()
    cache = LineageCache(replace(settings, preload_bytes=stored_bytes), CacheLimits())
    cache.attach(model, None)
    until(lambda: not cache.stats()["reading_ahead"], "everything is read")
    assert 0 < cache.nbytes <= 1.4 * stored_bytes and 0 < len(cache) < len(prompts)
    assert asked(cache, [*prompts[-1], 1])[0].tier == "memory"
    cache.close()


def test_the_latest_is_the_last_that_memory_gives_up(server: RunningServer) -> None:
    model = tiny_model("llama")
    prompts = [token_ids(100, seed) for seed in range(70, 74)]
    store(server, model, "order", *prompts)
    cache = started(server, model, "order")
    assert len(cache) == len(prompts)
    cache.trim_to(n_bytes=cache.nbytes // 4)
    assert len(cache) == 1
    assert asked(cache, [*prompts[-1], 1])[0].tier == "memory"
    cache.close()


def test_no_more_conversations_are_read_than_memory_keeps(server: RunningServer) -> None:
    model = tiny_model("llama")
    prompts = [token_ids(100, seed) for seed in range(90, 95)]
    store(server, model, "few", *prompts)
    cache = LineageCache(options(server, "few"), CacheLimits(entries=2))
    cache.attach(model, None)
    until(lambda: not cache.stats()["reading_ahead"], "everything is read")
    assert cache.stats()["read_ahead"] == 2 and not cache.stats()["live_evictions"]
    for prompt in prompts[-2:]:
        assert asked(cache, [*prompt, 1])[0].tier == "memory"
    cache.close()


def test_a_reply_that_was_given_up_is_not_read_beside_the_one_that_came_after(
    server: RunningServer,
) -> None:
    model, prompt = tiny_model("llama"), token_ids(300, 97)
    given_up, other = [*prompt, *token_ids(10, 1)], token_ids(200, 98)
    store(server, model, "given up", given_up, [*prompt, *token_ids(30, 2)], other)
    cache = started(server, model, "given up")
    assert cache.stats()["read_ahead"] == 2
    cache.close()


def test_a_fault_in_one_conversation_leaves_the_others(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    prompts = [token_ids(100, seed) for seed in range(80, 83)]
    store(server, model, "fault", *prompts)
    real = LineageStore.read_ahead

    def failing(self: LineageStore, tokens: Any) -> Any:
        if list(tokens) == prompts[-1]:
            raise ValueError("not this one")
        return real(self, tokens)

    monkeypatch.setattr(LineageStore, "read_ahead", failing)
    cache = started(server, model, "fault")
    assert len(cache) == 2
    cache.close()


def test_the_first_request_ends_the_reading(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    prompts = [token_ids(100, seed) for seed in range(30, 36)]
    store(server, model, "first", *prompts)
    real, cache = LineageStore.read_ahead, LineageCache(options(server, "first"), CacheLimits())

    def comes_meanwhile(self: LineageStore, tokens: Any) -> Any:
        """A request arrives while the first conversation is read; it waits on its own thread."""
        cache._ahead.stop()
        return real(self, tokens)

    monkeypatch.setattr(LineageStore, "read_ahead", comes_meanwhile)
    cache.attach(model, None)
    until(lambda: not cache.stats()["reading_ahead"] and len(cache) == 1, "one is read")
    plan, _ = asked(cache, [*prompts[-1], 1])
    assert (plan.reused, plan.tier) == (100, "memory")
    assert cache.stats()["read_ahead"] == 1
    cache.close()


def test_conversations_of_another_key_are_not_read(server: RunningServer) -> None:
    model, prompt = tiny_model("llama"), token_ids(100, 41)
    store(server, model, "theirs", prompt)
    cache = started(server, model, "mine")
    assert not len(cache)
    assert asked(cache, [*prompt, 1])[0].reused == 0
    cache.close()


def test_a_store_that_is_not_there_leaves_nothing_to_read() -> None:
    nowhere = LineageOptions(url="tcp://127.0.0.1:9", preload_bytes=ENOUGH)
    cache = LineageCache(nowhere, CacheLimits())
    cache.attach(tiny_model("llama"), None)
    assert asked(cache, token_ids(50, 1))[0].reused == 0
    assert not cache.stats()["reading_ahead"]
    cache.close(0.0)
