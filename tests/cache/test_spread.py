"""What waits to be computed or done is counted until it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402

from pion_vllm_mlx.cache.beside import Blocking  # noqa: E402
from pion_vllm_mlx.cache.spread import Spread  # noqa: E402


def stepped(spread: Spread) -> None:
    """A step of the batch."""
    spread.work(begun=False)
    spread.carried(mx.array([1]))
    spread.stepped()


def test_arrays_that_no_step_has_carried_are_counted_until_what_follows_is_done() -> None:
    spread, counted = Spread(), list[int]()
    spread.least_bytes = 1
    arrays = [mx.zeros((40,)) + value for value in range(3)]
    spread.add(arrays, lambda: counted.append(spread.waiting))
    while not counted:
        assert spread.waiting == 1
        stepped(spread)
    assert counted == [1]
    assert spread.waiting == 0 and spread.idle


def test_what_is_being_stored_is_counted_between_its_steps_and_in_each() -> None:
    spread, counted = Spread(), list[int]()

    def keeping() -> Iterator[None]:
        for _ in range(3):
            counted.append(spread.waiting)
            yield

    spread.store(keeping(), Blocking(), lambda call, otherwise: call())
    while not spread.idle:
        assert spread.waiting == 1
        stepped(spread)
    assert counted == [1, 1, 1]


def test_a_job_that_fails_is_not_counted_for_ever() -> None:
    spread = Spread()

    def failing() -> None:
        raise ValueError

    spread.soon(failing, of=spread, ending=True)
    with pytest.raises(ValueError):
        spread.work(begun=False)
    assert spread.idle
