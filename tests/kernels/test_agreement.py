"""Every implementation computes what the specification says, for every combination of shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import api, reference, transfer
from pion_vllm_mlx.kernels.api import Attended, Prefix, Selection, Suffix
from pion_vllm_mlx.kernels.problem import BlocksJob, DenseJob, SparseJob
from tests.kernels import cases

# Absolute, of values around 1: what float32 sums of a thousand terms may lose.
CLOSE = 2e-5
BOTH = pytest.mark.parametrize("kernel", ["cpu", "mlx"])
DENSE_ROWS = cases.pairwise(cases.AXES)
SPARSE_AXES = {
    **{name: cases.AXES[name] for name in ("head_dim", "stored", "page", "head_map", "q_type")},
    "num_tokens": (1, 64, 300, 1025),
    "window": (0, 40, 299, 5000),
    "num_suffix": (None, 0, 1, 70),
    "selector": ("mean", "quest"),
    "block_tokens": (1, 16, 33),
    "top": (1, 3, 1000),
}
SPARSE_ROWS = cases.pairwise(SPARSE_AXES)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[Any], Any]]:
    """Force a kernel, and get the function that turns host arrays and prefixes into its kind."""

    def force(kernel: str) -> Callable[[Any], Any]:
        monkeypatch.setenv("PION_KERNEL", kernel)
        if kernel == "cpu":
            return lambda given: given
        pytest.importorskip("mlx.core")
        return moved

    return force


def moved(given: Any) -> Any:
    """A host array, prefix or suffix as mlx's."""
    if isinstance(given, Prefix):
        return api.device_prefix(given)
    if isinstance(given, Suffix):
        return Suffix(moved(given.keys), moved(given.values))
    return None if given is None else transfer.to_mlx(given)


def assert_agrees(found: Attended, expected: Attended, q: Any) -> None:
    """``found`` in the shape of ``q``, ``expected`` ``[H_q, M, D]`` in float64."""
    out, lse = transfer.to_host(found.out), transfer.to_host(found.lse)
    assert out.dtype == lse.dtype == np.float32
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    np.testing.assert_allclose(out, expected.out.reshape(q.shape), atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(lse, expected.lse.reshape(lse.shape), atol=CLOSE, rtol=CLOSE)


@BOTH
@pytest.mark.parametrize("row", DENSE_ROWS, ids=cases.label)
def test_dense_and_fused_agree(
    kernel: str, row: dict[str, Any], use: Any, rng: np.random.Generator
) -> None:
    to = use(kernel)
    case = cases.case(rng, row)
    found = api.attend_fused(
        to(case.q), to(case.prefix), to(case.suffix), case.head_map, case.window
    )
    rows = case.q if case.q.ndim == 3 else case.q[:, None]
    expected = reference.attend(DenseJob(rows, case.prefix, case.head_map, case.start, case.suffix))
    assert_agrees(found, expected, case.q)


@BOTH
@pytest.mark.parametrize("row", SPARSE_ROWS, ids=cases.label)
def test_sparse_with_given_indices_agrees(
    kernel: str, row: dict[str, Any], use: Any, rng: np.random.Generator
) -> None:
    to = use(kernel)
    case = cases.case(rng, {**row, "num_queries": None})
    num_heads, num_tokens = len(case.head_map), case.prefix.num_tokens
    indices = rng.integers(0, num_tokens, (num_heads, 90)).astype(np.int32)
    counts = rng.integers(0, 91, num_heads).astype(np.uint32)
    beyond = np.arange(90) >= counts[:, None]
    indices[beyond] = rng.integers(-(2**31), 2**31, beyond.sum())  # may be anything
    found = api.attend_sparse(
        to(case.q), to(case.prefix), indices, counts, case.head_map, case.window
    )
    kept = [
        [t for t in row[:count] if t >= case.start]
        for row, count in zip(indices, counts, strict=True)
    ]
    padded = np.array([[*tokens, *[0] * (90 - len(tokens))] for tokens in kept], np.int32)
    lengths = np.array([len(tokens) for tokens in kept], np.int32)
    expected = reference.attend_sparse(
        SparseJob(case.q, case.prefix, case.head_map, padded, lengths)
    )
    assert_agrees(found, expected, case.q)


@BOTH
@pytest.mark.parametrize("row", SPARSE_ROWS, ids=cases.label)
def test_sparse_auto_agrees_on_the_blocks_it_selects(
    kernel: str, row: dict[str, Any], use: Any, rng: np.random.Generator
) -> None:
    to = use(kernel)
    case = cases.case(rng, {**row, "num_queries": None})
    selection = Selection(row["block_tokens"], row["top"], row["selector"])
    prefix = to(case.prefix)
    blocks = transfer.to_host(
        api.select_blocks(to(case.q), prefix, selection, case.head_map, case.window)
    )
    num_blocks = (case.prefix.num_tokens - case.start) // selection.block_tokens
    assert blocks.dtype == np.int32
    assert blocks.tolist() == sorted(set(blocks.tolist()))
    assert len(blocks) == min(selection.top, num_blocks)
    assert_near_best(case, selection, blocks)
    found = api.attend_sparse_auto_fused(
        to(case.q), prefix, to(case.suffix), selection, case.head_map, case.window
    )
    job = BlocksJob(
        case.q,
        case.prefix,
        case.head_map,
        blocks,
        selection.block_tokens,
        case.start,
        case.suffix,
    )
    assert_agrees(found, reference.attend_blocks(job), case.q)


def assert_near_best(case: cases.Case, selection: Selection, blocks: Any) -> None:
    """The blocks are the best ones by the specified scores, but for rounding."""
    statistics = reference.block_statistics(
        case.prefix, selection.block_tokens, case.start, selection.selector
    )
    scores = reference.block_scores(case.q, statistics, case.head_map)
    left_out = np.delete(scores, blocks)
    if len(blocks) and len(left_out):
        assert scores[blocks].min() >= left_out.max() - 1e-5


@BOTH
@pytest.mark.parametrize("selector", ["mean", "quest"])
def test_statistics_and_scores_agree(
    kernel: str, selector: Any, use: Any, rng: np.random.Generator
) -> None:
    from pion_vllm_mlx.kernels.choice import named_kernels

    to = use(kernel)
    prefix = cases.prefix(rng, (2, 300, 64), "bf16", 16)
    kernels = named_kernels(kernel)
    found = kernels.block_statistics(to(prefix), 24, 7, selector)
    expected = reference.block_statistics(prefix, 24, 7, selector)
    np.testing.assert_allclose(transfer.to_host(found.high), expected.high, atol=1e-6)
    if expected.low is not None:
        np.testing.assert_allclose(transfer.to_host(found.low), expected.low, atol=1e-6)
    q, head_map = cases.values(rng, (5, 64), "fp32"), np.array([1, 0, 1, 1, 0], np.uint8)
    scores = kernels.block_scores(to(q), found, head_map)
    np.testing.assert_allclose(
        transfer.to_host(scores),
        reference.block_scores(q, expected, head_map),
        atol=CLOSE,
        rtol=CLOSE,
    )


@BOTH
def test_ties_and_nans_are_ranked_as_specified(kernel: str, use: Any) -> None:
    from pion_vllm_mlx.kernels.choice import named_kernels

    to = use(kernel)
    scores = np.array([1.0, 3.0, np.nan, 3.0, 2.0, 3.0, -np.inf], np.float32)
    kernels = named_kernels(kernel)
    for top in range(1, 6):
        found = transfer.to_host(kernels.top_blocks(to(scores), top))
        assert found.tolist() == reference.top_blocks(scores, top).tolist()
