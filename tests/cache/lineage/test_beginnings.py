"""Prompts of other agents begin alike: there is a restore point where they part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pion_vllm_mlx.cache.lineage.beginnings import Beginnings

mlx_lm = pytest.importorskip("mlx_lm")

from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore, Match  # noqa: E402
from pion_vllm_mlx.cache.lineage.types import Cut  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402

PROMPT = np.array(token_ids(1_000), np.uint32)


@pytest.fixture(params=["gemma3_text", "qwen3_5"])
def store(request: pytest.FixtureRequest) -> Iterator[LineageStore]:
    """A store of a model that is cut; its server is never asked."""
    found = LineageStore(tiny_model(request.param), LineageOptions(url="tcp://127.0.0.1:1"))
    yield found
    found.close(0.0)


def test_a_prompt_is_cut_where_others_with_the_same_tools_part(store: LineageStore) -> None:
    store.expect_beginning(token_ids(300))
    cuts = store.cuts(PROMPT, Match(PROMPT), 500)
    assert cuts == [Cut(300, "anchor"), Cut(500, "anchor"), Cut(984, "guard")]
    other = np.where(np.arange(1_000) < 255, PROMPT, 1).astype(np.uint32)
    assert store.cuts(other, Match(other), 500) == [Cut(500, "anchor"), Cut(984, "guard")]


def test_what_is_restored_or_too_short_is_not_cut(store: LineageStore) -> None:
    store.expect_beginning(token_ids(255))
    assert store.cuts(PROMPT, Match(PROMPT), None) == [Cut(984, "guard")]
    store.expect_beginning(token_ids(300))
    assert store.cuts(PROMPT, Match(PROMPT, 300, 300), None) == [Cut(984, "guard")]


def test_the_longest_of_the_latest_counts_and_is_shorter_than_the_prompt() -> None:
    known = Beginnings(most=2)
    for size in (10, 20, 30):
        known.expect(PROMPT[:size])
    assert [known.longest(PROMPT[:size]) for size in (10, 20, 25, 31)] == [0, 0, 20, 30]
    known.expect(PROMPT[:20])  # the latest now
    known.expect(PROMPT[:40])
    assert known.longest(PROMPT[:35]) == 20
