"""No barrier or fence of a kernel can be left out without the emulation naming what goes wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import device_kernels
from pion_vllm_mlx.kernels.device_kernels import DeviceKernels
from pion_vllm_mlx.kernels.device_source import (
    CUDA,
    METAL,
    Dialect,
    Signature,
)
from pion_vllm_mlx.kernels.device_text import shared_texts
from pion_vllm_mlx.kernels.problem import BlockStatistics
from tests.kernels import device_cases
from tests.metal_emulation.emulation import (
    COMPILER,
    Compiler,
    EmulatedRunner,
    KernelFault,
    Recorder,
    product_texts,
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

BARRIER = (
    r"(?:threadgroup_barrier|simdgroup_barrier|__syncthreads|__syncwarp|__threadfence)\(.*?\);"
)
BLOCKS = {"num_queries": None, "num_tokens": 300, "block_tokens": 16, "top": 3}
TENSORS = {"stored": "bf16", "q_type": "bf16"}


def dense(row: dict[str, Any]) -> Callable[[DeviceKernels], Any]:
    job = device_cases.dense_job(device_cases.dense_row(**row), np.random.default_rng())
    return lambda kernels: kernels.attend(job)


def scored(**changes: Any) -> Callable[[DeviceKernels], Any]:
    """Attention whose threads choose the blocks: of few, which they can hold, and of many."""

    def run(kernels: DeviceKernels) -> None:
        rng = np.random.default_rng()
        job = device_cases.blocks_job(device_cases.dense_row(**BLOCKS, **changes), rng)
        best = device_cases.best_blocks_job(job, BlockStatistics(None))
        for num_blocks in (18, 2100):
            kernels.attend_scored(best, scores_of(num_blocks, rng))

    return run


def scores_of(num_blocks: int, rng: np.random.Generator) -> Any:
    """Random ones, the greatest among the 18 blocks that there are."""
    scores = rng.standard_normal(num_blocks).astype(np.float32)
    scores[:18] += 20
    return scores


def block_scores(kernels: DeviceKernels) -> None:
    rng = np.random.default_rng()
    high = rng.standard_normal((3, 18, 32)).astype(np.float32)
    q = rng.standard_normal((3, 32)).astype(np.float32)
    kernels.block_scores(q, BlockStatistics(high), np.arange(3, dtype=np.uint8))


# What launches each text that has barriers: the dialects that have it, and the launch.
LAUNCHES: dict[str, tuple[tuple[Dialect, ...], Callable[[DeviceKernels], Any]]] = {
    "few_rows": ((METAL, CUDA), dense({})),
    "few_rows in parts": ((METAL, CUDA), dense({"num_tokens": 1100})),
    "few_rows that choose": ((METAL, CUDA), scored()),
    "group_rows": ((CUDA,), dense({"num_tokens": 100, **TENSORS})),
    "group_rows in parts": ((CUDA,), dense({"num_tokens": 300, **TENSORS})),
    "group_rows that choose": ((CUDA,), scored(**TENSORS)),
    "many_rows": ((METAL, CUDA), dense({"num_queries": 17})),
    "tensor_rows": ((CUDA,), dense({"num_queries": 17, **TENSORS})),
    "block_scores": ((METAL, CUDA), block_scores),
}


def programs_of(dialect: Dialect, name: str) -> list[Signature]:
    """Those of a launch that have barriers."""
    recorder = Recorder(dialect)
    LAUNCHES[name][1](DeviceKernels(recorder))
    return [s for s in recorder.signatures if s.kernel == name.split()[0]]


def visible_barriers(dialect: Dialect, signature: Signature) -> list[int]:
    """The numbers of the barriers that this program has, of all that its text has."""
    header, body = product_texts(dialect, signature)
    text = header + body
    chooses = dict(signature.defines).get("TOKENS") == "3"
    found = []
    for number, match in enumerate(re.finditer(BARRIER, text)):
        in_choice = "void choose(" in text[: match.start()] and match.start() < len(header)
        if chooses or not in_choice:
            found.append(number)
    return found


def barriers() -> list[Any]:
    """(dialect, launch, number of the barrier) for every barrier of every program."""
    return [
        pytest.param(dialect, name, number, id=f"{dialect.name}-{name}-{number}")
        for name, (dialects, _) in LAUNCHES.items()
        for dialect in dialects
        for signature in programs_of(dialect, name)
        for number in visible_barriers(dialect, signature)
    ]


@pytest.mark.parametrize(("dialect", "name", "number"), barriers())
def test_no_barrier_can_be_left_out(
    dialect: Dialect, name: str, number: int, tmp_path: Path
) -> None:
    runner = EmulatedRunner(dialect, Compiler(tmp_path))
    own = name.split()[0]

    def drop(texts: tuple[str, str]) -> tuple[str, str]:
        return without(texts, number) if f'"{own}.' in texts[0] + texts[1] else texts

    runner.mutate = drop
    faults = "race: (threadgroup|exchanged) memory|read out of bounds"
    with pytest.raises(KernelFault, match=faults):
        LAUNCHES[name][1](DeviceKernels(runner))


def without(texts: tuple[str, str], which: int) -> tuple[str, str]:
    """Header and body without barrier number ``which``."""
    number = -1

    def drop(match: re.Match[str]) -> str:
        nonlocal number
        number += 1
        return ";" if number == which else match[0]

    header, body = (re.sub(BARRIER, drop, text) for text in texts)
    return header, body


def test_every_text_with_a_barrier_is_tried() -> None:
    for dialect in (METAL, CUDA):
        tried = {
            text
            for name, (dialects, _) in LAUNCHES.items()
            if dialect in dialects
            for signature in programs_of(dialect, name)
            if visible_barriers(dialect, signature)
            for text in (signature.kernel, *shared_texts(dialect, signature))
        }
        folder = Path(device_kernels.__file__).parent / dialect.name
        have = {file.stem for file in folder.iterdir() if re.search(BARRIER, file.read_text())}
        assert have <= tried
