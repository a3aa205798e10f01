"""What a request finds at the start, beside others, and what is said of what it did not find."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from pion_vllm_mlx.cache import store_client_endpoint  # noqa: E402
from pion_vllm_mlx.cache.data_folder import read_status  # noqa: E402
from pion_vllm_mlx.cache.layers import cache_arrays  # noqa: E402
from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore  # noqa: E402
from pion_vllm_mlx.serve.engine_mlx_lm import named_entries  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, PlannedPrompt, Rate  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402
from tests.serve.front import until  # noqa: E402

DEADLINE_SECONDS = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


def opened(
    server: RunningServer, model: Any, test: str, limits: CacheLimits | None = None, **more: Any
) -> LineageCache:
    """A cache over the server's store, for ``model``."""
    url = f"tcp://127.0.0.1:{server.port}"
    options = LineageOptions(url=url, key_parts={"test": test}, **more)
    cache = LineageCache(options, limits or CacheLimits())
    cache.attach(model, None)
    return cache


def filled(model: Any, tokens: list[int]) -> list[Any]:
    """Caches that hold ``tokens``."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=caches)
    mx.eval(cache_arrays(caches))
    return caches


def nothing() -> None:
    """What a connection does while the store is asked."""


def looked_up(cache: LineageCache, tokens: list[int]) -> Plan:
    plan = Plan(tokens)
    cache.look_up(plan, nothing)
    return plan


def keep(cache: LineageCache, model: Any, tokens: list[int]) -> None:
    cache.insert_cache("m", tokens, filled(model, tokens))


# -- the start ---------------------------------------------------------------------


def slow_start(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Has the embedded server come up late, as on a machine that loads a model."""
    attach, delays = store_client_endpoint.attach, [seconds]

    def late(*args: Any, **options: Any) -> Any:
        if delays:
            time.sleep(delays.pop())
        return attach(*args, **options)

    monkeypatch.setattr(store_client_endpoint, "attach", late)


def embedded(folder: Path, **more: Any) -> LineageOptions:
    return LineageOptions(url=f"embedded://{folder}", deadline_seconds=DEADLINE_SECONDS, **more)


def stored(folder: Path, model: Any, tokens: list[int]) -> None:
    """Has the embedded server of a folder store what ``tokens`` are."""
    cache = LineageCache(embedded(folder), CacheLimits())
    cache.attach(model, None)
    keep(cache, model, tokens)
    cache.close()


def test_a_store_that_has_to_be_started_has_time_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_model("llama"), token_ids(100, 1)
    stored(tmp_path / "data", model, prompt)
    slow_start(monkeypatch, DEADLINE_SECONDS + 0.2)
    store = LineageStore(model, embedded(tmp_path / "data"))
    assert store.match([*prompt, 1]).length == 100
    assert "unavailable" not in store.stats()
    store.close()


def test_the_store_is_started_while_the_weights_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    cache = LineageCache(embedded(folder), CacheLimits())
    until(lambda: read_status(folder.resolve()) is not None, "the embedded server")
    cache.close()


def test_the_first_look_up_waits_for_a_store_that_is_on_its_way_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_model("llama"), token_ids(100, 2)
    stored(tmp_path / "data", model, prompt)
    slow_start(monkeypatch, DEADLINE_SECONDS + 0.2)
    again = LineageCache(embedded(tmp_path / "data"), CacheLimits())
    again.attach(model, None)
    plan = looked_up(again, [*prompt, 1])
    assert plan.restored is not None and plan.restored.length == 100, plan.why
    again.close()


def test_a_store_that_is_not_there_is_not_waited_for() -> None:
    store = LineageStore(tiny_model("llama"), LineageOptions(url="tcp://127.0.0.1:1"))
    began = time.monotonic()
    assert not store.connect(600.0)
    assert time.monotonic() - began < 300
    store.close()


# -- beside others -----------------------------------------------------------------


def fetched(cache: LineageCache, plan: Plan) -> list[Any] | None:
    """The caches that a request gets which was looked up already."""
    cache.plan(plan, None)
    return cache.fetch_nearest_cache("m", PlannedPrompt(plan))[0]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba"])
