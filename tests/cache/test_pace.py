"""Threads beside the one that generates work when a step was scheduled, and hold nobody up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402

from pion_vllm_mlx.cache import evaluation, pace  # noqa: E402
from pion_vllm_mlx.cache.beside import Beside  # noqa: E402
from pion_vllm_mlx.cache.lineage import bringing  # noqa: E402
from pion_vllm_mlx.cache.lineage.background import Background, Task  # noqa: E402
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


@pytest.mark.parametrize("many", [3, 7])
def test_rows_come_over_in_pieces_of_their_own_time(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bringing, "PIECE_BYTES", 2 * 32 * 10)
    monkeypatch.setattr(evaluation, "on_cuda", lambda: True)
    raw = mx.zeros((1, 2, 10 * many, 32), mx.uint8)
    counted = Counted()
    found: list[int] = []

    def bring() -> None:
        keep_pace(counted)
        found.append(bringing.rows_of(raw, slice(0, 2), 0, 10 * many).nbytes)

    mx.eval(raw)
    thread = threading.Thread(target=bring)
    thread.start()
    thread.join()
    assert (found, counted.waits) == ([raw.nbytes], many)


def test_the_threads_of_the_store_keep_the_pace_of_the_one_that_generates() -> None:
    counted = Counted()
    beside = Beside(counted)
    beside.ask(between_pieces).result(10)
    beside.drop([object(), object()])
    beside.ask(lambda: None).result(10)
    assert counted.waits == 3
    beside.close()
    background = Background(1 << 20, lambda: None)
    background.pace = counted
    assert background.put(Task(between_pieces, lambda error: None))
    assert background.flush(10)
    background.close(10)
    assert counted.waits == 4
