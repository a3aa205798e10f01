"""From every kind of restore point that one process of an engine takes the next one goes on.

A recurrent state is there only where it was taken. Each prompt here can be had from one kind of
them alone, out of the store: memory is empty, and nothing is read before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pion_vllm_mlx.cache.leading_system import ANOTHER_USER, OTHER_USER
from pion_vllm_mlx.cache.lineage.policy import (
    GUARD_TOKENS,
    LEAST_NEW_TOKENS,
    anchor_length,
    common_prefix,
)
from tests.serve.engines import Reply
from tests.serve.served import SEEDED, STATES, Served, serving

pytest.importorskip("mlx_lm")

TEXT = "The quick brown fox jumps over the lazy dog, and naps. " * 11
PARTING = 300
WAYS: dict[str, dict[str, Any]] = {"batched": {}, "single": SEEDED}


@pytest.fixture(scope="module", params=STATES)
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    """One engine a family, over a server of its own; nothing is read before it is asked for."""
    folder = tmp_path_factory.mktemp("engine")
    with serving(folder, request.param, "--pion-preload-gb", "0") as running:
        yield running


def parted(text: str, by: str) -> str:
    """The text with another character where it is to part from the others."""
    return f"{text[:PARTING]}{by}{text[PARTING + 1 :]}"


def asked_under(system: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def from_the_store(reply: Reply) -> int:
    """How many tokens the store gave."""
    assert not reply.cached or reply.receipt["tier"] in ("mapped", "stored"), reply.receipt
    return reply.cached


@pytest.mark.parametrize("way", WAYS)
def test_a_new_process_goes_on_from_each_kind_of_restore_point_that_was_stored(
    served: Served, way: str
) -> None:
    how, engine = WAYS[way], served.engine
    whole, cut, branched = (f"{way} {what}. {TEXT}" for what in ("All", "Not all", "Two ways"))
    system = f"{way}: you are terse. " * 7
    for text in (whole, cut, branched, parted(branched, "#")):
        assert served.complete(text, **how).cached == 0
    first = served.chat(asked_under(system, "What is a prefix?"), **how)
    assert first.cached == 0 and first.prompt < LEAST_NEW_TOKENS, "there is no guard in it"
    engine.until_stored()
    engine.restart()
    assert from_the_store(served.complete(whole, **how)) == len(whole) - 1, "final"
    other_end = cut[:-10] + "?" * 10
    assert from_the_store(served.complete(other_end, **how)) == len(cut) - GUARD_TOKENS, "guard"
    third = served.complete(parted(branched, "?"), **how)
    assert from_the_store(third) == PARTING, "divergence"
    second = asked_under(system, "Who has one?")
    others = [rendered(served, [second[0], user]) for user in (OTHER_USER, ANOTHER_USER)]
    in_common = others[0][: common_prefix(*others)]
    anchor = anchor_length(in_common, rendered(served, second))
    assert anchor > len(system)
    assert from_the_store(served.chat(second, **how)) == anchor, "anchor"


def rendered(served: Served, chat: list[dict[str, Any]]) -> list[int]:
    """The tokens of a chat, without the header of a reply to it."""
    return list(served.tokenizer.apply_chat_template(chat, tokenize=True))
