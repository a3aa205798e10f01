"""The token ids of a prompt, in whatever form an engine has them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from pion_vllm_mlx.cache.common_prefix import copied_ids
from pion_vllm_mlx.cache.completion import TokenIds

Tokens = Sequence[int] | Any

_NOT_TEXT = "token ids beyond 32 bits, as images have, are not stored"
NO_TOKENS: TokenIds = np.zeros(0, "<u4")


def token_ids(tokens: Tokens) -> tuple[TokenIds | None, str]:
    """Token ids as uint32, or why they are none."""
    try:
        if isinstance(tokens, list | tuple):
            return np.frombuffer(array("I", tokens), "<u4"), ""
        found = np.asarray(tokens)
        if found.ndim == 1 and found.dtype == "<u4":
            return copied_ids(found), ""
        if found.ndim != 1 or found.dtype.kind not in "iu":
            return None, "the prompt is no flat list of token ids"
        if found.size and not 0 <= int(found.min()) <= int(found.max()) <= 0xFFFFFFFF:
            return None, _NOT_TEXT
        return found.astype("<u4"), ""
    except OverflowError:
        return None, _NOT_TEXT
    except TypeError:
        return None, "the prompt is no flat list of token ids"
