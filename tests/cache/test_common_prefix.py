"""What two prompts have in common, found without letting another thread of Python in."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pion_vllm_mlx.cache.common_prefix import common_bytes, copied_ids
from pion_vllm_mlx.cache.lineage.blocks import common_tokens
from pion_vllm_mlx.cache.lineage.tokens import token_ids

SIZES = (0, 1, 3, 63, 64, 65, 255, 256, 257, 1000)


@pytest.mark.parametrize("size", SIZES)
def test_the_common_beginning_is_found_at_every_length(size: int) -> None:
    one = random.Random(size).randbytes(size)
    for at in range(size):
        other = one[:at] + bytes([one[at] ^ 1]) + one[at + 1 :]
        assert common_bytes(one, other) == at
        assert common_bytes(one[:at], one) == common_bytes(one, one[:at]) == at
    assert common_bytes(one, one) == size


@pytest.mark.parametrize("bit", [0, 8, 24])
def test_tokens_are_compared_whole(bit: int) -> None:
    ids = np.random.default_rng(bit).integers(0, 1 << 31, 300).astype(np.uint32)
    for at in range(300):
        other = ids.copy()
        other[at] ^= np.uint32(1 << bit)
        assert common_tokens(ids, other) == at
        assert common_tokens(ids[:at], ids) == common_tokens(ids, ids[:at]) == at


def test_ids_that_were_taken_do_not_change_with_their_owners() -> None:
    ids = np.arange(5, dtype=np.uint32)
    found, why = token_ids(ids[::2])
    both = copied_ids(ids, ids[3:])
    ids[:] = 9
    assert found is not None and (found.tolist(), why) == ([0, 2, 4], "")
    assert both.tolist() == [0, 1, 2, 3, 4, 3, 4]