def test_what_others_delete_is_stored_again_while_memory_has_it(
    server: RunningServer, family: str
) -> None:
    model, prompt = tiny_model(family), token_ids(300, 77)
    cache = opened(server, model, f"deleted {family}")
    store = cache.store
    assert store is not None

    def turn() -> Plan:
        plan = looked_up(cache, [*prompt, 1])
        assert fetched(cache, plan) is not None or not store.stats().get("kept")
        assert store.flush()  # long before a reply has ended
        cache.insert_cache("m", prompt, filled(model, prompt), cache_type="final")
        assert store.flush()
        return plan

    turn()
    kept, written = {one.tokens for one in store.conversations()}, store.stats()["written"]
    assert max(kept) == len(prompt)
    turn()
    assert store.stats()["written"] == written
    other = opened(server, model, f"deleted {family}")
    assert other.store is not None
    for one in sorted(other.store.conversations(), key=lambda one: -one.tokens):
        other.store.drop(one.id)
    assert not store.conversations()
    assert turn().tier == "memory"
    assert {one.tokens for one in store.conversations()} == kept
    again = looked_up(other, [*prompt, 1])
    assert again.restored is not None and again.restored.length == len(prompt), again.why
    for one_cache in (cache, other):
        one_cache.close()


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_what_a_look_up_found_is_not_lost_to_others_until_it_is_used(
    server: RunningServer, family: str
) -> None:
    model = tiny_model(family)
    cache = opened(server, model, "lent", CacheLimits(1))
    prompt = token_ids(100, 3)
    keep(cache, model, prompt)
    plan = looked_up(cache, [*prompt, 1])
    for seed in range(20, 30):  # memory has room for one
        keep(cache, model, token_ids(40, seed))
    caches = fetched(cache, plan)
    assert (plan.reused, plan.tier, caches is not None) == (100, "memory", True)
    assert plan.lent is None  # it is the request's from now on
    cache.close()


def test_what_was_restored_behind_a_system_prompt_is_given_up_last(server: RunningServer) -> None:
    model, system = tiny_model("mamba"), token_ids(120, 30)
    for restarted in (False, True):
        cache = opened(server, model, "anchor", CacheLimits(1))
        if not restarted:
            cache.insert_cache("m", system, filled(model, system), cache_type="anchor")
            cache.close()
    assert looked_up(cache, [*system, *token_ids(40, 31)]).restored is not None
    for seed in range(32, 42):
        keep(cache, model, token_ids(40, seed))
    assert cache.stats()["live_evictions"] > 0
    assert looked_up(cache, [*system, *token_ids(40, 42)]).held == len(system)
    cache.close()


def test_more_that_became_live_meanwhile_is_taken_instead(server: RunningServer) -> None:
    model = tiny_model("llama")
    cache = opened(server, model, "more")
    prompt = token_ids(100, 4)
    keep(cache, model, prompt[:50])
    plan = looked_up(cache, [*prompt, 1])
    assert plan.held == 50
    keep(cache, model, prompt)
    caches = fetched(cache, plan)
    assert caches is not None and (plan.reused, caches[0].offset) == (100, 100)
    cache.close()


def test_live_caches_are_bounded_by_bytes_unless_a_number_was_asked_for(
    server: RunningServer,
) -> None:
    model = tiny_model("llama")
    for limits, expected in ((CacheLimits(), 14), (CacheLimits(3), 3)):
        cache = opened(server, model, "bounds", limits)
        for seed in range(14):
            keep(cache, model, token_ids(20, seed))
        assert len(cache) == expected
        cache.close()
    assert CacheLimits(num_bytes=5).live_bytes() == 5
    assert 0 < CacheLimits().live_bytes() < 1 << 50
    given = {"prompt_cache_size": 7}
    for words, entries in (([], None), (["--prompt-cache-size=7"], 7), (["--prompt-cache-s"], 7)):
        assert named_entries(words, given) == entries
    assert named_entries(["--prompt-cache-bytes", "9", "--prompt"], given) is None


# -- why it was not more -----------------------------------------------------------


def test_why_is_about_what_was_reused_not_about_the_store_alone(server: RunningServer) -> None:
    model = tiny_model("llama")
    cache = opened(server, model, "why", queue_bytes=1)  # nothing reaches the store
    prompt = token_ids(100, 5)
    keep(cache, model, prompt)
    plan = looked_up(cache, [*prompt, *token_ids(50, 6)])
    assert fetched(cache, plan) is not None
    assert (plan.reused, plan.why) == (100, "the prompt leaves what is kept at token 100")
    short = looked_up(cache, [*prompt, *token_ids(9, 8)])
    assert fetched(cache, short) is not None
    assert short.why == (
        "memory has 100 tokens, and the store is not asked for 8 more: fewer than --pion-min-gain"
    )
    other = looked_up(cache, token_ids(90, 7))
    assert fetched(cache, other) is None
    assert other.why == "nothing is stored that begins like this prompt"
    cache.close()


def test_what_the_budget_had_no_room_for_is_said_to_have_had_none(server: RunningServer) -> None:
    model = tiny_model("llama")
    cache = opened(server, model, "budget", CacheLimits(1), budget_bytes=1000)
    prompt = token_ids(100, 8)
    keep(cache, model, prompt)
    assert cache.store is not None and cache.store.flush()
    keep(cache, model, token_ids(40, 9))  # memory has room for one
    plan = looked_up(cache, [*prompt, 1])
    assert fetched(cache, plan) is None
    assert plan.why == "no room for 100 of it: the budget is 1,000 bytes"
    cache.close()


