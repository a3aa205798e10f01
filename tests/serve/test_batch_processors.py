"""In a batch of mlx-lm's the logits processors of a request are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402

from pion_vllm_mlx.serve.batch_processors import keep_processors  # noqa: E402
from tests.models import VOCABULARY, tiny_model, token_ids  # noqa: E402
from tests.serve.engines import running_engine  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

STEP, COUNT = 16, 4


@pytest.fixture(autouse=True)
def mended() -> Iterator[None]:
    replaced = keep_processors()
    yield
    replaced.undo()


def only(token: int) -> Callable[[Any, Any], Any]:
    """A processor after which no other token can come."""
    return lambda tokens, logits: mx.where(mx.arange(logits.shape[-1]) == token, logits, -mx.inf)


def run(generator: Any, replies: dict[int, list[int]], steps: int) -> None:
    for _ in range(steps):
        for response in generator.next()[1]:
            replies.setdefault(response.uid, []).append(response.token)


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_a_processor_is_its_own_request_s_whoever_comes_and_goes(before: int, steps: int) -> None:
    generator: Any = BatchGenerator(tiny_model("llama"), prefill_step_size=STEP)
    replies: dict[int, list[int]] = {}

    def insert(prompt: Sequence[int], *tokens: int) -> int:
        processors = [only(token) for token in tokens]
        (uid,) = generator.insert([list(prompt)], [COUNT], logits_processors=[processors])
        return int(uid)

    for number in range(before):  # have left when the others come
        insert(token_ids(8, number))
    run(generator, replies, 3 * COUNT)
    long = insert(token_ids(steps * STEP, 20))  # its prefill goes on, or ends, with the others'
    run(generator, replies, 1)
    wanted = {insert(token_ids(5, 30 + token), token): token for token in (3, 7)}
    free = insert(token_ids(5, 50))
    run(generator, replies, 40)
    for uid, token in wanted.items():
        assert replies[uid] == [token] * COUNT
    for uid in (long, free):
        assert len(replies[uid]) == COUNT
        assert not set(replies[uid]) <= set(wanted.values())
    assert max(wanted.values()) < VOCABULARY


def test_serve_s_engine_biases_the_request_that_asks_for_it(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model")
    with running_engine(tmp_path, model, "--no-pion") as engine:
        plain = engine.complete("hello").tokens
        for _ in range(2):
            biased = engine.complete("hello", logit_bias={"90": 100.0}).tokens
            assert set(biased) == {90}
            assert engine.complete("hello").tokens == plain
