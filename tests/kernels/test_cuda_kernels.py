"""The CUDA texts compute what the specification says: in the host emulation, and on a device.

The same cases as the Metal texts have.  Without g++ or without a CUDA device the one or the other
is skipped.  ``--long`` runs every combination that makes another program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import reference, transfer
from pion_vllm_mlx.kernels.api import Affine, Prefix, Suffix
from pion_vllm_mlx.kernels.cuda_kernels import CudaKernels
from pion_vllm_mlx.kernels.device_plan import Query, parts_of, way_of
from pion_vllm_mlx.kernels.device_source import CUDA
from pion_vllm_mlx.kernels.problem import DenseJob
from tests.kernels import cases, device_cases, emulated
from tests.kernels.device_cases import Bench
from tests.metal_emulation.emulation import COMPILER

# The first test waits until all programs are compiled.
pytestmark = pytest.mark.timeout(1800)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device_cases.parametrize(metafunc)


def moved(given: Any) -> Any:
    """A host array, prefix or suffix as mlx's."""
    if isinstance(given, Prefix):
        return Prefix(moved(given.keys), moved(given.values), given.num_tokens, given.table)
    if isinstance(given, Suffix):
        return Suffix(moved(given.keys), moved(given.values))
    if isinstance(given, Affine):
        return given.mapped(transfer.to_mlx)
    return None if given is None else transfer.to_mlx(given)


