"""The amounts follow the machine unless asked for, and nonsense is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pion_vllm_mlx.demo.blas import debian_openblas, matrix_library
from pion_vllm_mlx.demo.run import FULL, SHORT, Amounts, main, parse_options
from pion_vllm_mlx.errors import ConfigError


def test_a_slow_machine_shortens_what_was_not_asked_for() -> None:
    options = parse_options(["--questions", "4"])
    assert options.amounts(fast=True) == Amounts(512, 4, 16)
    assert options.amounts(fast=False) == Amounts(SHORT.prefix_tokens, 4, SHORT.num_tokens)


def test_without_options_the_amounts_are_the_promised_ones() -> None:
    assert parse_options([]).amounts(fast=True) == FULL == Amounts(512, 5, 16)


@pytest.mark.parametrize(
    "words",
    [
        ["--questions", "0"],
        ["--questions", "11"],
        ["--tokens", "-1"],
        ["--prefix-tokens", "1e3"],
        ["--prefix-tokens", "99999999999999999999"],
        ["--nonsense"],
    ],
)
def test_a_bad_option_ends_with_usage_before_anything_runs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["/no-such-folder", "./none", "no/such/folder"])
def test_a_model_that_is_nowhere_is_named_before_anything_runs(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlx_lm", reason="comes with the mlx extra")
    with pytest.raises(ConfigError, match=model):
        main(["--model", model])
    assert "Process A" not in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal is fast without a BLAS")
def test_debians_openblas_is_put_before_mlxs_own_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert debian_openblas(tmp_path) is None
    slow = matrix_library(tmp_path)
    assert not slow.fast and "LD_PRELOAD" not in slow.environment

    monkeypatch.setattr("platform.machine", lambda: "any")
    folder = tmp_path / "usr/lib/any-linux-gnu/openblas-pthread"
    folder.mkdir(parents=True)
    (folder / "libopenblas.so.0").touch()
    fast = matrix_library(tmp_path)
    assert fast.fast
    assert fast.environment["LD_PRELOAD"] == str(folder / "libopenblas.so.0")

    monkeypatch.setenv("LD_PRELOAD", "/somewhere/libopenblas.so")
    assert matrix_library(tmp_path / "nowhere").fast
