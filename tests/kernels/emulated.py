"""Emulated kernels whose programs are compiled together, before the first test runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels.device_kernels import DeviceKernels
from pion_vllm_mlx.kernels.device_source import Dialect
from tests.kernels import device_cases
from tests.metal_emulation.emulation import Compiler, EmulatedRunner, Recorder

Row = Mapping[str, Any]

WHOLE_KEYS = 128


def _wanted(kernels: DeviceKernels, rng: np.random.Generator) -> dict[str, Callable[[Row], Any]]:
    """What a test of each kind launches, by the name its parameter has."""

    def blocks(row: Row) -> None:
        job = device_cases.blocks_job(row, rng)
        kernels.attend_blocks(job)
        num_blocks = (job.prefix.num_tokens - job.start) // job.block_tokens
        if num_blocks:
            size, start = job.block_tokens, job.start
            made = kernels.block_statistics(job.prefix, size, start, row["selector"])
            scores = kernels.block_scores(job.q, made, job.head_map)
            kernels.top_blocks(scores, min(3, num_blocks))
            kernels.attend_best_blocks(device_cases.best_blocks_job(job, made))

    return {
        "dense": lambda row: kernels.attend(device_cases.dense_job(row, rng)),
        "sparse": lambda row: kernels.attend_sparse(device_cases.sparse_job(row, rng)),
        "blocks": blocks,
    }


def bench(
    dialect: Dialect, items: Iterable[pytest.Item], module: str, folder: Path
) -> device_cases.Bench:
    """A bench on emulated kernels; the programs of the module's collected tests are compiled.

    Some cases see their keys in one part, others in more.
    """
    dialect = replace(dialect, whole_keys=WHOLE_KEYS)
    recorder = Recorder(dialect)
    wanted = _wanted(DeviceKernels(recorder), np.random.default_rng())
    for item in items:
        callspec = getattr(item, "callspec", None)
        if item.module.__name__ == module and callspec is not None:  # type: ignore[attr-defined]
            for name, row in callspec.params.items():
                if name in wanted:
                    wanted[name](row)
    runner = EmulatedRunner(dialect, Compiler(folder))
    runner.prepare(recorder.signatures)
    return device_cases.Bench(DeviceKernels(runner))
