"""``/v1/pion/explain``: why a prompt is not a longer hit, with the text around the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pion_vllm_mlx.cache.lineage import Explanation

_SURROUNDINGS = 12
#: how many tokens of ``Explanation.stored_tokens`` lie before the one that differs, at most.
_STORED_BEFORE = 16

Decode = Callable[[Sequence[int]], str]


def explained(found: Explanation, decode: Decode, tokens: Sequence[int]) -> dict[str, Any]:
    """Why ``tokens`` are not a longer hit, with the first differing token decoded.

    Of the stored prompt only the surroundings are told.
    """
    told = asdict(found)
    stored = told.pop("stored_tokens")
    told["prompt_tokens"] = len(tokens)
    if found.position is not None:
        told["asked_text"] = _around(decode, tokens, found.position)
        told["stored_text"] = _around(decode, stored, min(found.position, _STORED_BEFORE))
    return told


def _around(decode: Decode, tokens: Sequence[int], position: int) -> dict[str, str]:
    """The token at ``position``, and the text before and behind it."""
    pieces = {
        "before": tokens[max(0, position - _SURROUNDINGS) : position],
        "token": tokens[position : position + 1],
        "after": tokens[position + 1 : position + 1 + _SURROUNDINGS],
    }
    return {name: str(decode(list(piece))) for name, piece in pieces.items()}
