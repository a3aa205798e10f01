"""The end of a prompt that the next one will not have: the guard is taken before it."""

from __future__ import annotations

import numpy as np
import pytest

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.endings import (
    LEAST_SHARED_TOKENS,
    MOST_ENDING_TOKENS,
    MOST_PROMPTS,
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
    assert endings.ending(prompt(500, 40, clock=1)) == 0
    assert endings.ending(prompt(900, 40, clock=2)) == 40
    assert endings.ending(prompt(1_300, 43, clock=3)) == 40
    assert endings.ending(prompt(1_700, 40, clock=4)) == 43


def test_a_prompt_that_only_grows_has_no_ending() -> None:
    endings = Endings()
    sizes = (500, 900, 900, 1_300)
    assert [endings.ending(HISTORY[:size]) for size in sizes] == [0, 0, 0, 0]


def test_an_edit_far_up_and_another_conversation_say_nothing() -> None:
    endings = Endings()
    endings.ending(prompt(400, MOST_ENDING_TOKENS + 1, clock=1))
    assert endings.ending(prompt(400, 600, clock=2)) == 0
    assert endings.ending(prompt(LEAST_SHARED_TOKENS - 1, 30, clock=3)) == 0
    assert endings.ending(prompt(LEAST_SHARED_TOKENS - 1, 30, clock=4)) == 0


def test_conversations_that_take_turns_have_endings_of_their_own() -> None:
    endings, other = Endings(), HISTORY[::-1]
    for clock, size in enumerate((500, 900, 1_300)):
        own = endings.ending(prompt(size, 50, clock))
        assert own == (50 if clock else 0)
        assert endings.ending(other[:size].copy()) == 0
    for number in range(MOST_PROMPTS):
        endings.ending(np.full(300, number, np.uint32))
    assert endings.ending(prompt(1_700, 50, clock=9)) == 0, "it was forgotten meanwhile"


def test_another_process_learns_it_from_what_is_stored() -> None:
    endings = Endings()
    assert endings.ending(prompt(900, 40, clock=2), common_stored=500, stored=540) == 40
    assert endings.ending(prompt(1_300, 45, clock=3), common_stored=900, stored=960) == 40
    assert endings.ending(prompt(1_700, 40, clock=4), common_stored=1_300, stored=0) == 45


@pytest.mark.parametrize("ending", [1, GUARD_TOKENS])
def test_an_ending_shorter_than_the_guard_s_distance_moves_nothing(ending: int) -> None:
    assert cuts(1_000, 0, 0, None, ending) == cuts(1_000, 0, 0, None)


def test_the_guard_lies_before_the_ending_where_there_is_room() -> None:
    assert cuts(1_000, 0, 0, None, 40) == [Cut(1_000 - 40 - GUARD_TOKENS, "guard")]
    assert cuts(1_000, 700, 700, None, 300) == [Cut(1_000 - GUARD_TOKENS, "guard")]
