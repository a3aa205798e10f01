"""The thread beside the one that generates works when a step was scheduled, and hold nobody up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402

from pion_vllm_mlx.cache import pace  # noqa: E402
from pion_vllm_mlx.cache.beside import Beside  # noqa: E402
from pion_vllm_mlx.cache.pace import Pace, between_pieces, in_company, keep_pace  # noqa: E402
from pion_vllm_mlx.cache.spread import Spread  # noqa: E402


class Counted(Pace):
    """Counts how often somebody would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any step was scheduled a while ago, and somebody generates for ever."""
    monkeypatch.setattr(pace, "WORKED_SECONDS", -1.0)
    monkeypatch.setattr(pace, "IDLE_SECONDS", float("inf"))
    monkeypatch.setattr(pace, "MOST_SECONDS", 60.0)
    yield


def test_who_works_beside_goes_on_with_the_next_step(long_ago: None) -> None:
    keeping, done = Pace(), threading.Event()
    keeping._at = 0.0

    def work() -> None:
        keep_pace(keeping)
        between_pieces()
        done.set()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(keeping._waiting) < 2:
        assert not done.is_set()
    assert not done.wait(0.2)
    keeping.step()
    for thread in threads:
        thread.join(60)
    assert done.is_set() and not keeping._waiting


def test_nobody_waits_where_nobody_generates_or_no_pace_is_kept() -> None:
    keeping = Pace()
    assert not keeping.generating
    keeping.wait()
    between_pieces()
    assert not in_company() and not keeping._waiting


def test_who_gave_up_waiting_is_not_in_the_way_of_a_step(
    long_ago: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "MOST_SECONDS", 0.0)
    keeping = Pace()
    keeping._at = 0.0
    keeping.wait()
    keeping.step()
    keeping.step()
    assert not keeping._waiting


def test_every_sampled_token_says_that_a_step_is_scheduled() -> None:
    spread = Spread()
    assert not spread.pace.generating
    spread.carried(mx.array([1]))
    assert spread.pace.generating


def test_nobody_waits_for_a_step_when_the_last_reply_has_ended(long_ago: None) -> None:
    spread, waited = Spread(), threading.Event()
    spread.pace._at = 0.0

    def work() -> None:
        spread.pace.wait()
        waited.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not spread.pace._waiting:
        pass
    spread.finish()
    thread.join(60)
    assert waited.is_set()


def test_the_thread_that_reads_keeps_the_pace_of_the_one_that_generates() -> None:
    counted = Counted()
    beside = Beside(counted)
    beside.ask(between_pieces).result(10)
    assert counted.waits == 1
    beside.close()
