"""What is kept of prompts and replies is done with the steps of the batch, a little with each."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.spread import MOST_ARRAYS, Spread  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
    uninstall_vllm_mlx_backend,
)
from pion_vllm_mlx.cache.vllm_mlx_backend_cache import PionPrefixCache  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend_prefill import PrefillWatch  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend_steps import Steps  # noqa: E402
from tests.conftest import RunningServer  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402
from tests.vllm_mlx.engines import greedy, running_engine, word_tokenizer  # noqa: E402
from tests.vllm_mlx.families import FAMILIES  # noqa: E402

pytestmark = pytest.mark.usefixtures("uninstalled")

SOME = ["plain", "sliding window", "gated delta"]
REPLY = 40


def installed(server: RunningServer, **options: Any) -> None:
    url = f"tcp://127.0.0.1:{server.port}"
    install_vllm_mlx_backend(settings=BackendSettings(LineageOptions(url=url, **options)))


def prompts_of(seed: int) -> list[list[int]]:
    return [token_ids(90 + 25 * index, seed=seed + index) for index in range(4)]


def wrapped(owner: Any, name: str, inside: list[str], patch: pytest.MonkeyPatch) -> None:
    """Has ``inside`` hold the name while the method runs."""
    call: Callable[..., Any] = vars(owner)[name]

    def called(*args: Any, **options: Any) -> Any:
        inside.append(name)
        try:
            return call(*args, **options)
        finally:
            inside.pop()

    patch.setattr(owner, name, called)


@pytest.mark.parametrize("family", SOME)
def test_while_others_decode_keeping_evaluates_nothing_on_the_thread_that_generates(
    family: str, pion_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(500)
    with running_engine(FAMILIES[family]) as engine:
        expected = [engine.ask(prompt, REPLY).tokens for prompt in prompts]
    installed(pion_server)
    inside: list[str] = []
    evaluated: list[str] = []
    for owner, name in (
        (PionPrefixCache, "keep"),
        (PrefillWatch, "_after_prompt"),
        (PrefillWatch, "_after_token"),
        (Spread, "work"),
        (Spread, "stepped"),
    ):
        wrapped(owner, name, inside, monkeypatch)

    def noticing(name: str) -> Any:
        call = getattr(mx, name)

        def noticed(*args: Any) -> Any:
            size = sum(array.nbytes for _, array in tree_flatten(args))
            # the counters of a batch, which are computed, are looked at where one is taken out
            if inside and size > 64 and threading.current_thread().name.startswith("model"):
                evaluated.append(f"{name} of {size} bytes in {inside}")
            return call(*args)

        return noticed

    with running_engine(FAMILIES[family]) as engine:
        for name in ("eval", "async_eval", "synchronize"):
            monkeypatch.setattr(mx, name, noticing(name))
        replies = engine.ask_all(prompts, REPLY)
        assert evaluated == []
        assert [reply.tokens for reply in replies] == expected
        assert engine.cache.spread.waiting_bytes == 0
        assert engine.cache.save_to_disk("")
        stats = engine.cache.pion_stats()
        assert stats["written"] >= len(prompts)
        assert {"extract", "keep", "store", "take"} <= set(stats["generation_thread"])
    with running_engine(FAMILIES[family]) as engine:
        replies = engine.ask_all(prompts, REPLY)
        assert [reply.cached for reply in replies] == [len(prompt) - 1 for prompt in prompts]
        assert [reply.tokens for reply in replies] == expected


@pytest.mark.parametrize("family", SOME)
def test_a_step_carries_a_few_arrays_and_all_is_done_when_nobody_is_served(
    family: str, pion_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(520)
    installed(pion_server)
    pieces: list[tuple[int, int]] = []
    piece = Spread._piece

    def noted(self: Spread) -> list[mx.array]:
        found = piece(self)
        pieces.append((len(found), sum(array.nbytes for array in found)))
        return found

    monkeypatch.setattr(Spread, "_piece", noted)
    with running_engine(FAMILIES[family]) as engine:
        engine.cache.spread.least_bytes = 1000
        replies = engine.ask_all([*prompts, prompts[0][:60]], REPLY)
        assert len(pieces) > 4
        assert all(0 < count <= MOST_ARRAYS for count, _ in pieces)
        assert engine.cache.spread.idle
        assert engine.cache.save_to_disk("")
        again = engine.ask_all(prompts, REPLY)
        assert [reply.tokens for reply in again] == [reply.tokens for reply in replies[:4]]
        assert [reply.cached for reply in again] == [len(prompt) - 1 for prompt in prompts]


def test_whoever_leaves_leaves_nothing_that_waits(pion_server: RunningServer) -> None:
    installed(pion_server)
    with running_engine(FAMILIES["plain"]) as engine:
        prompt = token_ids(300, seed=540)
        engine.ask_and_leave(prompt, after_tokens=299)
        ends_at = time.monotonic() + 20
        while not engine.cache.spread.idle and time.monotonic() < ends_at:
            engine.loop.run_until_complete(asyncio.sleep(0.01))  # the step that is under way
        assert engine.cache.spread.idle
        assert engine.cache.save_to_disk("")
        assert engine.ask(prompt).cached == 299


@pytest.mark.parametrize("how", ["saved", "closed"])
def test_what_waits_for_steps_is_stored_by_a_save_and_at_the_end(
    how: str, pion_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the thread that generates; another one is told that it is not all stored."""
    installed(pion_server)
    prompt = token_ids(200, seed=550)

    def nothing(self: Spread, begun: bool) -> None:
        self._asked = True  # as of a step where a request begins

    with running_engine(FAMILIES["plain"]) as engine:
        monkeypatch.setattr(Spread, "work", nothing)
        cache, ask = engine.cache, engine.loop.run_until_complete

        async def begin() -> str:
            request: str = await engine.core.add_request(prompt, greedy(100_000))
            while not cache.spread._storing:
                await asyncio.sleep(0.001)
            return request

        request = ask(begin())
        assert not cache.save_to_disk("")
        assert not cache.pion_stats().get("written")
        if how == "saved":
            assert engine.worker.submit(cache.save_to_disk, "").result()
            assert cache.pion_stats()["written"] > 0
        else:
            engine.worker.submit(cache.close).result()
        assert not cache.spread._storing and engine.core.scheduler.running
        monkeypatch.undo()
        ask(engine.core.abort_request(request))
    with running_engine(FAMILIES["plain"]) as engine:
        assert engine.ask(prompt).cached == len(prompt) - 1


