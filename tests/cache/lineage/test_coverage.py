"""Ranges of rows, and where windows can be restored: against a set of positions."""

from __future__ import annotations

import random

import pytest

from pion_vllm_mlx.cache.lineage.coverage import (
    Window,
    as_text,
    clipped,
    from_text,
    latest_point,
    merged,
    needed,
    without,
)
from pion_vllm_mlx.errors import DamagedData


def positions(ranges: object) -> set[int]:
    return {n for a, b in ranges for n in range(a, b)}  # type: ignore[attr-defined]


def random_ranges(rng: random.Random, top: int = 60) -> list[tuple[int, int]]:
    return [tuple(sorted((rng.randrange(top), rng.randrange(top)))) for _ in range(4)]  # type: ignore[misc]


def test_ranges_behave_like_sets_of_positions() -> None:
    rng = random.Random(1)
    for _ in range(500):
        left, right = random_ranges(rng), random_ranges(rng)
        assert positions(merged(left)) == positions(left)
        assert positions(without(left, merged(right))) == positions(left) - positions(right)
        a, b = sorted((rng.randrange(60), rng.randrange(60)))
        assert positions(clipped(merged(left), a, b)) == positions(left) & set(range(a, b))
        bounds = [edge for pair in merged(left) for edge in pair]
        assert bounds == sorted(set(bounds)), "sorted, disjoint, not touching"


@pytest.mark.parametrize("keep", [0, 1, 4])
def test_the_latest_point_is_the_largest_at_which_every_row_is_there(keep: int) -> None:
    rng = random.Random(2)
    for _ in range(2000):
        window = Window(rng.choice([5, 8, 16]), keep)
        ranges = merged(random_ranges(rng))
        there = positions(ranges)
        limit = rng.randrange(60)
        fits = [n for n in range(limit + 1) if positions(needed(window, n)) <= there]
        assert latest_point(limit, {window: ranges}) == max(fits), (window, ranges, limit)


def test_several_windows_have_to_agree() -> None:
    small, large = Window(4, 0), Window(10, 0)
    ranges = {small: ((0, 30),), large: ((0, 12), (14, 26))}
    assert latest_point(30, ranges) == 26
    assert latest_point(23, ranges) == 12
    assert latest_point(30, {small: ((0, 30),), large: ()}) == 0


def test_windows_survive_their_text_form() -> None:
    windows = {Window(16, 0): ((0, 5), (9, 100)), Window(4096, 4): ()}
    assert from_text(as_text(windows)) == windows
    assert from_text("") == {}
    with pytest.raises(DamagedData):
        from_text("16.0=1-x")