@pytest.fixture(scope="module", params=["emulated", "device"])
def cuda(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    if request.param == "emulated":
        if COMPILER is None:
            pytest.skip("needs g++")
        folder = tmp_path_factory.mktemp("cuda")
        return emulated.bench(CUDA, request.session.items, __name__, folder)
    kernels = CudaKernels()
    reason = kernels.unavailable()
    if reason is not None:
        pytest.skip(reason)
    back: Callable[[Any], Any] = transfer.to_host
    return Bench(kernels, moved, back)


def test_dense_and_fused(cuda: Bench, dense: dict[str, Any], rng: np.random.Generator) -> None:
    cuda.dense(dense, rng)


def test_listed_tokens(cuda: Bench, sparse: dict[str, Any], rng: np.random.Generator) -> None:
    cuda.sparse(sparse, rng)


def test_blocks(cuda: Bench, blocks: dict[str, Any], rng: np.random.Generator) -> None:
    cuda.blocks(blocks, rng)


@pytest.mark.parametrize("num_queries", [1, 17])
def test_a_nan_in_q_stays_in_its_row(
    cuda: Bench, num_queries: int, rng: np.random.Generator
) -> None:
    row = device_cases.dense_row(head_map="groups of 4", num_queries=num_queries, num_suffix=3)
    job = device_cases.dense_job(row, rng)
    job.q[2, num_queries - 1, 7] = np.nan
    found = cuda.attended(cuda.kernels.attend, job)
    assert np.isnan(found.out[2, num_queries - 1]).all()
    assert np.isnan(found.out).sum() == found.out.shape[-1]
    device_cases.assert_close(found, reference.attend(job))


def test_equal_scores_and_nans_are_ranked_as_specified(cuda: Bench) -> None:
    scores = np.array([1, 3, np.nan, 3, 2, 3, -np.inf, 3, np.nan, -np.inf], np.float32)
    for top in range(1, len(scores) + 1):
        found = cuda.back(cuda.kernels.top_blocks(cuda.to(scores), top))
        assert found.tolist() == reference.top_blocks(scores, top).tolist()


def test_blocks_are_chosen_by_threads_as_specified(cuda: Bench, rng: np.random.Generator) -> None:
    row = {**device_cases.dense_row(head_map="groups of 4"), "num_queries": None}
    # In one part, and in several; so many that threads hold twice as many, and none.
    for num_tokens, most in ((170, 3), (530, 32), (7600, 32), (11_000, 3)):
        asked = {**row, "num_tokens": num_tokens, "block_tokens": 5}
        num_blocks = num_tokens // 5
        scores = rng.integers(-3, 4, num_blocks).astype(np.float32)
        scores[rng.integers(num_blocks, size=12)] = [np.nan, np.inf, -np.inf, -0.0] * 3
        for top in (1, 2, most):
            cuda.scored(device_cases.blocks_job({**asked, "top": top}, rng), scores)
        job = device_cases.blocks_job({**asked, "top": most}, rng)
        cuda.scored(job, np.full(num_blocks, np.nan, np.float32))
        cuda.scored(job, np.where(np.arange(num_blocks) % 2, 0.0, -0.0).astype(np.float32))


@pytest.mark.parametrize(
    ("head_dim", "stored", "q_type", "num_suffix", "page"),
    [(32, "bf16", "fp32", 3, 16), (64, "fp16", "fp16", 70, None), (128, "bf16", "bf16", 70, 16)],
)
def test_tensor_cores_lose_nothing_that_float32_keeps(  # noqa: PLR0913
    cuda: Bench,
    head_dim: int,
    stored: str,
    q_type: str,
    num_suffix: int,
    page: int | None,
    rng: np.random.Generator,
) -> None:
    row = device_cases.dense_row(
        head_dim=head_dim,
        stored=stored,
        q_type=q_type,
        page=page,
        num_queries=20,
        num_tokens=99,
        head_map="groups of 4",
    )
    job = device_cases.dense_job(row, rng)
    job = replace(job, suffix=cases.suffix(rng, (2, num_suffix, head_dim), stored))
    found = cuda.attended(cuda.kernels.attend, job)
    device_cases.assert_close(found, reference.attend(job))


def test_long_prefixes_are_cut_into_parts_and_merged(cuda: Bench, rng: np.random.Generator) -> None:
    head_map = np.array([0, 0, 1, 1], np.uint8)
    for num_queries in (1, 9):
        q = cases.values(rng, (4, num_queries, 64), "fp16")
        job = DenseJob(q, cases.prefix(rng, (2, 2000, 64), "bf16"), head_map, 3)
        found = cuda.attended(cuda.kernels.attend, job)
        device_cases.assert_close(found, reference.attend(job))


def test_the_parts_of_few_rows_and_a_small_head_fit_where_they_are_merged(
    cuda: Bench, rng: np.random.Generator
) -> None:
    q = cases.values(rng, (1, 1, 32), "fp32")
    prefix = cases.prefix(rng, (1, 9000, 32), "fp32")
    suffix = cases.suffix(rng, (1, 200, 32), "fp32")
    job = DenseJob(q, prefix, np.zeros(1, np.uint8), 0, suffix)
    device_cases.assert_close(cuda.attended(cuda.kernels.attend, job), reference.attend(job))


@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_no_more_parts_than_their_merge_has_room_for(
    head_dim: int, stored: str, rng: np.random.Generator
) -> None:
    side = cases.values(rng, (1, 1, head_dim), stored)
    q = cases.values(rng, (1, 1, head_dim), "fp32")
    for num_tokens in (9000, 34_000, 200_000):
        for num_suffix in (0, 1, 5000):
            keys, suffix = (
                np.broadcast_to(side, (1, n, head_dim)) for n in (num_tokens, num_suffix)
            )
            prefix = Prefix(keys, keys, num_tokens)
            pair = (suffix, suffix) if num_suffix else None
            query = Query(q, prefix, np.zeros(1, np.uint8), 0, num_tokens, pair)
            way = way_of(CUDA, query)
            assert way.merges
            assert parts_of(CUDA, 1, query, way).total <= way.simdgroups * head_dim


def test_many_chosen_blocks_are_cut_into_parts(cuda: Bench, rng: np.random.Generator) -> None:
    row = device_cases.dense_row(num_tokens=2000, head_map="groups of 4", num_suffix=5)
    asked = {**row, "num_queries": None, "block_tokens": 48, "top": 24}
    cuda.scored(device_cases.blocks_job(asked, rng), rng.standard_normal(41).astype(np.float32))