def test_a_store_that_has_gone_is_named_whatever_memory_gave() -> None:
    model = tiny_model("llama")
    cache = LineageCache(LineageOptions(url="tcp://127.0.0.1:1"), CacheLimits())
    cache.attach(model, None)
    prompt = token_ids(100, 10)
    keep(cache, model, prompt)
    plan = looked_up(cache, [*prompt, *token_ids(50, 11)])
    assert fetched(cache, plan) is not None
    assert plan.reused == 100 and plan.why.startswith("no store: ")
    cache.close(1.0)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_miss_is_explained_by_what_there_was_then(server: RunningServer, restarted: bool) -> None:
    """From memory, and from the store; meanwhile the missed prompt is stored itself."""
    model, name = tiny_model("llama"), f"missed {restarted}"
    cache = opened(server, model, name)
    start = token_ids(100, 12 + restarted)
    keep(cache, model, [*start, 7, 8, 9])
    if restarted:
        cache.close()
        cache = opened(server, model, name)
    asked = [*start, 5, 8, 9, 1]
    plan = looked_up(cache, asked)
    assert fetched(cache, plan) is not None
    keep(cache, model, asked)
    assert cache.store is not None and cache.store.flush()
    missed = cache.last_miss
    assert missed is not None
    told = missed.explained(cache.store)
    assert (told.common, told.restorable, told.position) == (100, 100, 100)
    assert (told.stored_token, told.asked_token) == (7, 5)
    nothing_missing = cache.store.explain(asked)
    assert nothing_missing.restorable == len(asked) - 1
    cache.close()


def test_a_miss_of_nothing_alike_says_why(server: RunningServer) -> None:
    model = tiny_model("llama")
    cache = opened(server, model, "nothing alike")
    plan = looked_up(cache, token_ids(60, 14))
    assert fetched(cache, plan) is None
    keep(cache, model, list(plan.tokens))
    assert cache.store is not None and cache.store.flush() and cache.last_miss is not None
    told = cache.last_miss.explained(cache.store)
    assert (told.common, told.restorable) == (0, 0)
    assert told.sentence == "nothing is stored that begins like this prompt"
    cache.close()


def test_nothing_saved_has_no_sign() -> None:
    plan = Plan(token_ids(9))
    plan.fetched(0, "none", 1e-5, True)
    assert str(plan.receipt(Rate(100.0))["saved_ms"]) == "0.0"


def test_a_prefill_rate_that_was_measured_is_told_after_a_restart(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this machine, and of this model."""
    model, tokens = tiny_model("llama"), token_ids(200, 15)
    first = opened(server, model, "rate")
    assert first.stats()["prefill_tokens_per_second"] is None, "nothing is measured yet"
    first.prefilling.measured(1000, 2.0)
    keep(first, model, tokens)
    assert first.store is not None and first.store.flush()
    first.close()
    again = opened(server, model, "rate")
    plan = looked_up(again, [*tokens, 1])
    assert fetched(again, plan) is not None and plan.reused == 200
    assert again.stats()["prefill_tokens_per_second"] == 500.0
    saved = plan.receipt(again.prefilling)["saved_ms"]
    assert saved == pytest.approx(200 / 500 * 1000 - plan.restore_ms, abs=0.01)
    again.attach(tiny_model("deepseek_v3"), None)
    assert looked_up(again, tokens).receipt(again.prefilling)["saved_ms"] is None
    again.close()
    monkeypatch.setattr("pion_vllm_mlx.cache.lineage.rates.this_machine", lambda: "another")
    elsewhere = opened(server, model, "rate")
    assert looked_up(elsewhere, tokens).receipt(elsewhere.prefilling)["saved_ms"] is None
    elsewhere.close()


@pytest.mark.parametrize("switched_off", [False, True])
def test_without_lineages_memory_reuses_whole_prompts_alone(
    switched_off: bool, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switched_off:
        monkeypatch.setenv("PION_LINEAGE", "0")
    model, tokens = tiny_model("llama"), token_ids(100, 16)
    cache = opened(server, model, f"whole {switched_off}")
    keep(cache, model, tokens)
    assert cache.store is not None and cache.store.flush()
    parted, longer = [*tokens[:60], *token_ids(20, 17)], [*tokens, 1]
    for prompt, reused in ((parted, 0 if switched_off else 60), (longer, 100)):
        plan = looked_up(cache, prompt)
        fetched(cache, plan)
        assert plan.reused == reused, plan.why
    cache.close()


def test_without_lineages_a_prompt_is_found_again_whose_reply_was_kept(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the rows of its reply it would be a part of something longer, which is not used."""
    monkeypatch.setenv("PION_LINEAGE", "0")
    model, prompt = tiny_model("llama"), token_ids(100, 18)
    reply = [*prompt, *token_ids(20, 19)]
    cache = opened(server, model, "whole and replied")
    cache.insert_cache("m", prompt, filled(model, prompt), cache_type="final")
    keep(cache, model, reply)
    assert cache.store is not None and cache.store.flush()
    cache.close()
    again = opened(server, model, "whole and replied")
    for asked, reused in (([*prompt, 1], 100), ([*reply, 1], 100), ([*prompt[:80], 1], 0)):
        plan = looked_up(again, asked)
        fetched(again, plan)
        assert plan.reused == reused, plan.why
    again.close()
