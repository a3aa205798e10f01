"""Which kernel runs: the table decides, a name in the environment overrides it."""

from __future__ import annotations

import numpy as np
import pytest

from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.kernels import api, choice
from pion_vllm_mlx.kernels.choice import Request, Rule, choose, kernel_names, table
from tests.kernels import cases


def test_an_unknown_kernel_is_an_error_that_lists_the_names(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("PION_KERNEL", "fastest")
    q = cases.values(rng, (2, 32), "fp32")
    with pytest.raises(ConfigError, match="'fastest'; known: reference, cpu, mlx, metal, cuda"):
        api.attend(q, cases.prefix(rng, (2, 10, 32), "fp32"))


def test_a_forced_kernel_runs_whatever_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("attend", True, 100, 8)
    assert choose(request).name == "cpu"
    monkeypatch.setenv("PION_KERNEL", "reference")
    assert choose(request).name == "reference"


def test_every_request_finds_a_kernel_of_its_kind() -> None:
    pytest.importorskip("mlx.core")
    for operation in choice.OPERATIONS:
        for host in (True, False):
            for num_tokens, num_rows in ((1, 1), (100_000, 1), (100_000, 4096)):
                kernels = choose(Request(operation, host, num_tokens, num_rows))
                assert kernels.unavailable() is None
                if host:
                    assert kernels.host


def test_the_table_names_known_kernels_alone() -> None:
    assert {rule.kernel for rule in table()} <= set(kernel_names())


def test_the_first_rule_that_fits_decides() -> None:
    rule = Rule("mlx", arrays="mlx", device="cuda", operation=("sparse",), min_tokens=64)
    assert rule.fits(Request("sparse", False, 64, 1), lambda: "cuda")
    for request in (
        Request("attend", False, 64, 1),
        Request("sparse", True, 64, 1),
        Request("sparse", False, 63, 1),
    ):
        assert not rule.fits(request, lambda: "cuda")
    assert not rule.fits(Request("sparse", False, 64, 1), lambda: "metal")
    few = Rule("cpu", max_queries=8)
    assert few.fits(Request("attend", True, 1, 8), lambda: "cpu")
    assert not few.fits(Request("attend", True, 1, 9), lambda: "cpu")


def test_a_kernel_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    mx = pytest.importorskip("mlx.core")
    if mx.metal.is_available():
        pytest.skip("Metal runs here")
    monkeypatch.setenv("PION_KERNEL", "metal")
    with pytest.raises(ConfigError, match="'metal' cannot run here: "):
        choose(Request("attend", False, 1, 1))
