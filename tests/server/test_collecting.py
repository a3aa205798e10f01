"""What a server holds is not looked at by every full collection, and no garbage stays for good."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pion_vllm_mlx.server.collecting import ASIDE_SECONDS, LONG_SECONDS, SetsAside


class _Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


class _Clock:
    """``step``: what passes between two looks at it, as a collection's start and stop."""

    now, step = 0.0, 2 * LONG_SECONDS

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock() -> Iterator[_Clock]:
    """That of a callback which is at work."""
    gc.collect()
    clock = _Clock()
    callback = SetsAside(clock)
    gc.callbacks.append(callback)
    yield clock
    gc.callbacks.remove(callback)
    gc.unfreeze()


def test_what_lived_through_a_long_full_collection_is_looked_at_no_more(clock: _Clock) -> None:
    kept: list[list[int]] = [[] for _ in range(1000)]
    gc.collect()
    there = {id(one) for one in gc.get_objects()}
    assert not there.intersection(map(id, kept))


def test_nothing_is_set_aside_where_a_full_collection_is_short(clock: _Clock) -> None:
    clock.step = LONG_SECONDS / 2
    before = gc.get_freeze_count()
    gc.collect()
    assert gc.get_freeze_count() == before


def test_garbage_that_came_since_is_found(clock: _Clock) -> None:
    gc.collect()
    gone = weakref.ref(_Knot())
    gc.collect()
    assert gone() is None


def test_garbage_among_what_was_set_aside_is_found_after_its_time(clock: _Clock) -> None:
    knot = _Knot()
    gone = weakref.ref(knot)
    gc.collect()
    del knot
    gc.collect()
    assert gone() is not None
    clock.now += ASIDE_SECONDS
    gc.collect()
    assert gone() is None