def test_what_waits_for_steps_counts_as_waiting_until_it_is_written(
    pion_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(pion_server)
    counted: list[tuple[int, int]] = []
    with running_engine(FAMILIES["plain"]) as engine:
        cache, stepped = engine.cache, Spread.stepped

        def noted(self: Spread) -> None:
            """Between two steps, on the thread that generates."""
            if cache._counters.kept_live:
                counted.append((cache.pion_stats()["waiting"], self.waiting_bytes))
            stepped(self)

        monkeypatch.setattr(Spread, "stepped", noted)
        cache.spread.least_bytes = 1000
        engine.ask(token_ids(400, seed=580), REPLY)
        assert counted and all(waiting for waiting, uncopied in counted if uncopied)
        assert engine.worker.submit(cache.save_to_disk, "").result()
        stats = cache.pion_stats()
        assert (stats["waiting"], stats["written"]) == (0, 2)  # the prompt, and the reply behind it


@pytest.mark.parametrize("sampled", ["by the batch's sampler", "each by its own", "elsewhere"])
def test_whoever_samples_what_waits_is_computed(sampled: str) -> None:
    from mlx_lm.generate import BatchGenerator

    model, prompts = tiny_model("llama"), [token_ids(20, 1), token_ids(30, 2)]
    greedy = lambda logits: mx.argmax(logits, axis=-1)  # noqa: E731
    plain = BatchGenerator(model)
    plain.insert(prompts, max_tokens=[6, 6])
    expected = told(plain.next)

    generator, spread = BatchGenerator(model), Spread()
    spread.least_bytes = 100
    steps = Steps(generator, spread)
    own = [greedy] * 2 if sampled == "each by its own" else None
    uids = generator.insert(prompts, max_tokens=[6, 6], samplers=own)
    for uid in uids:
        steps.samples_alone(uid)
    if sampled == "elsewhere":
        generator.sampler = greedy
        for batch in (generator._prompt_batch, generator._generation_batch):
            batch.fallback_sampler = greedy
    done: list[int] = []
    arrays = [mx.zeros((60,), mx.uint8) + value for value in (1, 2, 3)]
    spread.add(arrays, lambda: done.append(1))
    assert told(steps.next) == expected
    assert done == [1] and spread.waiting_bytes == 0
    assert [bytes(memoryview(array))[0] for array in arrays] == [1, 2, 3]


def told(step: Callable[[], Any]) -> dict[int, list[int]]:
    """The tokens of each sequence of a batch, to its end."""
    tokens: dict[int, list[int]] = {}
    while True:
        prompts, replies = step()
        for reply in replies:
            tokens.setdefault(reply.uid, []).append(reply.token)
        if not prompts and not replies:
            return tokens


def test_an_engine_that_has_started_has_its_store_open(pion_server: RunningServer) -> None:
    """No request finds it closed: its weights are read for the key, and it is reached, before."""
    installed(pion_server)
    prompt = token_ids(100, seed=560)
    with running_engine(FAMILIES["plain"]) as engine:
        assert engine.cache._store is not None and engine.cache._store.bypass is None
        opened = engine.cache._store
        first = engine.ask(prompt)
        assert engine.cache._store is opened
        assert engine.cache.save_to_disk("")
    with running_engine(FAMILIES["plain"]) as engine:
        assert engine.ask(prompt).tokens == first.tokens
        assert engine.cache.pion_stats()["tokens_reused"] == 99
    uninstall_vllm_mlx_backend()
    installed(pion_server)
    with running_engine(FAMILIES["plain"], max_kv_size=64) as engine:
        assert engine.cache._store is None  # such caches live in the process only


def test_what_a_prompt_is_compared_with_is_tokenized_beside(pion_server: RunningServer) -> None:
    """The thread that generates finds the anchor of a chat without reading any text."""
    installed(pion_server)
    words = [f"w{token}" for token in token_ids(120, seed=570)]
    prompt, system = " ".join(words), " ".join([*words[:80], "w7 w8"])
    tokenizer, threads = word_tokenizer(), []
    encode = tokenizer.encode

    def noted(text: str) -> Any:
        threads.append((text == system, threading.current_thread().name))
        return encode(text)

    tokenizer.encode = noted
    with running_engine(FAMILIES["plain"], tokenizer) as engine:
        engine.cache.ahead.__self__.remember(prompt, system)
        request = engine.loop.run_until_complete(engine.core.add_request(prompt))
        found = engine.core.scheduler.requests[request].pion_anchor
        engine.loop.run_until_complete(engine.core.abort_request(request))
        assert found == 78
    assert [thread for of_system, thread in threads if of_system] == ["pion-beside"]


def test_an_engine_starts_without_a_store_that_cannot_be_reached() -> None:
    install_vllm_mlx_backend(settings=BackendSettings(LineageOptions(url="tcp://127.0.0.1:1")))
    prompt = token_ids(100, seed=561)
    with running_engine(FAMILIES["plain"]) as engine:
        first = engine.ask(prompt)
        assert engine.ask(prompt).cached == 99
        assert len(first.tokens) == 6
