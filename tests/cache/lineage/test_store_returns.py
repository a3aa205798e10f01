"""What was kept while the store was gone is written when it is back, without another request."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.cache.lineage import LineageStore, background
from pion_vllm_mlx.cache.lineage.background import Background, Task
from pion_vllm_mlx.cache.store_client_endpoint import BackOff
from pion_vllm_mlx.errors import PionError, StoreUnavailable
from tests.cache.lineage.driving import KINDS, Engine, open_store, prompt
from tests.conftest import RunningServer
from tests.models import tiny_model

HANGS = 60.0


def until(holds: Callable[[], bool]) -> None:
    given_up = time.monotonic() + HANGS
    while not holds():
        assert time.monotonic() < given_up
        time.sleep(0.02)


def quick(store: LineageStore, monkeypatch: pytest.MonkeyPatch) -> LineageStore:
    """Finds soon that the store does not answer."""
    monkeypatch.setattr(BackOff, "FIRST_SECONDS", 0.05)
    assert store.connect()
    for client in (store._front, store._back):
        client.deadline_seconds = 0.3
    return store


def found(own: RunningServer, name: str, ids: list[int]) -> int:
    """How much of a prompt another process would find."""
    store = open_store(tiny_model(name), own)
    length = store.match(ids).length
    store.close()
    return length


@pytest.mark.parametrize("kind", ["plain", "gated delta", "window"])
@pytest.mark.parametrize("gone", ["frozen", "killed"])
def test_what_was_kept_while_the_store_was_gone_is_written_when_it_is_back(
    gone: str, kind: str, own: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kv_bits = KINDS[kind]
    model, ids = tiny_model(name), prompt(150, 1)
    store = quick(open_store(model, own), monkeypatch)
    engine = Engine(model, store, kv_bits)
    engine.turn(prompt(100, 2))
    assert store.flush(HANGS)
    before = store.stats().get("written", 0)
    if gone == "frozen":
        os.kill(own.pid, signal.SIGSTOP)
    else:
        own.kill()
    turn = engine.turn(ids)
    assert all(turn.kept)
    until(lambda: store._back.endpoint.door.paused())  # it was tried, and failed
    assert store.stats()["waiting"] and store.stats().get("written", 0) == before
    if gone == "frozen":
        os.kill(own.pid, signal.SIGCONT)
    else:
        own.start()
    until(lambda: not store.stats()["waiting"])
    stats = store.stats()
    assert stats["written"] == stats["kept"] and not stats.get("failed")
    assert found(own, name, ids) == len(ids) - 1
    store.close()


def test_who_waits_for_the_end_does_not_wait_for_a_store_that_is_gone(
    own: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), prompt(150, 1)
    store = quick(open_store(model, own), monkeypatch)
    own.kill()
    engine = Engine(model, store)
    engine.turn(ids)
    until(lambda: store._back.endpoint.door.paused())
    assert store.flush(HANGS / 4)  # less than the patience that a store is shown
    stats = store.stats()
    assert stats["failed"] == stats["kept"] and not stats["waiting_bytes"]
    own.start()
    until(lambda: not store._back.endpoint.door.paused())
    engine.turn(ids)
    assert store.flush(HANGS) and found(own, "llama", ids) == len(ids) - 1
    store.close()


def test_patience_ends_and_begins_anew_with_what_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.2)
    line = Background(1 << 20, lambda: None)
    told: list[str] = []
    there = False
    tries = {"first": 0, "second": 0, "last": 0}

    def task(name: str) -> Task:
        def run() -> None:
            tries[name] += 1
            if not there:
                raise StoreUnavailable("gone")

        return Task(run, lambda error: told.append(f"{name} failed"), 1, patient=True)

    assert line.put(task("first")) and line.put(task("second"))
    until(lambda: not line.waiting)
    assert told == ["first failed", "second failed"]
    assert tries["first"] > 1 and tries["second"] == 1, "patience is shown once"
    there = True
    assert line.put(task("last")) and line.flush(HANGS) and tries["last"] == 1
    there = False
    assert line.put(task("last"))
    until(lambda: not line.waiting)
    assert tries["last"] > 2 and told[2:] == ["last failed"] and line.waiting_bytes == 0
    line.close(1)


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("error", [StoreUnavailable, PionError])
def test_what_a_task_had_is_freed_when_it_has_failed(
    error: type[Exception], patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nobody knows when garbage is collected next, and it may be gigabytes."""
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.0)
    line = Background(1 << 20, lambda: None)
    held = np.zeros(3)
    known = weakref.ref(held)

    def task(held: Any) -> Task:
        def run() -> None:
            raise error(str(held.size))

        return Task(run, lambda failure: None, 1, patient=patient)

    gc.disable()
    try:
        assert line.put(task(held)) and line.flush(HANGS)
        del held
        assert line.put(Task(lambda: None, lambda failure: None)) and line.flush(HANGS)
        assert known() is None
    finally:
        gc.enable()
        line.close(1)


def test_closing_gives_up_what_waits_for_a_store_and_its_thread_ends() -> None:
    line = Background(1 << 20, lambda: None)

    def run() -> None:
        raise StoreUnavailable("gone")

    told: list[str] = []
    assert line.put(Task(run, lambda error: told.append("failed"), 1, patient=True))
    thread = line._thread
    line.close(HANGS)
    assert told == ["failed"] and thread is not None and not thread.is_alive()
