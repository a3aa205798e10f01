"""Every process makes the same ids of the text, as many as were asked for."""

from __future__ import annotations

import pytest

from pion_vllm_mlx.demo.text import QUESTIONS, prefix_ids, prefix_text


def _encode(text: str) -> list[int]:
    return [-1, *text.encode()]


@pytest.mark.parametrize("num_tokens", [1, 512, 20_000, 50_000])
def test_a_prefix_has_exactly_the_tokens_asked_for(num_tokens: int) -> None:
    ids = prefix_ids(_encode, num_tokens)
    assert len(ids) == num_tokens
    assert ids.count(-1) == 1


def test_a_longer_prefix_begins_with_the_shorter_one() -> None:
    assert prefix_ids(_encode, 40_000)[:600] == prefix_ids(_encode, 600)


def test_there_are_ten_different_questions_and_a_text_of_two_thousand_words() -> None:
    assert len(set(QUESTIONS)) == 10
    assert len(prefix_text().split()) > 2000
