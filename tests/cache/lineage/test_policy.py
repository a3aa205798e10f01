"""Where checkpoints are taken, and which of them stay."""

from __future__ import annotations

import pytest

from pion_vllm_mlx.cache.lineage import anchor_length
from pion_vllm_mlx.cache.lineage.policy import cuts, restore_point, thinned
from pion_vllm_mlx.cache.lineage.types import Checkpoint, Cut, KeepKind


def points(*pairs: tuple[int, KeepKind]) -> list[Checkpoint]:
    return [Checkpoint(length, kind, f"s@{length}") for length, kind in pairs]


def test_a_guard_is_taken_16_tokens_before_the_end_when_256_are_new() -> None:
    assert cuts(256, 0, 0, None) == [Cut(240, "guard")]
    assert cuts(255, 0, 0, None) == []
    assert cuts(1256, 1000, 1000, None) == [Cut(1240, "guard")]
    assert cuts(1255, 1000, 1000, None) == []


def test_a_divergence_is_taken_where_it_gains_256_tokens() -> None:
    assert Cut(300, "divergence") in cuts(1000, 44, 300, None)
    assert Cut(300, "divergence") not in cuts(1000, 45, 300, None)


def test_an_anchor_is_taken_wherever_it_falls_unless_it_is_restored() -> None:
    assert cuts(100, 0, 0, 20) == [Cut(20, "anchor")]
    assert cuts(100, 20, 20, 20) == []
    assert cuts(100, 30, 30, 20) == []


def test_cuts_lie_inside_in_order_and_once() -> None:
    assert cuts(1000, 0, 984, 984) == [Cut(984, "anchor")]
    assert cuts(1000, 0, 400, 500) == [
        Cut(400, "divergence"), Cut(500, "anchor"), Cut(984, "guard"),
    ]  # fmt: skip
    assert cuts(300, 0, 300, 300) == [Cut(284, "guard")]


def test_old_guards_go_before_turn_boundaries_and_those_before_divergences() -> None:
    held = points((10, "guard"), (20, "final"), (30, "divergence"), (40, "guard"), (50, "final"))
    stay, gone = thinned(held)
    assert [one.length for one in gone] == [10]
    stay, gone = thinned([*stay, *points((60, "final"))])
    assert [one.length for one in gone] == [20]
    stay, gone = thinned([*stay, *points((70, "final"))])
    assert [one.length for one in gone] == [50], "the newest guard and the divergence stay"
    assert [one.length for one in stay] == [30, 40, 60, 70]


def test_turn_boundaries_that_others_go_on_from_go_after_those_that_none_does() -> None:
    held = points(*[(n, "final") for n in range(10, 70, 10)])
    stay, gone = thinned(held, forks=held[:1])
    assert [one.length for one in stay] == [10, 40, 50, 60]
    assert [one.length for one in gone] == [20, 30]
    stay, gone = thinned(held, forks=held)
    assert [one.length for one in stay] == [30, 40, 50, 60]
    stay, gone = thinned([*held[4:], *points((5, "divergence"))], held[:1], held[4:5], most=3)
    assert [one.length for one in stay] == [5, 60, 10], "of those left behind the latest stays"
    held = points((10, "guard"), (20, "final"), (30, "final"))
    assert thinned(held, forks=held[1:2], most=2)[1] == held[:1], "that prompt was gone on with"
    assert thinned(held, most=2)[1] == held[1:2]


def test_anchors_are_never_thinned_and_do_not_count() -> None:
    held = points(*[(n, "anchor") for n in range(1, 9)], *[(n, "final") for n in range(20, 26)])
    stay, gone = thinned(held)
    assert [one.kind for one in stay].count("anchor") == 8
    assert [one.length for one in stay if one.kind == "final"] == [22, 23, 24, 25]
    assert [one.length for one in gone] == [20, 21]


@pytest.mark.parametrize("kind", ["guard", "final", "divergence"])
def test_four_of_any_one_kind_stay_and_the_latest_is_among_them(kind: KeepKind) -> None:
    stay, gone = thinned(points(*[(n, kind) for n in range(1, 20)]))
    assert stay[-1].length == 19
    assert len(stay) <= 4 and len(stay) + len(gone) == 19


def test_the_longest_point_at_or_before_the_limit_wins() -> None:
    held = points((10, "guard"), (20, "final"), (30, "anchor"))
    assert restore_point(held, 29) == held[1]
    assert restore_point(held, 30) == held[2]
    assert restore_point(held, 9) is None


def test_exact_behaviour_uses_the_final_state_of_the_whole_entry_alone() -> None:
    held = points((10, "guard"), (20, "final"))
    assert restore_point(held, 30, exact_only=20) == held[1]
    assert restore_point(held, 30, exact_only=10) is None
    assert restore_point(held, 30, exact_only=25) is None


def test_an_anchor_ends_two_tokens_before_the_rendered_system_prompt_does() -> None:
    assert anchor_length([1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 6, 7]) == 3
    assert anchor_length([1, 2], [1, 2, 3]) == 0
    assert anchor_length([], [1]) == 0
