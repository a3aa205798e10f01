"""Which kernel runs: the table decides, a name in the environment overrides it."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.kernels import api, choice
from pion_vllm_mlx.kernels.choice import Request, Rule, choose, kernel_names, rule_of, table
from tests.kernels import cases

RESULTS = Path(__file__).parents[2] / "benchmarks" / "reproducers" / "results"
# One query of 32 heads over 8 KV heads of 128, bf16 in mlx arrays.
ASKED = Request("attend", False, 16_384, 32, 8, 128, "bf16", False)
HOST = replace(ASKED, host=True)
BATCH = replace(ASKED, num_rows=32 * 16)


def test_an_unknown_kernel_is_an_error_that_lists_the_names(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("PION_KERNEL", "fastest")
    q = cases.values(rng, (2, 32), "fp32")
    with pytest.raises(ConfigError, match="'fastest'; known: reference, cpu, mlx, metal, cuda"):
        api.attend(q, cases.prefix(rng, (2, 10, 32), "fp32"))


def test_a_forced_kernel_runs_whatever_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(HOST).name == "cpu"
    monkeypatch.setenv("PION_KERNEL", "reference")
    assert choose(HOST).name == "reference"


def test_every_request_finds_a_kernel_of_its_kind() -> None:
    pytest.importorskip("mlx.core")
    shapes = itertools.product(choice.OPERATIONS, (True, False), (1, 100_000), (1, 4096))
    for operation, host, num_tokens, num_rows in shapes:
        for dtype, quantized in itertools.product(("fp32", "fp16", "bf16"), (True, False)):
            request = Request(operation, host, num_tokens, num_rows, 1, 256, dtype, quantized)
            kernels = choose(request)
            assert kernels.unavailable() is None
            if host:
                assert kernels.host


def test_the_table_names_known_kernels_alone() -> None:
    assert {rule.kernel for rule in table()} <= set(kernel_names())


def test_a_rule_fits_where_everything_it_names_does() -> None:
    rule = Rule("mlx", arrays="mlx", device="cuda", operation=("sparse",), min_tokens=64)
    asked = replace(ASKED, operation="sparse", num_tokens=64)
    assert rule.fits(asked, lambda: "cuda")
    assert not rule.fits(asked, lambda: "metal")
    for change in ({"operation": "attend"}, {"host": True}, {"num_tokens": 63}):
        assert not rule.fits(replace(asked, **change), lambda: "cuda")


@pytest.mark.parametrize(
    ("rule", "fits", "not_quite"),
    [
        (Rule("cpu", max_queries=8), {"num_rows": 8}, {"num_rows": 9}),
        (Rule("cpu", min_sharing=17), {"num_rows": 17 * 8}, {"num_rows": 17 * 8 - 1}),
        (Rule("cpu", min_dim=256), {"head_dim": 256}, {"head_dim": 192}),
        (Rule("cpu", dtype=("fp32", "fp16")), {"dtype": "fp16"}, {"dtype": "bf16"}),
        (Rule("cpu", quantized=False), {"quantized": False}, {"quantized": True}),
        (Rule("cpu", quantized=True), {"quantized": True}, {"quantized": False}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_each_field_of_a_rule_can_refuse(
    rule: Rule, fits: dict[str, Any], not_quite: dict[str, Any]
) -> None:
    assert rule.fits(replace(ASKED, **fits), lambda: "cpu")
    assert not rule.fits(replace(ASKED, **not_quite), lambda: "cpu")


def decided(request: Request, device: str) -> str:
    """The kernel of the first rule of the table that fits, whether it can run here or not."""
    return next(rule.kernel for rule in table() if rule.fits(request, lambda: device))


WIDE = replace(BATCH, head_dim=512)
SINGLE = replace(BATCH, dtype="fp32")
DECIDED: list[tuple[Request, str, str]] = [
    (HOST, "metal", "cpu"),
    (ASKED, "metal", "metal"),
    (WIDE, "metal", "metal"),
    (ASKED, "cuda", "cuda"),
    (BATCH, "cuda", "cuda"),
    (replace(BATCH, dtype="fp16"), "cuda", "cuda"),
    (WIDE, "cuda", "mlx"),
    (replace(WIDE, operation="fused"), "cuda", "mlx"),
    (replace(WIDE, head_dim=256), "cuda", "cuda"),
    (replace(WIDE, num_rows=32), "cuda", "cuda"),
    (replace(WIDE, num_tokens=2048), "cuda", "mlx"),
    (replace(WIDE, num_tokens=2047), "cuda", "cuda"),
    (replace(WIDE, quantized=True), "cuda", "cuda"),
    (replace(WIDE, operation="blocks"), "cuda", "cuda"),
    (SINGLE, "cuda", "cuda"),
    (replace(SINGLE, num_rows=32), "cuda", "cuda"),
    (replace(SINGLE, quantized=True), "cuda", "cuda"),
    (ASKED, "cpu", "cpu"),
    (ASKED, "elsewhere", "mlx"),
]


@pytest.mark.parametrize(("request_", "device", "kernel"), DECIDED)
def test_the_table_decides_as_measured(request_: Request, device: str, kernel: str) -> None:
    assert decided(request_, device) == kernel


def measured() -> list[tuple[str, Request, str]]:
    """Each row of the batched queries that a GPU was timed with, and what was faster there."""
    rows = json.loads((RESULTS / "kernels_cuda-batched.json").read_text())["batched"]
    found = []
    for name, row in rows.items():
        sizes = re.fullmatch(r"(\d+)/(\d+)x(\d+) (\w+) N=(\d+) M=(\d+)", name)
        assert sizes, name
        heads, kv_heads, dim, dtype, tokens, queries = sizes.groups()
        request = Request(
            *("attend", False, int(tokens), int(heads) * int(queries), int(kv_heads), int(dim)),
            dtype={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype],
            quantized=False,
        )
        times = row["us"]
        found.append((name, request, "cuda" if times["kernel"] <= times["expression"] else "mlx"))
    return found


@pytest.mark.parametrize(("name", "request_", "faster"), measured())
def test_the_faster_of_every_measured_row_is_chosen(
    name: str, request_: Request, faster: str
) -> None:
    assert decided(request_, "cuda") == faster
    assert decided(replace(request_, operation="fused"), "cuda") == faster


def test_every_rule_of_the_table_decides_something() -> None:
    first = {
        next(i for i, rule in enumerate(table()) if rule.fits(request, lambda at=device: at))
        for request, device, _ in DECIDED
    }
    assert first == set(range(len(table())))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "is no rule"),
        ({"arrays": "mlx"}, "is no rule with a kernel"),
        ({"kernel": "fast"}, "kernel cannot be 'fast'"),
        ({"kernel": ["cpu"]}, "kernel cannot be"),
        ({"kernel": "cpu", "arrays": "torch"}, "arrays cannot be 'torch'"),
        ({"kernel": "cpu", "device": "gpu"}, "device cannot be 'gpu'"),
        ({"kernel": "cpu", "operation": "attend"}, "operation cannot be 'attend'"),
        ({"kernel": "cpu", "operation": ["attned"]}, "operation cannot be"),
        ({"kernel": "cpu", "operation": [["attend"]]}, "operation cannot be"),
        ({"kernel": "cpu", "dtype": ["float32"]}, "dtype cannot be"),
        ({"kernel": "cpu", "quantized": 1}, "quantized cannot be 1"),
        ({"kernel": "cpu", "min_tokens": "64"}, "min_tokens cannot be '64'"),
        ({"kernel": "cpu", "max_queries": True}, "max_queries cannot be True"),
        ({"kernel": "cpu", "min_dim": -1}, "min_dim cannot be -1"),
        ({"kernel": "cpu", "min_token": 64}, "min_token cannot be 64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_rule_is_refused_by_field(row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule_of(row)


def test_a_prefix_says_what_it_is_to_the_choice(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    seen: list[Request] = []
    monkeypatch.setattr(api, "choose", lambda request: (seen.append(request), choose(request))[1])
    q = cases.values(rng, (4, 3, 64), "fp32")
    head_map = np.array([0, 0, 1, 1], np.uint8)
    for stored, dtype in (
        ("bf16", "bf16"),
        ("4 bits of 32", "fp16"),
        ("8 bits of 32, fp32", "fp32"),
    ):
        api.attend(q, cases.prefix(rng, (2, 40, 64), stored), head_map)
        expected = Request("attend", True, 40, 12, 2, 64, dtype, " of " in stored)
        assert seen[-1] == expected


def test_a_kernel_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    mx = pytest.importorskip("mlx.core")
    if mx.metal.is_available():
        pytest.skip("Metal runs here")
    monkeypatch.setenv("PION_KERNEL", "metal")
    with pytest.raises(ConfigError, match="'metal' cannot run here: "):
        choose(ASKED)
