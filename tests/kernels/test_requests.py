"""Requests that do not fit are refused before anything is computed, and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.api import Affine, Prefix, Selection, Suffix


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


PREFIX = Prefix(zeros(2, 10, 32), zeros(2, 10, 32), 10)


def attend(q: Any, head_map: Any = None, window: int = 0) -> Callable[[], Any]:
    return lambda: api.attend(q, PREFIX, head_map, window)


def fused(*shape: int) -> Callable[[], Any]:
    return lambda: api.attend_fused(zeros(2, 1, 32), PREFIX, Suffix(zeros(*shape), zeros(*shape)))


def sparse(indices: Any, counts: Any) -> Callable[[], Any]:
    return lambda: api.attend_sparse(zeros(2, 32), PREFIX, np.array(indices), np.array(counts))


def paged(table: Any, num_tokens: int = 10) -> Callable[[], Any]:
    pool = zeros(3, 2, 4, 32)
    return lambda: Prefix(pool, pool, num_tokens, table)


def quantized(bits: int, group: int, scales: tuple[int, ...]) -> Callable[[], Any]:
    side = Affine(np.zeros((2, 10, 4), np.uint32), zeros(*scales), zeros(*scales), bits, group)
    return lambda: Prefix(side, side, 10)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (attend(zeros(2, 0, 32)), "M=0"),
        (attend(zeros(2, 64)), "shape mismatch: Q has D=64, the prefix 32"),
        (attend(zeros(64)), "shape mismatch"),
        (attend(zeros(1, 2, 1, 32)), "shape mismatch"),
        (attend(zeros(3, 32)), "H_q=3, H_kv=2: a head_map is needed"),
        (attend(zeros(2, 32), [0, 2]), "head_map: an entry is out of range, H_kv=2"),
        (attend(zeros(2, 32), [-1, 0]), "head_map: an entry is out of range"),
        (attend(zeros(2, 32), [0]), "head_map must have H_q=2 entries"),
        (attend(zeros(2, 32), [0.0, 1.0]), "head_map must hold integers"),
        (attend(zeros(2, 32), window=-1), "window must be 0 or more"),
        (attend(zeros(2, 32).astype(np.float64)), "float32, float16 or bfloat16"),
        (attend(zeros(0, 32), []), "H_q must be 1 to 1024"),
        (attend(zeros(1025, 32), [0] * 1025), "H_q must be 1 to 1024"),
        (fused(2, 3, 64), "shape mismatch: suffix"),
        (fused(1, 3, 32), "shape mismatch: suffix"),
        (lambda: api.attend_sparse(zeros(2, 1, 32), PREFIX, [[0]], [1]), "shape mismatch"),
        (sparse([[0], [10]], [1, 1]), "index 10 is outside the prefix of 10 tokens"),
        (sparse([[0], [-1]], [1, 1]), "index -1 is outside"),
        (sparse([[0], [0]], [1, 2]), "a count is outside 0 to 1"),
        (sparse([[0], [0]], [1, -1]), "a count is outside"),
        (sparse([[0]], [1]), "shape mismatch: indices"),
        (sparse([[0.0], [0.0]], [1, 1]), "must be integers"),
        (lambda: Selection(0, 1), "at least 1"),
        (lambda: Selection(16, 0), "at least 1"),
        (lambda: Selection(16, 1, "best"), "mean or quest"),  # type: ignore[arg-type]
        (lambda: Prefix(zeros(2, 10, 48), zeros(2, 10, 48), 10), "unsupported head dim D=48"),
        (lambda: Prefix(zeros(2, 10, 32), zeros(2, 9, 32), 9), "shape mismatch: K 2x10x32, V 2x9"),
        (lambda: Prefix(zeros(2, 10, 32), zeros(2, 10, 32), 11), "N=11, rows 10"),
        (lambda: Prefix(zeros(2, 10, 32), zeros(2, 10, 32), 0), "at least one token"),
        (lambda: Prefix(zeros(257, 1, 32), zeros(257, 1, 32), 1), "H_kv must be 1 to 256"),
        (lambda: api.dense_prefix(zeros(10, 32), zeros(10, 32)), "shape mismatch: K has 2 axes"),
        (lambda: api.dense_prefix(zeros(2, 3, 32), zeros(2, 3, 32), "fp8"), "unknown dtype 'fp8'"),
        (paged(np.array([0, 1], np.int32)), "2 blocks do not hold N=10"),
        (paged(np.array([0, 1, 3], np.int32)), "outside the pool of 3 blocks"),
        (paged(np.array([0, -1, 1], np.int32)), "outside the pool"),
        (paged(np.array([0, 1, 2])), "int32"),
        (quantized(4, 32, (2, 10, 2)), "scales 2x10x2, not 2x10x1"),
        (quantized(3, 32, (2, 10, 1)), "not supported"),
        (quantized(4, 64, (2, 10, 1)), "not supported"),
    ],
)
def test_what_does_not_fit_is_refused(request_: Callable[[], Any], says: str) -> None:
    with pytest.raises(CommandError) as caught:
        request_()
    assert says in str(caught.value)


def test_keys_and_values_of_two_kinds_are_refused() -> None:
    mx = pytest.importorskip("mlx.core")
    with pytest.raises(CommandError, match="of one kind"):
        Prefix(zeros(2, 10, 32), mx.zeros((2, 10, 32)), 10)


def test_a_window_beyond_the_prefix_is_the_whole_prefix() -> None:
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 2, 10, 32)).astype(np.float32)
    prefix, q = api.dense_prefix(keys, values), rng.standard_normal((2, 32)).astype(np.float32)
    whole = api.attend(q, prefix).out
    for window in (10, 11, 2**31):
        np.testing.assert_array_equal(api.attend(q, prefix, window=window).out, whole)
    assert np.abs(api.attend(q, prefix, window=9).out - whole).max() > 1e-4
