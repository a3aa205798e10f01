"""Greedy answers of a model, timed to the first token, and how two of them compare.

Kernels sum in another order when a prompt is cut elsewhere, so a prefill in one go and one in
two parts differ by about 1e-6. Against an unstored cache that was cut at the same place the
logits must therefore be bit-equal, and against a prefill in one go the tokens must be equal,
or the two best logits lie very close together where they first part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step


@dataclass(frozen=True)
class Answer:
    """The tokens, the log-probabilities ``[vocabulary]`` before each, and the first one's time."""

    tokens: list[int]
    logprobs: list[Any]
    first_token_ms: float


def answer(
    model: Any, ids: Sequence[int], num_tokens: int, cache: Any = None, started: float | None = None
) -> Answer:
    """Feed ``ids`` to the model behind ``cache`` and take ``num_tokens`` greedy tokens.

    ``started`` is the ``time.perf_counter()`` from which the first token is timed.
    Mutates ``cache``.
    """
    begin = time.perf_counter() if started is None else started
    first_token_ms = 0.0
    tokens: list[int] = []
    logprobs: list[Any] = []
    steps = generate_step(mx.array(list(ids)), model, max_tokens=num_tokens, prompt_cache=cache)
    for token, step_logprobs in steps:
        if not tokens:
            first_token_ms = (time.perf_counter() - begin) * 1000
        tokens.append(int(token))
        logprobs.append(step_logprobs)
    return Answer(tokens, logprobs, first_token_ms)


def same_bits(left: Answer, right: Answer) -> bool:
    """Whether tokens and log-probabilities are equal bit by bit."""
    pairs = zip(left.logprobs, right.logprobs, strict=True)
    return left.tokens == right.tokens and all(bool(mx.array_equal(a, b)) for a, b in pairs)


def first_difference(left: Answer, right: Answer) -> tuple[int, float] | None:
    """Where the tokens first part and how close ``right``'s two best were; None if nowhere."""
    for index, (a, b) in enumerate(zip(left.tokens, right.tokens, strict=True)):
        if a != b:
            best = np.partition(np.array(right.logprobs[index].astype(mx.float32)), -2)[-2:]
            return index, float(best[1] - best[0])
    return None
