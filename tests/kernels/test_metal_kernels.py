"""The Metal texts compute what the specification says, in the host emulation.

Pairwise combinations of shapes and types; ``--long`` runs every combination that makes another
program.  Values are new each run, outputs and threadgroup memory are poisoned.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import reference
from pion_vllm_mlx.kernels.device_kernels import DeviceKernels
from pion_vllm_mlx.kernels.device_source import METAL, SMALL_INPUT, Signature
from pion_vllm_mlx.kernels.problem import HEAD_DIMS, BlockStatistics, DenseJob
from tests.kernels import cases, device_cases, emulated
from tests.kernels.device_cases import Bench
from tests.metal_emulation.emulation import COMPILER, Recorder, product_texts

# The first test waits until all programs are compiled.
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.timeout(1800),
]

THREADGROUP_BYTES = 32 * 1024


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device_cases.parametrize(metafunc)


@pytest.fixture(scope="module")
def metal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("metal")
    return emulated.bench(METAL, request.session.items, __name__, folder)


def test_dense_and_fused(metal: Bench, dense: dict[str, Any], rng: np.random.Generator) -> None:
    metal.dense(dense, rng)


def test_listed_tokens(metal: Bench, sparse: dict[str, Any], rng: np.random.Generator) -> None:
    metal.sparse(sparse, rng)


def test_blocks(metal: Bench, blocks: dict[str, Any], rng: np.random.Generator) -> None:
    metal.blocks(blocks, rng)


@pytest.mark.parametrize("num_queries", [1, 5])
def test_a_nan_in_q_stays_in_its_row(
    metal: Bench, num_queries: int, rng: np.random.Generator
) -> None:
    row = device_cases.dense_row(head_map="groups of 4", num_queries=num_queries, num_suffix=3)
    job = device_cases.dense_job(row, rng)
    job.q[2, num_queries - 1, 7] = np.nan
    found = metal.attended(metal.kernels.attend, job)
    expected = reference.attend(job)
    assert np.isnan(found.out[2, num_queries - 1]).all()
    assert np.isnan(found.out).sum() == found.out.shape[-1]
    assert np.isnan(found.lse).sum() == 1
    device_cases.assert_close(found, expected)


def test_a_head_of_q_that_is_not_finite_decides_no_block(
    metal: Bench, rng: np.random.Generator
) -> None:
    prefix = cases.prefix(rng, (2, 130, 64), "fp16")
    q, head_map = cases.values(rng, (4, 64), "fp32"), np.array([0, 0, 1, 1], np.uint8)
    q[1, 3], q[2, 60] = np.nan, np.inf
    for selector in ("mean", "quest"):
        made = metal.kernels.block_statistics(prefix, 16, 5, selector)
        scores = metal.kernels.block_scores(q, made, head_map)
        np.testing.assert_allclose(
            scores, reference.block_scores(q, made, head_map), atol=1e-4, rtol=1e-5
        )


def test_equal_scores_and_nans_are_ranked_as_specified(metal: Bench) -> None:
    scores = np.array([1, 3, np.nan, 3, 2, 3, -np.inf, 3, np.nan, -np.inf], np.float32)
    for top in range(1, len(scores) + 1):
        found = metal.kernels.top_blocks(scores, top)
        assert found.tolist() == reference.top_blocks(scores, top).tolist()


def test_blocks_are_chosen_by_threads_as_specified(metal: Bench, rng: np.random.Generator) -> None:
    row = {**device_cases.dense_row(head_map="groups of 4"), "num_queries": None}
    for num_tokens, most in ((170, 3), (530, 32)):  # in one part, and in several
        asked = {**row, "num_tokens": num_tokens, "block_tokens": 5}
        num_blocks = num_tokens // 5
        scores = rng.integers(-3, 4, num_blocks).astype(np.float32)
        scores[rng.integers(num_blocks, size=12)] = [np.nan, np.inf, -np.inf, -0.0] * 3
        for top in (1, 2, most):
            metal.scored(device_cases.blocks_job({**asked, "top": top}, rng), scores)
        job = device_cases.blocks_job({**asked, "top": most}, rng)
        metal.scored(job, np.full(num_blocks, np.nan, np.float32))
        metal.scored(job, np.where(np.arange(num_blocks) % 2, 0.0, -0.0).astype(np.float32))


def test_large_scores_do_not_overflow(metal: Bench, rng: np.random.Generator) -> None:
    for num_queries in (1, 17):
        job = device_cases.dense_job(device_cases.dense_row(num_queries=num_queries), rng)
        found = metal.attended(
            metal.kernels.attend, DenseJob(job.q * 300, job.prefix, job.head_map)
        )
        expected = reference.attend(DenseJob(job.q * 300, job.prefix, job.head_map))
        np.testing.assert_allclose(found.out, expected.out, atol=2e-3)
        np.testing.assert_allclose(found.lse, expected.lse, rtol=1e-5)


def signatures_of(row: dict[str, Any]) -> list[Signature]:
    """The programs of attention: dense, to chosen blocks, of few keys in one part and in more."""
    rng = np.random.default_rng()
    recorders = [Recorder(replace(METAL, whole_keys=keys)) for keys in (0, 1024)]
    for recorder in recorders:
        kernels = DeviceKernels(recorder)
        kernels.attend(device_cases.dense_job(row, rng))
        asked = {**row, "num_queries": None, "block_tokens": 16, "top": 3}
        job = device_cases.blocks_job(asked, rng)
        high = np.zeros((job.prefix.num_kv_heads, 8, job.prefix.head_dim), np.float32)
        kernels.attend_best_blocks(device_cases.best_blocks_job(job, BlockStatistics(high, high)))
    return sorted(set().union(*(one.signatures for one in recorders)), key=repr)


def test_threadgroup_memory_fits_an_apple_gpu() -> None:
    used = set()
    for head_dim in HEAD_DIMS:
        for num_queries in (1, 17):
            row = device_cases.dense_row(
                head_dim=head_dim, num_queries=num_queries, head_map="groups of 4"
            )
            for signature in signatures_of(row):
                num_bytes = threadgroup_bytes(signature)
                assert num_bytes <= THREADGROUP_BYTES, (signature.kernel, signature.template)
                used |= {signature.kernel} if num_bytes else set()
    assert used == {"few_rows", "many_rows", "block_scores"}


def threadgroup_bytes(signature: Signature) -> int:
    """What the arrays of a text take; all arrays, whether its macros want them or not."""
    header, body = product_texts(METAL, signature)
    constants = re.findall(r"constant constexpr int (\w+) = (\d+);", header)
    names = {**dict(signature.template), **{name: int(value) for name, value in constants}}
    arrays = re.findall(r"threadgroup (?:float|int|uint) \w+\[(.+?)\];", body)
    return 4 * sum(int(eval(size, {}, names)) for size in arrays)


def test_small_inputs_are_indexed_only() -> None:
    # mlx puts inputs of fewer than 8 values in another address space: a pointer to one cannot be
    # handed to a function that takes a device pointer. The texts that do so get longer inputs.
    pointers = {"queries", "keys", "values", "suffix_keys", "suffix_values", "table", "params"}
    pointers |= {"high", "low"}
    for row in cases.pairwise(device_cases.DENSE_AXES)[:20]:
        for recorded in signatures_of({**row, "num_tokens": 300, "window": 0}):
            small = {name for name, _, is_small in recorded.inputs if is_small}
            assert not small & pointers, SMALL_INPUT
