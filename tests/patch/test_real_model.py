"""The small real model, patched, says word for word what it says unpatched.

Not part of the ordinary run: ``pytest --long``, where the demo's converted model is in the
user's model folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import pion_vllm_mlx
from pion_vllm_mlx import config
from pion_vllm_mlx.demo import model as demo
from tests.patch.conftest import LANES, Opener

PROMPTS, REPLY, LENGTH, SUFFIX = 10, 64, 600, 12  # the windows have 512 tokens
TEXT = Path(pion_vllm_mlx.__file__).parent / "demo" / "harbour.txt"
NEAR = 1e-3

pytestmark = [pytest.mark.usefixtures("patched"), pytest.mark.timeout(3_600)]


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> tuple[Any, list[int]]:
    """The model of the demo, and the tokens of its text."""
    if not request.config.getoption("--long"):
        pytest.skip("takes minutes: --long runs it")
    pytest.importorskip("gguf", reason="comes with the demo extra")
    folder = config.model_dir() / f"{demo.GEMMA_3_270M.name}-float32"
    if demo.damage(folder, demo.GEMMA_3_270M) is not None:
        pytest.skip("the demo's model is not in the user's model folder")
    from mlx_lm import load

    loaded, tokenizer = load(str(folder))[:2]
    return loaded, list(tokenizer.encode(TEXT.read_text()))


def greedy(model: Any, prompt: list[int], cache: list[Any]) -> tuple[list[int], list[float]]:
    """Tokens, and the gap between the best two logits at each of them."""
    tokens: list[int] = []
    gaps: list[float] = []
    logits = model(mx.array([prompt]), cache=cache)[0, -1]
    for _ in range(REPLY):
        best = mx.sort(mx.topk(logits, 2))
        gaps.append(float(best[1] - best[0]))
        tokens.append(int(mx.argmax(logits)))
        logits = model(mx.array([tokens[-1:]]), cache=cache)[0, -1]
    return tokens, gaps


@pytest.mark.parametrize("number", range(PROMPTS))
def test_greedy_tokens_are_those_of_the_unpatched_model(
    real: tuple[Any, list[int]], opened: Opener, number: int
) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model, text = real
    at = 1 + 37 * number
    ids = [text[0], *text[at : at + LENGTH - 1]]
    suffix = text[at + LENGTH : at + LENGTH + SUFFIX]
    plain = make_prompt_cache(model)
    model(mx.array([ids]), cache=plain)
    wanted, gaps = greedy(model, suffix, plain)
    for lane in LANES:
        pc = opened(model, lane, deadline_seconds=60)
        pc.get_or_prefill(ids, f"prompt {number}")
        cache = pion_vllm_mlx.make_pion_prompt_cache(model, f"prompt {number}", pc, len(ids))
        found, _ = greedy(model, suffix, cache)
        layers = len(cache)
        assert {entry.lane for entry in cache} == {lane}
        # windows see the prefix for a while, full layers always
        assert layers + REPLY <= pc.stats()["attended"][lane] <= 2 * layers * (REPLY + 1)
        if found != wanted:
            first = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            assert gaps[first] < NEAR, f"{lane}: token {first} differs, gap {gaps[first]}"
            print(f"{lane}: token {first} differs, gap {gaps[first]:.2g}")
