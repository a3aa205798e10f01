"""Hits that this process serves by itself: the server gets to know of them, nobody waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.cache import inproc
from pion_vllm_mlx.cache.connection import Address, RespConnection, info_fields
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.cache.store_client_notes import HitNotes
from tests.conftest import RunningServer, free_port_block
from tests.models import tiny_model, token_ids

IDS = token_ids(70)


@pytest.fixture(autouse=True)
def nothing_in_process() -> Iterator[None]:
    inproc.PROCESS.forget()
    yield
    inproc.PROCESS.forget()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def receipt(port: int) -> dict[str, str]:
    with RespConnection(Address(port=port)) as connection:
        return info_fields(connection.command("INFO", "pion"))


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "never"
        time.sleep(0.02)


def hits(port: int) -> int:
    return int(receipt(port)["kvprefix_hits"])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pion-hit-notes"]


def test_the_receipt_counts_the_hits_of_a_process_with_their_tokens(
    pion_server: RunningServer, model: Any
) -> None:
    with PionPromptCache(model, port=pion_server.port) as pion:
        pion.get_or_prefill(IDS, "counted")
        for _ in range(30):
            pion.get_or_prefill(IDS, "counted")
        assert pion.stats()["lane_hits"] == {"in-process": 30}
    until(lambda: hits(pion_server.port) == 30)
    found = receipt(pion_server.port)
    assert found["kvprefix_tokens_served"] == str(30 * len(IDS))
    assert found["kvprefix_hits_measured"] == "30"


def test_an_object_that_never_asked_the_server_tells_it_too(
    pion_server: RunningServer, model: Any
) -> None:
    with PionPromptCache(model, port=pion_server.port) as pion:
        pion.get_or_prefill(IDS, "other-object")
    with PionPromptCache(model, port=pion_server.port) as pion:
        pion.get_or_prefill(IDS, "other-object")
        assert pion.stats()["last_lane"] == "in-process"
    until(lambda: hits(pion_server.port) == 1)


def test_a_prefix_in_use_by_one_process_is_not_evicted_as_cold(tmp_path: Path, model: Any) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    server = RunningServer(free_port_block(), tmp_path / "data", ("--max-sessions", "4"))
    server.start()
    try:
        with PionPromptCache(model, port=server.port) as pion:
            pion.get_or_prefill(IDS, "used")
            for number in range(4):
                pion.get_or_prefill(IDS, f"passing{number}")
                pion.get_or_prefill(IDS, "used")
                until(lambda expected=number + 1: hits(server.port) == expected)  # type: ignore[misc]
            assert pion.lookup("used") and pion.lookup("passing3")
            assert not pion.lookup("passing2")
    finally:
        server.stop()


def test_a_server_that_does_not_answer_delays_no_hit_of_the_process(
    pion_server: RunningServer, model: Any
) -> None:
    with PionPromptCache(model, port=pion_server.port, deadline_seconds=60.0) as pion:
        pion.get_or_prefill(IDS, "delays")
        os.kill(pion_server.pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                pion.get_or_prefill(IDS, "delays")
                time.sleep(0.1)  # the notes are on their way, and wait
            assert threads()
            assert (pion.hits, pion.stats()["unavailable"]) == (3, 0)
        finally:
            os.kill(pion_server.pid, signal.SIGCONT)
        until(lambda: hits(pion_server.port) == 3)


def test_a_dead_server_costs_nothing_and_is_told_when_it_is_back(
    pion_server: RunningServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PionPromptCache(model, port=pion_server.port) as pion:
        pion.get_or_prefill(IDS, "dead")
        pion_server.kill()
        for _ in range(3):
            pion.get_or_prefill(IDS, "dead")
        assert (pion.hits, pion.stats()["unavailable"]) == (3, 0)
        pion_server.start()

        def told() -> bool:
            pion.get_or_prefill(IDS, "dead")
            return hits(pion_server.port) > 0

        until(told)


def test_no_thread_is_left_behind_by_an_object_that_is_closed_or_dropped(
    pion_server: RunningServer, model: Any
) -> None:
    for close in (True, False):
        pion = PionPromptCache(model, port=pion_server.port)
        for _ in range(2):
            pion.get_or_prefill(IDS, "left")
        assert threads()
        if close:
            pion.close()
        del pion
        until(lambda: not threads())


def test_a_client_that_was_closed_tells_again_when_it_is_used_again(
    pion_server: RunningServer, model: Any
) -> None:
    with PionPromptCache(model, port=pion_server.port) as pion:
        pion.get_or_prefill(IDS, "again")
        for expected in (1, 2):
            pion.get_or_prefill(IDS, "again")
            pion.close()
            until(lambda wanted=expected: hits(pion_server.port) == wanted)  # type: ignore[misc]


def test_a_forked_child_tells_its_own_hits_and_not_its_parent_s(
    pion_server: RunningServer,
) -> None:
    address = Address(port=pion_server.port)
    with RespConnection(address) as connection:
        connection.command("KV.PREFIX.REGISTER", "forked", 4, "fp16")
    notes = HitNotes(RespConnection)
    notes.note(address, "forked", 1)
    child = os.fork()
    if child == 0:
        notes.note(address, "forked", 10)
        notes.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    notes.close()
    until(lambda: receipt(pion_server.port)["kvprefix_tokens_served"] == "11")


def test_a_thread_that_cannot_start_costs_the_note_and_not_the_hit(
    pion_server: RunningServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the interpreter ends, or the system gives no more threads."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with PionPromptCache(model, port=pion_server.port) as pion:
        pion.get_or_prefill(IDS, "no-thread")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            pion.get_or_prefill(IDS, "no-thread")
        pion.get_or_prefill(IDS, "no-thread")
        assert pion.stats()["lane_hits"] == {"in-process": 2}
    until(lambda: hits(pion_server.port) == 1)
