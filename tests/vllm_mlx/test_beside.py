"""The store is asked, and read, while the thread that generates decodes for others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
    uninstall_vllm_mlx_backend,
)
from pion_vllm_mlx.cache.vllm_mlx_backend_lookup import LookedUp, Lookup  # noqa: E402
from tests.conftest import RunningServer  # noqa: E402
from tests.models import token_ids  # noqa: E402
from tests.vllm_mlx.engines import Engine, Reply, greedy, running_engine  # noqa: E402
from tests.vllm_mlx.families import FAMILIES  # noqa: E402

pytestmark = pytest.mark.usefixtures("uninstalled")

SOME = ["plain", "sliding window", "gated delta"]


def installed(server: RunningServer, **options: Any) -> None:
    url = f"tcp://127.0.0.1:{server.port}"
    install_vllm_mlx_backend(settings=BackendSettings(LineageOptions(url=url, **options)))


def stored(family: str, prompts: list[list[int]]) -> list[Reply]:
    """Has an engine store prompts; its replies."""
    with running_engine(FAMILIES[family]) as engine:
        replies = [engine.ask(prompt) for prompt in prompts]
        assert engine.cache.save_to_disk("")
    return replies


def opened(engine: Engine) -> Any:
    """The store, opened where an engine opens it."""
    return engine.worker.submit(engine.cache.store_or_none).result()


def watched(engine: Engine) -> list[tuple[str, str]]:
    """Which calls of the store ran on which thread, from now on."""
    store, seen = opened(engine), []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any) -> Any:
            seen.append((name, threading.current_thread().name))
            return call(*args)

        return calling

    for name in ("match", "restore"):
        setattr(store, name, noted(name, getattr(store, name)))
    return seen


@pytest.mark.parametrize("family", SOME)
def test_the_thread_that_generates_neither_asks_the_store_nor_reads(
    family: str, pion_server: RunningServer
) -> None:
    installed(pion_server)
    prompts = [token_ids(90 + 20 * index, seed=200 + index) for index in range(4)]
    expected = stored(family, prompts)
    with running_engine(FAMILIES[family]) as engine:
        seen = watched(engine)
        replies = engine.ask_all(prompts)
        assert [reply.tokens for reply in replies] == [reply.tokens for reply in expected]
        assert [reply.cached for reply in replies] == [len(prompt) - 1 for prompt in prompts]
        assert {thread for _, thread in seen} == {"pion-beside"}
        assert [name for name, _ in seen].count("restore") == len(prompts)
        assert not engine.cache._looked_up
        assert engine.cache.pion_stats()["generation_thread"]["fetch"]["calls"] == len(prompts)


@pytest.mark.parametrize("family", SOME)
def test_an_engine_that_starts_has_the_latest_conversations_in_memory(
    family: str, pion_server: RunningServer
) -> None:
    prompts = [token_ids(90 + 20 * index, seed=300 + index) for index in range(3)]
    installed(pion_server, preload_bytes=10**9)
    replies = stored(family, prompts)
    turns = [[*prompt, *reply.tokens, 7] for prompt, reply in zip(prompts, replies, strict=True)]
    uninstall_vllm_mlx_backend()
    with running_engine(FAMILIES[family]) as engine:  # without us, and nothing to reuse
        expected = [engine.ask(turn).tokens for turn in turns]
    installed(pion_server, preload_bytes=10**9)
    with running_engine(FAMILIES[family]) as engine:
        # as vllm-mlx's server does when it starts, on the thread that owns MLX
        engine.worker.submit(engine.cache.load_from_disk, "").result()
        until(lambda: engine.cache.pion_stats().get("read_ahead", 0) >= len(prompts))
        for prompt, turn, tokens in zip(prompts, turns, expected, strict=True):
            reply = engine.ask(turn)
            assert reply.tokens == tokens
            assert reply.cached >= len(prompt) - 1 and reply.lookup.tier == "memory"


def until(condition: Callable[[], bool]) -> None:
    """Waits until something holds; half a minute at the most."""
    ends_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def test_equal_prompts_at_once_get_caches_of_their_own(pion_server: RunningServer) -> None:
    installed(pion_server)
    prompt = token_ids(150, seed=210)
    (first,) = stored("plain", [prompt])
    with running_engine(FAMILIES["plain"]) as engine:
        opened(engine)
        replies = engine.ask_all([prompt] * 5)
        assert [reply.tokens for reply in replies] == [first.tokens] * 5
        assert [reply.cached for reply in replies] == [149] * 5
        assert not engine.cache._looked_up


def test_who_leaves_while_the_store_is_asked_leaves_nothing_behind(
    pion_server: RunningServer,
) -> None:
    installed(pion_server)
    prompt = token_ids(150, seed=211)
    (first,) = stored("plain", [prompt])
    with running_engine(FAMILIES["plain"]) as engine:
        opened(engine)
        go_on, asked = threading.Event(), threading.Event()
        engine.cache.beside(lambda: (asked.set(), go_on.wait(30)))

        async def leave() -> None:
            asking = asyncio.ensure_future(engine.core.add_request(list(prompt), greedy(2)))
            while not asked.is_set():
                await asyncio.sleep(0.001)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

        engine.loop.run_until_complete(leave())
        go_on.set()
        engine.cache.beside(lambda: None).result(30)
        assert not engine.cache._looked_up
        assert engine.ask(prompt).tokens == first.tokens


def test_a_store_that_does_not_answer_in_time_is_not_waited_for(
    pion_server: RunningServer,
) -> None:
    installed(pion_server, deadline_seconds=0.01)
    prompt = token_ids(150, seed=212)
    with running_engine(FAMILIES["plain"], enable_prefix_cache=False) as plain:
        expected = plain.ask(prompt).tokens
    with running_engine(FAMILIES["plain"]) as engine:
        opened(engine)
        go_on = threading.Event()
        held = engine.cache.beside(go_on.wait)
        assert engine.ask(prompt).tokens == expected
        go_on.set()
        held.result(30)
        engine.cache.beside(lambda: None).result(30)
        assert not engine.cache._looked_up


def test_what_was_looked_up_is_given_once_and_to_its_own_tokens() -> None:
    from pion_vllm_mlx.cache.completion import token_ids as as_array

    looked_up = LookedUp()
    one, two = (Lookup(as_array([1, 2, 3])) for _ in range(2))
    other = Lookup(as_array([1, 2]))
    for lookup in (one, two, other):
        looked_up.add(lookup)
    looked_up.forget(two)
    assert looked_up.take(as_array([1, 2, 4])) is None
    assert looked_up.take(as_array([1, 2, 3])) is one
    assert looked_up.take(as_array([1, 2, 3])) is None
    looked_up.forget(other)
    looked_up.forget(one)
    assert not looked_up
