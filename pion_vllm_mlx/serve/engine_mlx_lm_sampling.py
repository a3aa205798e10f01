"""The sampling settings of a request, fitted to mlx-lm's samplers before they run.

Samplers run on the generation thread, in one step with those of every other request: what one of
them raises ends them all.  So what it would raise for is refused, or told in a way that means the
same, while the request is alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "xtc_probability",
    "xtc_threshold",
)
_CONTEXTS = ("repetition_context_size", "presence_context_size", "frequency_context_size")
_LONGEST_CONTEXT = (1 << 31) - 1
_HIGHEST_XTC_THRESHOLD = 0.5
_LARGEST = 3.4e38  # of a float32


def fit_sampling(asked: dict[str, Any], vocabulary: Callable[[], int]) -> dict[str, Any]:
    """What is to replace the settings ``asked``, which mlx-lm's handler has checked the types of.

    ``vocabulary`` counts the token ids there are, which may take a while. Raises ValueError,
    which names the field.
    """
    fitted: dict[str, Any] = {}
    for name in _NUMBERS:
        if name in asked:
            fitted[name] = _number(name, asked[name])
    for name in _CONTEXTS:
        if name in asked:
            fitted[name] = min(asked[name], _LONGEST_CONTEXT)
    if asked.get("top_k") and asked["top_k"] >= vocabulary():
        fitted["top_k"] = 0  # all of them, which mlx-lm says with 0
    if fitted.get("xtc_probability") and fitted["xtc_threshold"] > _HIGHEST_XTC_THRESHOLD:
        raise ValueError(f"xtc_threshold must be at most {_HIGHEST_XTC_THRESHOLD}")
    biases = asked.get("logit_bias") or {}
    size = vocabulary() if biases else 0
    for token, bias in biases.items():
        if not 0 <= token < size:
            raise ValueError(f"logit_bias: there is no token {token}")
        _number("logit_bias", bias)
    return fitted


def vocabulary_of(model: Any, tokenizer: Any) -> int:
    """How many token ids both the model and its tokenizer have."""
    settings = vars(model.args)
    text = settings.get("text_config")
    known = [settings.get("vocab_size"), text.get("vocab_size") if isinstance(text, dict) else None]
    sizes = [size for size in known if isinstance(size, int)]
    return min([len(tokenizer.get_vocab()), *sizes])


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST:
        raise ValueError(f"{name} must be a number that a float32 can hold")
    return number
