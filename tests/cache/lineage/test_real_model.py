"""The small real model goes on from what is stored as it goes on from what it has read itself.

Not part of the ordinary run: ``pytest --long``, with the demo's extra installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pion_vllm_mlx
from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import Engine, same_reply

LENGTHS = (63, 64, 65, 511, 512, 513, 2_047, 2_049)
REPLY, CHUNK, MORE = 16, 512, 8
TEXT = Path(pion_vllm_mlx.__file__).parent / "demo" / "harbour.txt"


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> tuple[Any, list[int]]:
    """The model of the demo, and the tokens of its text."""
    if not request.config.getoption("--long"):
        pytest.skip("takes minutes: --long runs it")
    pytest.importorskip("gguf", reason="comes with the demo extra")
    from mlx_lm import load

    from pion_vllm_mlx.demo.model import ensure_model

    model, tokenizer = load(str(ensure_model()))[:2]
    return model, list(tokenizer.encode(TEXT.read_text()))


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_repeat_and_the_next_turn_reuse_all_and_say_the_same(
    real: tuple[Any, list[int]], opened: Opener, length: int
) -> None:
    model, text = real
    at = 1 + LENGTHS.index(length)  # no prompt begins as another one does
    ids, more = [text[0], *text[at : at + length - 1]], text[:MORE]
    engine, plain = Engine(model, opened(model)), Engine(model, None)
    engine.chunk = plain.chunk = CHUNK
    first = engine.turn(ids, REPLY)
    assert engine.store is not None and engine.store.flush(60), first.kept
    cold = plain.turn(ids, REPLY)
    assert (first.reused, first.computed) == (0, length)
    same_reply(first, cold)

    engine.store = opened(model)  # as after a restart
    again = engine.turn(ids, REPLY)
    assert (again.reused, again.computed) == (length - 1, 1)
    same_reply(again, cold)

    turn = [*ids, *again.reply[:-1], *more]
    assert engine.store.flush(60)
    following = engine.turn(turn, REPLY)
    assert (following.reused, following.computed) == (len(turn) - MORE, MORE)
    same_reply(following, plain.turn(turn, REPLY))
