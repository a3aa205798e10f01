"""The end of a prompt that the next one will not have: the guard is taken before it."""

from __future__ import annotations

import numpy as np
import pytest

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.endings import (
    LEAST_SHARED_TOKENS,
    MOST_ENDING_TOKENS,
    MOST_PROMPTS,
    Ending,
    Endings,
)
from pion_vllm_mlx.cache.lineage.policy import GUARD_TOKENS, cuts
from pion_vllm_mlx.cache.lineage.types import Cut

HISTORY = np.arange(2_000, dtype=np.uint32)


def prompt(history: int, ending: int, clock: int) -> TokenIds:
    """A history, and an ending that begins with the clock's time."""
    tail = np.full(ending, 9_000 + clock, np.uint32)
    return np.concatenate([HISTORY[:history], tail])


def test_what_the_last_turn_gave_up_is_expected_of_the_next() -> None:
    endings = Endings()
    assert endings.expected(prompt(500, 40, clock=1)) == Ending()
    assert endings.expected(prompt(900, 40, clock=2)) == Ending(40)
    assert endings.expected(prompt(1_300, 43, clock=3)) == Ending(40, sure=True)
    assert endings.expected(prompt(1_700, 40, clock=4)) == Ending(43, sure=True)


def test_a_prompt_that_only_grows_has_no_ending() -> None:
    endings = Endings()
    sizes = (500, 900, 900, 1_300)
    assert [endings.expected(HISTORY[:size]) for size in sizes] == [Ending()] * 4


def test_an_edit_far_up_and_another_conversation_say_nothing() -> None:
    endings = Endings()
    endings.expected(prompt(400, MOST_ENDING_TOKENS + 1, clock=1))
    assert endings.expected(prompt(400, 600, clock=2)) == Ending()
    assert endings.expected(prompt(LEAST_SHARED_TOKENS - 1, 30, clock=3)) == Ending()
    assert endings.expected(prompt(LEAST_SHARED_TOKENS - 1, 30, clock=4)) == Ending()


def test_an_edit_far_up_leaves_the_conversation_s_ending_as_it_was() -> None:
    endings = Endings()
    for clock, size in enumerate((500, 700, 1_900)):
        endings.expected(prompt(size, 40, clock))
    edited = np.concatenate([HISTORY[:600], HISTORY[700:1_900] + 10_000, HISTORY[:40] + 20_000])
    assert endings.expected(edited) == Ending(40)
    longer = np.concatenate([edited[:-40], HISTORY[:300] + 30_000])
    assert endings.expected(longer) == Ending(40, sure=True)


def test_new_chats_under_one_system_prompt_make_nothing_sure() -> None:
    endings = Endings()
    for clock, size in enumerate((300, 50, 900)):
        assert not endings.expected(prompt(600, size, clock)).sure


def test_conversations_that_take_turns_have_endings_of_their_own() -> None:
    endings, other = Endings(), HISTORY[::-1]
    for clock, size in enumerate((500, 900, 1_300)):
        assert endings.expected(prompt(size, 50, clock)).tokens == (50 if clock else 0)
        assert endings.expected(other[:size].copy()) == Ending()
    for number in range(MOST_PROMPTS):
        endings.expected(np.full(300, number, np.uint32))
    assert endings.expected(prompt(1_700, 50, clock=9)) == Ending(), "it was forgotten meanwhile"


def test_another_process_learns_it_from_what_is_stored() -> None:
    endings = Endings()
    first = endings.expected(prompt(900, 40, clock=2), common_stored=500, stored=540)
    assert first == Ending(40)
    second = endings.expected(prompt(1_300, 45, clock=3), common_stored=900, stored=960)
    assert second == Ending(40, sure=True), "this process has served that prompt itself"
    assert endings.expected(prompt(1_700, 40, clock=4), 1_300, 0) == Ending(45, sure=True)


@pytest.mark.parametrize("ending", [1, GUARD_TOKENS])
def test_an_ending_shorter_than_the_guard_s_distance_moves_nothing(ending: int) -> None:
    assert cuts(1_000, 0, 0, None, Ending(ending, True)) == cuts(1_000, 0, 0, None)


def test_a_guard_lies_before_the_ending_where_that_gains_enough() -> None:
    early, usual = Cut(1_000 - 40 - GUARD_TOKENS, "guard"), Cut(1_000 - GUARD_TOKENS, "guard")
    assert cuts(1_000, 0, 0, None, Ending(40)) == [early, usual]
    assert cuts(1_000, 0, 0, None, Ending(40, sure=True)) == [early]
    assert cuts(1_000, 700, 700, None, Ending(40, sure=True)) == [usual]
