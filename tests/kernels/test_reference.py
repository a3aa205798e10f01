"""The specification says what attention is: checked against loops over single numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import reference
from pion_vllm_mlx.kernels.api import Affine, BlockStatistics, Prefix
from pion_vllm_mlx.kernels.problem import BlocksJob, DenseJob, SparseJob
from tests.kernels import cases


def attention(query: Any, keys: list[Any], values: list[Any]) -> tuple[list[float], float]:
    """One query over lists of rows, in Python numbers."""
    dim = len(query)
    if not keys:
        return [0.0] * dim, -math.inf
    weights = [
        math.exp(sum(float(a) * float(b) for a, b in zip(query, key, strict=True)) / math.sqrt(dim))
        for key in keys
    ]
    total = sum(weights)
    out = [
        sum(weight * float(value[d]) for weight, value in zip(weights, values, strict=True)) / total
        for d in range(dim)
    ]
    return out, math.log(total)


def test_dense_attention_is_a_softmax_over_what_each_query_sees(rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (2, 9, 32), "fp32")
    suffix = cases.suffix(rng, (2, 5, 32))
    q = rng.standard_normal((4, 3, 32))
    head_map = np.array([1, 0, 0, 1], np.uint8)
    found = reference.attend(DenseJob(q, prefix, head_map, 4, suffix))
    for head, query in np.ndindex(4, 3):
        kv = head_map[head]
        keys = [*prefix.keys[kv, 4:9], *suffix.keys[kv, : 5 - 3 + query + 1]]
        values = [*prefix.values[kv, 4:9], *suffix.values[kv, : 5 - 3 + query + 1]]
        out, lse = attention(q[head, query], keys, values)
        np.testing.assert_allclose(found.out[head, query], out, atol=1e-12)
        assert found.lse[head, query] == pytest.approx(lse, abs=1e-12)


def test_with_more_queries_than_suffix_tokens_the_first_query_sees_the_first_token(
    rng: np.random.Generator,
) -> None:
    prefix = cases.prefix(rng, (1, 2, 32), "fp32")
    suffix = cases.suffix(rng, (1, 2, 32))
    q = rng.standard_normal((1, 4, 32))
    found = reference.attend(DenseJob(q, prefix, np.zeros(1, np.uint8), 0, suffix))
    for query, seen in enumerate([1, 2, 2, 2]):
        keys = [*prefix.keys[0, :2], *suffix.keys[0, :seen]]
        values = [*prefix.values[0, :2], *suffix.values[0, :seen]]
        np.testing.assert_allclose(
            found.out[0, query], attention(q[0, query], keys, values)[0], atol=1e-12
        )


def test_sparse_attention_sees_the_counted_tokens_alone(rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (2, 9, 32), "fp32")
    q = rng.standard_normal((3, 32))
    indices = np.array([[8, 0, 3], [5, 5, 1], [1, 2, 3]], np.int32)
    counts = np.array([3, 2, 0], np.int32)
    found = reference.attend_sparse(
        SparseJob(q, prefix, np.array([0, 1, 1], np.uint8), indices, counts)
    )
    for head, (kv, tokens) in enumerate([(0, [0, 3, 8]), (1, [5, 5]), (1, [])]):
        keys, values = ([side[kv, t] for t in tokens] for side in (prefix.keys, prefix.values))
        out, lse = attention(q[head], keys, values)
        np.testing.assert_allclose(found.out[head], out, atol=1e-12)
        assert found.lse[head] == pytest.approx(lse, abs=1e-12)


def test_blocks_count_from_the_window_and_the_tail_is_seen(rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (1, 23, 32), "fp32")
    suffix = cases.suffix(rng, (1, 2, 32))
    q = rng.standard_normal((1, 32))
    blocks = np.array([0, 2], np.int32)
    job = BlocksJob(q, prefix, np.zeros(1, np.uint8), blocks, 5, 6, suffix)
    tokens = [*range(6, 11), *range(16, 21), 21, 22]
    keys = [*prefix.keys[0, tokens], *suffix.keys[0]]
    values = [*prefix.values[0, tokens], *suffix.values[0]]
    out, lse = attention(q[0], keys, values)
    found = reference.attend_blocks(job)
    np.testing.assert_allclose(found.out[0], out, atol=1e-12)
    assert found.lse[0] == pytest.approx(lse, abs=1e-12)


def test_scores_are_the_mean_over_query_heads_of_each_selectors_score(
    rng: np.random.Generator,
) -> None:
    prefix = cases.prefix(rng, (2, 25, 32), "fp32")
    q = rng.standard_normal((3, 32))
    head_map = np.array([0, 1, 1], np.uint8)
    mean = reference.block_statistics(prefix, 5, 4, "mean")
    quest = reference.block_statistics(prefix, 5, 4, "quest")
    assert mean.high.shape == (2, 4, 32)
    for block in range(4):
        rows = [prefix.keys[kv, 4 + 5 * block : 9 + 5 * block] for kv in head_map]
        by_mean = [
            sum(q[h, d] * rows[h][:, d].mean(dtype=float) for d in range(32)) / math.sqrt(32)
            for h in range(3)
        ]
        by_bound = [
            sum(
                max(q[h, d] * rows[h][:, d].min(), q[h, d] * rows[h][:, d].max()) for d in range(32)
            )
            for h in range(3)
        ]
        scores = reference.block_scores(q, mean, head_map)
        assert scores[block] == pytest.approx(sum(by_mean) / 3, abs=1e-9)
        scores = reference.block_scores(q, quest, head_map)
        assert scores[block] == pytest.approx(sum(by_bound) / 3, abs=1e-9)


def test_the_lower_block_wins_a_tie_and_a_nan_never_wins() -> None:
    scores = np.array([1.0, 3.0, np.nan, 3.0, 2.0, 3.0])
    assert reference.top_blocks(scores, 2).tolist() == [1, 3]
    assert reference.top_blocks(scores, 4).tolist() == [1, 3, 4, 5]
    many = np.tile([0.0, 1.0], 500)
    assert reference.top_blocks(many, 300).tolist() == list(range(1, 600, 2))


def test_a_query_head_that_is_not_finite_does_not_choose_blocks() -> None:
    high = np.zeros((2, 3, 32))
    high[0, 1], high[1, 2] = 1, 1
    q = np.ones((2, 32))
    q[1, 5] = np.nan
    scores = reference.block_scores(q, BlockStatistics(high), np.array([0, 1], np.uint8))
    assert np.isfinite(scores).all()
    assert reference.top_blocks(scores, 1).tolist() == [1]


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 32), (8, 128)])
def test_codes_lie_as_mlx_quantizes_them(rng: np.random.Generator, bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core")
    rows = mx.array(rng.standard_normal((2, 3, 256)).astype(np.float32))
    codes, scales, biases = mx.quantize(rows, group_size=group, bits=bits)
    side = Affine(*(np.array(array) for array in (codes, scales, biases)), bits, group)
    assert side.shape == (2, 3, 256)
    expected = np.array(mx.dequantize(codes, scales, biases, group_size=group, bits=bits))
    np.testing.assert_allclose(reference.side_values(side), expected, atol=1e-6)


def test_bf16_bit_patterns_are_read_as_the_upper_half_of_a_float32() -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    assert reference.values_of(bits).tolist() == [1.0, -2.0, math.inf, 2.0**-133]


def test_a_block_table_puts_blocks_in_order(rng: np.random.Generator) -> None:
    pool = rng.standard_normal((3, 2, 4, 32)).astype(np.float32)
    prefix = Prefix(pool, pool, 7, np.array([2, 0], np.int32))
    keys, _ = reference.prefix_values(prefix)
    assert keys.shape == (2, 7, 32)
    np.testing.assert_array_equal(keys[:, :4], pool[2])
    np.testing.assert_array_equal(keys[:, 4:], pool[0][:, :3])
