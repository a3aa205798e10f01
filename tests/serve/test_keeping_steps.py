"""What is kept is taken in small steps, during which no other thread of Python gets in between."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import KVCache, make_prompt_cache  # noqa: E402

from pion_vllm_mlx.cache.beside import Blocking  # noqa: E402
from pion_vllm_mlx.cache.layers import cache_arrays  # noqa: E402
from pion_vllm_mlx.cache.lineage import LineageOptions, kept  # noqa: E402
from pion_vllm_mlx.cache.lineage.lending import ARRAYS_A_STEP, lend_copies  # noqa: E402
from pion_vllm_mlx.cache.spread import Spread  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache, guarded  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, Seen  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402

LENGTH, TRIES = 3000, 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


@contextmanager
def waiting_for_the_interpreter() -> Iterator[Callable[[], int]]:
    """Another thread that wants the interpreter and takes it as soon as it is let go.

    Gives how often it got it. Nobody is made to let it go meanwhile.
    """
    begin, end, ran = threading.Event(), threading.Event(), [0]

    def run() -> None:
        begin.wait()
        while not end.is_set():
            ran[0] += 1
            end.wait(0.0001)  # lets it go at once

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1000.0)
    try:
        begin.set()
        yield lambda: ran[0]
    finally:
        sys.setswitchinterval(interval)
        end.set()
        thread.join()


def filled(length: int) -> list[Any]:
    """Caches of ``length`` tokens that nothing was computed for."""
    caches: list[Any] = make_prompt_cache(tiny_model("llama"))
    for cache in caches:
        rows = mx.zeros((1, 2, length, 16), mx.float32)
        cache.update_and_fetch(rows, rows)
    mx.eval(cache_arrays(caches))
    return caches


@pytest.mark.parametrize("copied", [False, True], ids=["as they are", "as copies"])
def test_no_other_thread_of_python_gets_in_between_while_a_long_prompt_is_kept(
    copied: bool, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "can_be_lent", lambda: not copied)
    key = {"test": f"in between {copied}"}
    options = LineageOptions(url=f"tcp://127.0.0.1:{server.port}", key_parts=key)
    cache = LineageCache(options, CacheLimits(64))
    cache.attach(tiny_model("llama"), None)
    shared = token_ids(LENGTH, 1)
    prompts = [[*shared[:-seed], *token_ids(seed + 50, seed)] for seed in range(1, TRIES)]
    caches = [filled(len(prompt)) for prompt in prompts]
    plans = [Plan([*prompt, 1]) for prompt in prompts]
    cache.beside(lambda: None)  # connected by now
    for prompt in prompts[:16]:
        plan = Plan(prompt)
        cache.look_up(plan, lambda: None)
        cache.plan(plan, LENGTH // 2)
    for prompt, plan, held in zip(prompts, plans, caches, strict=True):
        cache.spread = Spread()
        seen = Seen(prompt, plan)
        with waiting_for_the_interpreter() as ran:
            before = ran()
            cache.insert_cache("m", seen, held, cache_type="final")
            while cache.spread._has_next(begun=False):
                job = cache.spread._next_job()
                job()
            got = ran() - before
        assert got == 0
        assert cache.spread.waiting_bytes
    cache.close(0.0)


def test_a_step_of_taking_copies_makes_so_many_arrays_at_most() -> None:
    caches = [KVCache() for _ in range(40)]
    for cache in caches:
        rows = mx.zeros((1, 1, 8, 4))
        cache.update_and_fetch(rows, rows)
    made = [0]
    steps = lend_copies(caches, 3)
    arrays = cache_arrays(caches)
    with pytest.raises(StopIteration) as end:
        while True:
            next(steps)
            made.append(made[-1] + ARRAYS_A_STEP)
    assert len(made) - 1 == -(-len(arrays) // ARRAYS_A_STEP)
    assert len(end.value.value.places) == len(arrays)


def test_what_is_kept_goes_on_where_it_was_with_the_next_step_and_ends_with_an_error() -> None:
    spread, blocking, done = Spread(), Blocking(), list[str]()

    def keeping(name: str, fails: bool) -> Iterator[None]:
        done.append(f"{name} found")
        yield
        done.append(f"{name} taken")
        if fails:
            raise ValueError(name)
        yield
        done.append(f"{name} queued")

    spread.store(keeping("one", False), blocking, guarded)
    spread.store(keeping("two", True), blocking, guarded)
    spread.work(begun=False)
    assert done == ["one found"]
    spread.work(begun=True)
    assert done == ["one found"]
    for _ in range(6):
        spread.work(begun=False)
    assert done == ["one found", "one taken", "one queued", "two found", "two taken"]
    told = blocking.as_dict()
    assert (told["store"]["calls"], told["take"]["calls"]) == (2, 3)
