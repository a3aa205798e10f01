"""The sampling settings of a request, checked before any engine sees them; pure.

Engines take the settings of all their requests into one step: what one of them fails on there
may end the others, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from pion_vllm_mlx.serve.api_errors import bad_request
from pion_vllm_mlx.serve.checks import Json, mapping, numbers

#: of a float32
LARGEST = 3.4e38
#: what is divided by less than that is not a float32 any more; 0 takes the likeliest token
COLDEST = 1e-30
#: the least and the largest value of each
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, LARGEST),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, LARGEST),
    "presence_penalty": (-LARGEST, LARGEST),
    "frequency_penalty": (-LARGEST, LARGEST),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
}


def check_sampling(body: Json) -> None:
    """Raises ``ApiError`` 400 that names the field which is out of its range."""
    for name, value in numbers(body, *RANGES).items():
        least, largest = RANGES[name]
        if not least <= value <= largest:
            raise bad_request(f"{name} must be {_range(least, largest)}")
        if name == "temperature" and 0 < value < COLDEST:
            raise bad_request(f"temperature must be 0, or at least {COLDEST:g}")
    for token, bias in mapping(body, "logit_bias").items():
        if not token.isascii() or not token.isdigit():
            raise bad_request(f"logit_bias: {token!r} is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise bad_request(f"logit_bias: the bias of token {token} must be a number")
        if not abs(bias) <= LARGEST:
            raise bad_request(f"logit_bias: the bias of token {token} is too large")


def _range(least: float, largest: float) -> str:
    if largest < LARGEST:
        return f"from {least:g} to {largest:g}"
    return "a number that a float32 can hold" + ("" if least < 0 else ", not below 0")
