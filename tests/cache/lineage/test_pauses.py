"""How often a store is asked that does not answer."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise

import pytest

from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore
from pion_vllm_mlx.cache.store_client_endpoint import BackOff
from tests.cache.lineage.driving import Engine, fresh_cache, prompt
from tests.conftest import RunningServer
from tests.models import tiny_model

DEADLINE = 0.3


def opened(own: RunningServer, embedded: bool) -> LineageStore:
    url = f"embedded://{own.dir}" if embedded else f"tcp://127.0.0.1:{own.port}"
    store = LineageStore(tiny_model("llama"), LineageOptions(url=url))
    assert store.connect()
    store._front.deadline_seconds = DEADLINE
    return store


def silent(store: LineageStore, ids: list[int]) -> bool:
    """Whether a request finds that the store does not answer; at most after its deadline."""
    return store.match(ids).why.startswith("no store: ")


@pytest.mark.parametrize("embedded", [True, False])
def test_the_longer_a_store_is_silent_the_less_often_requests_wait_for_it(
    embedded: bool, own: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackOff, "FIRST_SECONDS", 0.05)
    store, ids = opened(own, embedded), prompt(100, 1)
    door = store._front.endpoint.door
    assert not silent(store, ids)
    os.kill(own.pid, signal.SIGSTOP)
    pauses = []
    for _ in range(5):
        assert silent(store, ids)
        pauses.append(door._back_off._pause)
        while door.paused():
            assert silent(store, ids), "nobody was asked"
            time.sleep(0.01)
    assert pauses[0] == 0.05
    # one that ends between two looks was asked about in the loop
    assert all(later >= 2 * former for former, later in pairwise(pauses))
    os.kill(own.pid, signal.SIGCONT)
    while silent(store, ids):
        time.sleep(0.05)
    assert not door._back_off._pause
    store.close()


def test_a_store_that_has_written_something_is_asked_again_at_once(
    own: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackOff, "FIRST_SECONDS", 600.0)
    monkeypatch.setattr(BackOff, "LONGEST_SECONDS", 600.0)
    store, ids = opened(own, True), prompt(100, 2)
    os.kill(own.pid, signal.SIGSTOP)
    assert silent(store, ids) and silent(store, ids)
    os.kill(own.pid, signal.SIGCONT)
    assert silent(store, ids), "nobody was asked"
    cache = fresh_cache(tiny_model("llama"))
    Engine(tiny_model("llama"), store).forward(ids, cache)
    assert store.keep(ids, cache) and store.flush(30)
    assert store.match([*ids, 1]).length == 100
    store.close()


def test_pauses_grow_where_a_store_writes_but_is_too_slow_for_those_who_look_up(
    own: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackOff, "FIRST_SECONDS", 100.0)
    monkeypatch.setattr(BackOff, "LONGEST_SECONDS", 1600.0)
    store = opened(own, True)
    door = store._front.endpoint.door
    pauses = []
    for seed in range(4):  # one write a request, each by somebody who waits as long as it takes
        ids = prompt(100, 10 + seed)
        cache = fresh_cache(tiny_model("llama"))
        Engine(tiny_model("llama"), store).forward(ids, cache)
        os.kill(own.pid, signal.SIGSTOP)
        assert silent(store, ids)
        os.kill(own.pid, signal.SIGCONT)
        pauses.append(door._back_off._pause)
        assert door.paused()
        assert store.keep(ids, cache) and store.flush(30)
        assert not door.paused(), "it is asked again at once"
    assert pauses == [100.0, 200.0, 400.0, 800.0]
    assert store.match([*ids, 1]).length == 100
    assert not door._back_off._pause
    store.close()
