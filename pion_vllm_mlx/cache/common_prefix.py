"""How much two runs of bytes have in common from their start, without letting Python's lock go.

numpy lets it go for more than 500 items, and whoever generates then waits for it, each time.
"""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.cache.completion import TokenIds

#: compared first: most prompts that differ do so early.
_FIRST_BYTES = 256


def common_bytes(left: bytes, right: bytes) -> int:
    """The length of the longest common beginning."""
    size = min(len(left), len(right))
    known, end = 0, min(_FIRST_BYTES, size)
    if left[:end] == right[:end]:
        known, end = end, size
        if left[known:end] == right[known:end]:
            return size
    while end - known > 1:  # equal as far as ``known``, different before ``end``
        middle = (known + end) // 2
        if left[known:middle] == right[known:middle]:
            known = middle
        else:
            end = middle
    return known


def copied_ids(*parts: TokenIds) -> TokenIds:
    """Token ids of their own, one part behind the other."""
    return np.frombuffer(b"".join(part.tobytes() for part in parts), "<u4")
