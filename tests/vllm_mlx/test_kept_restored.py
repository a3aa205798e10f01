"""What was read of the store is kept in the process: the next request does not read it again."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
)
from tests.conftest import RunningServer  # noqa: E402
from tests.models import token_ids  # noqa: E402
from tests.vllm_mlx.engines import REPLY_TOKENS, Engine, running_engine  # noqa: E402
from tests.vllm_mlx.families import FAMILIES, RECURRENT  # noqa: E402

pytestmark = pytest.mark.usefixtures("uninstalled")

SOME = ["plain", "sliding window", "gated delta 3.5", "mamba and attention", "rwkv"]
PROMPT = token_ids(300, seed=600)
#: a state is kept 16 tokens before the end of a prompt of that length
GUARD = len(PROMPT) - 16
LANES = {"mapped", "stored", "range"}
#: counters of what the store was asked for, and of what it was read
ASKED = ("matches", "tokens_looked_up", "restores", "tokens_restored", "bytes_restored")


def installed(server: RunningServer, **options: Any) -> None:
    url = f"tcp://127.0.0.1:{server.port}"
    install_vllm_mlx_backend(settings=BackendSettings(LineageOptions(url=url, **options)))


def without_cache(family: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    with running_engine(FAMILIES[family], enable_prefix_cache=False) as engine:
        return [engine.ask(prompt).tokens for prompt in prompts]


def stored(family: str, prompts: Sequence[Sequence[int]]) -> None:
    """Has another engine store prompts."""
    with running_engine(FAMILIES[family]) as engine:
        for prompt in prompts:
            engine.ask(prompt)
        assert engine.cache.save_to_disk("")


def asked(engine: Engine) -> dict[str, int]:
    """What the store was asked for so far."""
    stats = engine.cache.pion_stats()
    return {name: stats.get(name, 0) for name in ASKED}


def from_memory(engine: Engine, prompt: Sequence[int], reply: list[int], reused: int) -> None:
    """The reply of no cache, out of memory alone."""
    before = asked(engine)
    told, computed = engine.computed(prompt)
    assert told.tokens == reply
    assert (told.cached, computed) == (reused, len(prompt) - reused), told.lookup
    assert told.lookup.tier == "memory"
    assert asked(engine) == before


@pytest.mark.parametrize("family", SOME)
def test_a_repeat_of_what_was_restored_is_served_from_memory_with_the_store_frozen_too(
    family: str, pion_server: RunningServer
) -> None:
    expected = without_cache(family, [PROMPT])[0]
    installed(pion_server)
    stored(family, [PROMPT])
    with running_engine(FAMILIES[family]) as engine:
        first, computed = engine.computed(PROMPT)
        assert (first.tokens, first.cached, computed) == (expected, len(PROMPT) - 1, 1)
        assert first.lookup.tier in LANES and first.lookup.restore_ms > 0
        assert asked(engine)["restores"] == 1
        for _ in range(2):
            from_memory(engine, PROMPT, expected, len(PROMPT) - 1)
        os.kill(pion_server.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                from_memory(engine, PROMPT, expected, len(PROMPT) - 1)
        finally:
            os.kill(pion_server.pid, signal.SIGCONT)
        counters = engine.cache.pion_stats()
        assert (counters["hits_memory"], counters["restores"]) == (4, 1)
        assert counters["live_bytes"] == engine.cache.memory_usage_mb * (1 << 20) > 0


@pytest.mark.parametrize("family", RECURRENT)
def test_a_state_that_was_restored_serves_other_prompts_too(
    family: str, pion_server: RunningServer
) -> None:
    others = [[*PROMPT[:GUARD], *token_ids(9 + more, seed=610 + more)] for more in range(3)]
    expected = without_cache(family, others)
    installed(pion_server)
    stored(family, [PROMPT])
    with running_engine(FAMILIES[family]) as engine:
        first = engine.ask(others[0])
        assert first.tokens == expected[0]
        assert first.cached == GUARD and first.lookup.tier in LANES
        os.kill(pion_server.pid, signal.SIGSTOP)
        try:
            replies = engine.ask_all(others[1:])  # at once, behind the same state
        finally:
            os.kill(pion_server.pid, signal.SIGCONT)
        assert [reply.tokens for reply in replies] == expected[1:]
        assert [(reply.cached, reply.lookup.tier) for reply in replies] == [(GUARD, "memory")] * 2


@pytest.mark.parametrize("family", SOME)
def test_what_a_request_writes_into_its_caches_is_not_in_those_that_are_kept(
    family: str, pion_server: RunningServer
) -> None:
    """Caches as they are handed out, written to in place, as mlx-lm does where it batches none."""
    expected = without_cache(family, [PROMPT])[0]
    installed(pion_server)
    stored(family, [PROMPT])
    with running_engine(FAMILIES[family]) as engine:

        def generated() -> tuple[str, list[int]]:
            caches, rest = engine.cache.fetch(PROMPT)
            tier, tokens = engine.cache.last_lookup.tier, list[int]()
            while len(tokens) < REPLY_TOKENS:
                logits = engine.cache.model(mx.array([rest]), cache=caches)
                rest = [int(mx.argmax(logits[0, -1]))]
                tokens += rest
            return tier, tokens

        told = [engine.worker.submit(generated).result() for _ in range(3)]
        assert [tokens for _, tokens in told] == [expected] * 3
        assert told[0][0] in LANES and [tier for tier, _ in told[1:]] == ["memory"] * 2


@pytest.mark.parametrize("family", ["sliding window", "gated delta 3.5"])
def test_what_was_restored_is_held_within_the_budget_of_memory(
    family: str, pion_server: RunningServer
) -> None:
    prompts = [token_ids(300 + seed, seed=620 + seed) for seed in range(8)]
    large = token_ids(4000, seed=640)
    installed(pion_server)
    stored(family, [*prompts, large])
    with running_engine(FAMILIES[family], cache_memory_mb=1) as engine:
        for prompt in prompts:
            assert engine.ask(prompt, 1).lookup.tier in LANES
            assert 0 < engine.cache._current_memory <= 1 << 20
        evictions, rejected = engine.cache.get_stats()["evictions"], 0
        assert evictions > 0
        assert engine.cache.pion_stats()["live_evictions"] == evictions
        for _ in range(2):  # one that has no room at all is read each time
            reply = engine.ask(large, 1)
            assert (reply.cached, reply.lookup.tier in LANES) == (len(large) - 1, True)
            assert engine.cache._current_memory <= 1 << 20
            rejections = engine.cache.get_stats()["store_rejections"]
            assert rejections > rejected
            rejected = rejections


def test_what_was_restored_behind_a_system_prompt_is_given_up_last(
    pion_server: RunningServer,
) -> None:
    installed(pion_server)
    system = PROMPT[:120]
    with running_engine(FAMILIES["gated delta 3.5"]) as engine:

        def keep() -> bool:
            from mlx_lm.models.cache import make_prompt_cache

            caches = make_prompt_cache(engine.cache.model)
            engine.cache.model(mx.array([system]), cache=caches)
            kept: bool = engine.cache.keep(np.array(system, np.uint32), caches, "anchor")
            return kept

        assert engine.worker.submit(keep).result()
        assert engine.worker.submit(engine.cache.save_to_disk, "").result()
    with running_engine(FAMILIES["gated delta 3.5"], cache_memory_mb=1) as engine:
        first = engine.ask(PROMPT)
        assert (first.cached, first.lookup.tier in LANES) == (len(system), True)
        for seed in range(8):
            engine.ask(token_ids(300, seed=650 + seed))
        assert engine.cache.get_stats()["evictions"] > 0
        another = engine.ask([*system, *token_ids(60, seed=660)])
        assert (another.cached, another.lookup.tier) == (len(system), "memory")


def test_why_it_was_not_more_is_told_by_what_the_store_has_and_not_by_what_was_read(
    pion_server: RunningServer,
) -> None:
    installed(pion_server)
    stored("plain", [PROMPT])
    other = [*PROMPT[:150], (PROMPT[150] + 1) % 128, *token_ids(30, seed=670)]
    with running_engine(FAMILIES["plain"]) as engine:
        found = engine.ask(other).lookup
        assert (found.reused_tokens, found.tier in LANES) == (150, True)
        told = engine.cache.beside(lambda: found.missed().explained(engine.cache._store)).result()
        assert (told.position, told.common, told.restorable) == (150, 150, 150)
        assert (told.stored_token, told.asked_token) == (PROMPT[150], other[150])
