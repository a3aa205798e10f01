"""The same requests for the Metal texts, the CUDA texts and a CUDA device.

A device's kernels are driven below ``api``, job by job: what is under test is what they compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import reference
from pion_vllm_mlx.kernels.device_kernels import DeviceKernels
from pion_vllm_mlx.kernels.problem import (
    HEAD_DIMS,
    Attended,
    BestBlocksJob,
    BlocksJob,
    BlockStatistics,
    DenseJob,
    SparseJob,
)
from tests.kernels import cases

# Absolute and relative, of values around 1, summed in float32.
CLOSE = 2e-5

_SHARED: dict[str, tuple[Any, ...]] = {
    "head_dim": HEAD_DIMS,
    "stored": cases.STORED,
    "page": (None, 16),
    "num_tokens": (1, 33, 64, 130, 300),
    "window": (0, 1, 40),
    "head_map": ("identity", "groups of 4", "interleaved", "uneven, one unused"),
    "q_type": ("fp32", "fp16", "bf16"),
}
DENSE_AXES = {**_SHARED, "num_queries": (1, 3, 17), "num_suffix": (None, 1, 3, 70)}
# How rows are read does not depend on who reads them: fewer ways here.
SPARSE_AXES = {
    **_SHARED,
    "stored": ("fp16", "4 bits of 32"),
    "num_queries": (None,),
    "num_suffix": (None,),
}
BLOCK_AXES = {
    **_SHARED,
    "num_tokens": (64, 130, 300),
    "stored": ("fp32", "bf16", "8 bits of 32"),
    "num_queries": (None,),
    "num_suffix": (None, 1, 70),
    "selector": ("mean", "quest"),
    "block_tokens": (1, 16, 33),
    "top": (1, 3),
}


def grid(axes: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Every combination of what decides a program, the rest drawn for each; always the same."""
    rng = np.random.default_rng(0)
    whole = ("head_dim", "stored", "page", "num_queries", "selector")
    kept = {name: values for name, values in axes.items() if name in whole}
    kept["num_suffix"] = tuple({None if n is None else 70: n for n in axes["num_suffix"]})
    rows = []
    for chosen in itertools.product(*kept.values()):
        row = dict(zip(kept, chosen, strict=True))
        for name, values in axes.items():
            if name not in row:
                row[name] = values[int(rng.integers(len(values)))]
        rows.append({name: row[name] for name in axes})
    return rows


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Rows for the parameters ``dense``, ``sparse``, ``blocks``: pairwise, or all by --long."""
    axes = {"dense": DENSE_AXES, "sparse": SPARSE_AXES, "blocks": BLOCK_AXES}
    make = grid if metafunc.config.getoption("--long") else cases.pairwise
    for name in sorted(set(axes) & set(metafunc.fixturenames)):
        metafunc.parametrize(name, make(axes[name]), ids=cases.label)


def dense_row(**changes: Any) -> dict[str, Any]:
    """A row of the dense axes with some values changed."""
    row = {name: values[0] for name, values in DENSE_AXES.items()}
    return {**row, "num_tokens": 130, **changes}


def dense_job(row: Mapping[str, Any], rng: np.random.Generator) -> DenseJob:
    """Dense attention, with a suffix or without."""
    case = cases.case(rng, row)
    return DenseJob(case.q, case.prefix, case.head_map, case.start, case.suffix)


def sparse_job(row: Mapping[str, Any], rng: np.random.Generator) -> SparseJob:
    """Listed tokens; a head may have none, and a token may be named twice."""
    case = cases.case(rng, row)
    heads = len(case.head_map)
    indices = rng.integers(case.start, case.prefix.num_tokens, (heads, 90)).astype(np.int32)
    counts = rng.integers(0, 91, heads).astype(np.int32)
    counts[rng.integers(heads)] = 0
    return SparseJob(case.q, case.prefix, case.head_map, indices, counts)


def blocks_job(row: Mapping[str, Any], rng: np.random.Generator) -> BlocksJob:
    """Random blocks of those that there are."""
    case = cases.case(rng, row)
    size = row["block_tokens"]
    num_blocks = (case.prefix.num_tokens - case.start) // size
    top = min(row["top"], num_blocks)
    blocks = np.sort(rng.permutation(num_blocks)[:top]).astype(np.int32)
    return BlocksJob(case.q, case.prefix, case.head_map, blocks, size, case.start, case.suffix)


def best_blocks_job(job: BlocksJob, statistics: BlockStatistics) -> BestBlocksJob:
    """The same question, blocks by their scores: as many as the job has."""
    size, top = job.block_tokens, len(job.blocks)
    return BestBlocksJob(
        *(job.q, job.prefix, job.head_map, statistics, size, top, job.start), suffix=job.suffix
    )


def assert_close(found: Attended, expected: Attended) -> None:
    """Out and lse, shapes and infinities included."""
    np.testing.assert_allclose(found.out, expected.out, atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(found.lse, expected.lse, atol=CLOSE, rtol=CLOSE)


def _same(given: Any) -> Any:
    return given


@dataclass(frozen=True)
class Bench:
    """Kernels, how host arrays become theirs, and how results come back."""

    kernels: DeviceKernels
    to: Callable[[Any], Any] = _same
    back: Callable[[Any], Any] = _same

    def dense(self, row: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Run and compare one dense request."""
        job = dense_job(row, rng)
        self._compare(self.kernels.attend, job, reference.attend)

    def sparse(self, row: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Run and compare one request of listed tokens."""
        self._compare(self.kernels.attend_sparse, sparse_job(row, rng), reference.attend_sparse)

    def blocks(self, row: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Run and compare attention to blocks, their statistics, scores and choice."""
        job = blocks_job(row, rng)
        self._compare(self.kernels.attend_blocks, job, reference.attend_blocks)
        self._selection(job, row["selector"])

    def scored(self, job: BlocksJob, scores: Any) -> None:
        """Run and compare attention to the best blocks by ``scores``."""
        best = self._moved(best_blocks_job(job, BlockStatistics(None)))
        found = self.kernels.attend_scored(best, self.to(scores))
        blocks = reference.top_blocks(scores, best.top)
        expected = reference.attend_blocks(replace(job, blocks=blocks))
        assert_close(Attended(self.back(found.out), self.back(found.lse)), expected)

    def attended(self, run: Callable[[Any], Attended], job: Any) -> Attended:
        """A job's result as host arrays."""
        found = run(self._moved(job))
        return Attended(self.back(found.out), self.back(found.lse))

    def _moved(self, job: Any) -> Any:
        names = {field.name for field in fields(job)} & {"q", "prefix", "suffix", "blocks"}
        return replace(job, **{name: self.to(getattr(job, name)) for name in names})

    def _compare(
        self, run: Callable[[Any], Attended], job: Any, specified: Callable[[Any], Attended]
    ) -> None:
        assert_close(self.attended(run, job), specified(job))

    def _selection(self, job: BlocksJob, selector: Any) -> None:
        size, start = job.block_tokens, job.start
        expected = reference.block_statistics(job.prefix, size, start, selector)
        if expected.high.shape[1] == 0:
            return
        made = self.kernels.block_statistics(self.to(job.prefix), size, start, selector)
        np.testing.assert_allclose(self.back(made.high), expected.high, atol=1e-5)
        if expected.low is not None:
            np.testing.assert_allclose(self.back(made.low), expected.low, atol=1e-5)
        scores = self.back(self.kernels.block_scores(self.to(job.q), made, job.head_map))
        specified = reference.block_scores(job.q, expected, job.head_map)
        np.testing.assert_allclose(scores, specified, atol=1e-4, rtol=1e-5)
        top = min(3, len(scores))
        chosen = self.back(self.kernels.top_blocks(self.to(scores), top))
        np.testing.assert_array_equal(chosen, reference.top_blocks(scores, top))
        blocks = reference.top_blocks(scores, len(job.blocks))
        self._compare(
            lambda given: self.kernels.attend_best_blocks(best_blocks_job(given, made)),
            replace(job, blocks=blocks),
            reference.attend_blocks,
        )
