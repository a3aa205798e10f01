"""What a prefix remembers of its blocks: computed once, never more than it may take."""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.api import Selection
from pion_vllm_mlx.kernels.prefix import BlockStatistics
from tests.kernels import cases


def test_statistics_are_computed_once_and_only_a_few_are_kept(rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (2, 600, 32), "fp32")
    q = cases.values(rng, (2, 32), "fp32")
    api.select_blocks(q, prefix, Selection(16, 3))
    (kept,) = prefix.statistics.values()
    api.select_blocks(q, prefix, Selection(16, 5))
    assert list(prefix.statistics.values()) == [kept]
    for block_tokens in range(20, 40):
        api.select_blocks(q, prefix, Selection(block_tokens, 3))
    assert len(prefix.statistics) <= 4


def test_statistics_take_no_more_room_than_the_rows(rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (2, 600, 32), "fp16")
    q = cases.values(rng, (2, 32), "fp32")
    api.select_blocks(q, prefix, Selection(1, 3, "quest"))  # twice the room of fp16 rows
    assert prefix.statistics_bytes == 0
    for block_tokens in range(2, 10):
        for window in (0, 599):
            api.select_blocks(q, prefix, Selection(block_tokens, 3, "quest"), window=window)
            assert 0 < prefix.statistics_bytes <= prefix.nbytes


def test_the_latest_statistics_are_kept_where_not_all_may_be(rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (2, 600, 32), "fp32")
    q = cases.values(rng, (2, 32), "fp32")
    for block_tokens in (8, 16, 32):
        api.select_blocks(q, prefix, Selection(block_tokens, 3))
    sizes = {key[1]: found.nbytes for key, found in prefix.statistics.items()}
    prefix.forget(sizes[32] + sizes[16])
    assert [key[1] for key in prefix.statistics] == [16, 32]
    prefix.forget(sizes[32] - 1)
    assert not prefix.statistics


def test_statistics_may_be_forgotten_by_another_thread_meanwhile(rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (2, 600, 32), "fp32")

    class Interrupted(BlockStatistics):
        """While these are counted, another thread forgets all."""

        @property
        def nbytes(self) -> int:
            prefix.statistics.clear()
            return super().nbytes

    most = np.zeros((2, 600, 32), np.float32)
    prefix.remember(("mean", 1, 0), Interrupted(most, most))
    prefix.remember(("mean", 2, 0), BlockStatistics(most, most))
    assert list(prefix.statistics) == [("mean", 2, 0)]
