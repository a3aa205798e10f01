"""A call on mlx arrays is its launches: no operation of mlx stands before, between or behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.api import Prefix, Selection, Suffix
from pion_vllm_mlx.kernels.device_kernels import DeviceKernels
from pion_vllm_mlx.kernels.device_source import CUDA, METAL, Dialect, Launch
from pion_vllm_mlx.kernels.mlx_runner import MlxRunner
from pion_vllm_mlx.kernels.problem import Attended, BlocksJob

mx = pytest.importorskip("mlx.core")

HEAD_MAP = np.array([0, 0, 1, 1], np.uint8)
TOKENS = 300


class Watching(MlxRunner):
    """Remembers launches and what they were given; an output is a lazy array."""

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect)
        self.launches: list[Launch] = []
        self.made: list[Any] = []

    def run(self, launch: Launch) -> list[Any]:
        self.launches.append(launch)
        found = [mx.zeros(shape) for _, shape, _ in launch.outputs]
        self.made += found
        return found


def random(*shape: int) -> Any:
    made = mx.random.normal(shape)
    mx.eval(made)
    return made


def is_there(array: Any) -> bool:
    """Whether no operation is left to run for an array: its graph has no edge."""
    import io

    text = io.StringIO()
    mx.export_to_dot(text, array)
    return "->" not in text.getvalue()


def listed(q: Any, prefix: Prefix) -> Attended:
    tokens = np.tile(np.arange(64, dtype=np.int32), (4, 1))
    return api.attend_sparse(q, prefix, tokens, np.full(4, 64, np.uint32), HEAD_MAP)


def selected(name: str, suffix: bool = False) -> Callable[[Any, Prefix], Attended]:
    def call(q: Any, prefix: Prefix) -> Attended:
        behind = Suffix(random(2, 3, 64), random(2, 3, 64)) if suffix else None
        selection = Selection(16, 3, name)  # type: ignore[arg-type]
        return api.attend_sparse_auto_fused(q, prefix, behind, selection, HEAD_MAP)

    return call


# Each call, and the launches it is on CUDA and on Metal.
CALLS: dict[str, tuple[Callable[[Any, Prefix], Attended], int, int]] = {
    "dense": (lambda q, prefix: api.attend(q, prefix, HEAD_MAP), 1, 2),
    "listed": (listed, 1, 1),
    "block means": (selected("mean"), 2, 2),
    "quest": (selected("quest"), 2, 2),
    "block means and a suffix": (selected("mean", suffix=True), 2, 2),
}


@pytest.mark.parametrize("dialect", [CUDA, METAL], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_its_launches(
    name: str, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, on_cuda, on_metal = CALLS[name]
    runner = Watching(dialect)
    kernels = DeviceKernels(runner)
    monkeypatch.setattr(api, "choose", lambda request: kernels)
    prefix = Prefix(random(2, TOKENS, 64), random(2, TOKENS, 64), TOKENS)
    q = random(4, 64)
    call(q, prefix)  # what a prefix and a runner keep is made
    runner.launches.clear()
    runner.made.clear()
    found = call(q, prefix)
    assert len(runner.launches) == (on_cuda if dialect is CUDA else on_metal)
    results = [id(array) for array in runner.made]
    for launch in runner.launches:
        for what, array in launch.inputs:
            assert id(array) in results or is_there(array), what
    assert {id(found.out), id(found.lse)} <= set(results)


def test_given_blocks_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Watching(CUDA)
    prefix = Prefix(random(2, TOKENS, 64), random(2, TOKENS, 64), TOKENS)
    blocks = mx.array([1, 4, 9]) + 0
    q = random(4, 64)
    DeviceKernels(runner).attend_blocks(BlocksJob(q, prefix, HEAD_MAP, blocks, 16))
    inputs = dict(runner.launches[0].inputs)
    assert inputs["blocks"] is blocks and inputs["queries"] is q
