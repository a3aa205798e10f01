"""The sampling settings of a request, fitted to mlx-lm's samplers before they run.

Samplers run on the generation thread, in one step with those of every other request: what one of
them raises ends them all.  So what it would raise for is refused, or told in a way that means the
same, while the request is alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from pion_vllm_mlx.serve.sampling import LARGEST, RANGES

_CONTEXTS = ("repetition_context_size", "presence_context_size", "frequency_context_size")
_LONGEST_CONTEXT = _MOST_TOKENS = (1 << 31) - 1


def fit_sampling(asked: dict[str, Any], vocabulary: Callable[[], int]) -> dict[str, Any]:
    """What is to replace the settings ``asked``, which mlx-lm's handler has checked the types of.

    ``vocabulary`` counts the token ids there are, which may take a while. Raises ValueError,
    which names the field.
    """
    fitted: dict[str, Any] = {}
    for name in RANGES:
        if name in asked:
            fitted[name] = _number(name, asked[name])
    for name in _CONTEXTS:
        if name in asked:
            fitted[name] = min(asked[name], _LONGEST_CONTEXT)
    if asked.get("top_k") and asked["top_k"] >= vocabulary():
        fitted["top_k"] = 0  # all of them, which mlx-lm says with 0
    highest = RANGES["xtc_threshold"][1]
    if fitted.get("xtc_probability") and fitted["xtc_threshold"] > highest:
        raise ValueError(f"xtc_threshold must be at most {highest:g}")
    biases = asked.get("logit_bias") or {}
    refuse_foreign_tokens(biases, vocabulary() if biases else 0)
    for bias in biases.values():
        _number("logit_bias", bias)
    return fitted


def refuse_foreign_tokens(tokens: Iterable[int], size: int) -> None:
    """Raises ValueError for a token id that is not among the ``size`` that there are.

    MLX writes a bias wherever its index leads.
    """
    for token in tokens:
        if not 0 <= token < size:
            raise ValueError(f"logit_bias: there is no token {token}, the last one is {size - 1}")


def vocabulary_of(model: Any, tokenizer: Any = None) -> int:
    """How many token ids a model has, and its tokenizer, if that is given: the fewer.

    A model may have logits beyond its tokenizer's last id, which make them a round number.
    """
    settings = vars(model.args)
    text = settings.get("text_config")
    known = [settings.get("vocab_size"), text.get("vocab_size") if isinstance(text, dict) else None]
    sizes = [size for size in known if isinstance(size, int)]
    if tokenizer is not None:
        sizes.append(_ids_of(tokenizer))
    return min(sizes, default=_MOST_TOKENS)


@lru_cache(maxsize=1)  # of a large one it takes a tenth of a second
def _ids_of(tokenizer: Any) -> int:
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        raise ValueError(f"{name} must be a number that a float32 can hold")
    return number
