"""Flags of vllm-mlx with which no request would ever be answered are refused by their names."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.serve.engine_vllm_mlx import parse  # noqa: E402


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-num-seqs", "0"),
        ("--prefill-batch-size", "0"),
        ("--completion-batch-size", "-1"),
        ("--stream-interval", "0"),
        ("--max-tokens", "0"),
        ("--max-request-tokens", "0"),
        ("--chunked-prefill-tokens", "-1"),
        ("--cache-memory-mb", "-5"),
        ("--cache-memory-percent", "1.5"),
        ("--gpu-memory-utilization", "7"),
        ("--timeout", "0"),
        ("--default-temperature", "nan"),
        ("--default-top-p", "1.1"),
        ("--default-min-p", "-0.1"),
    ],
)
def test_a_flag_with_which_no_request_is_answered_is_refused_by_its_name(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["some/model", f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"error: {flag} must be at least" in capsys.readouterr().err


def test_the_ends_of_the_ranges_are_taken() -> None:
    words = ["--max-num-seqs=1", "--cache-memory-mb=0", "--cache-memory-percent=1"]
    words += ["--default-top-p=0", "--chunked-prefill-tokens=0", "--default-temperature=0"]
    assert parse(["some/model", *words]).serve.max_num_seqs == 1
