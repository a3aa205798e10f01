"""The commands beside serve: a word that is no number is told as serve tells it."""

from __future__ import annotations

import pytest

from pion_vllm_mlx import cli

WARM = ["warm", "f.txt", "--model", "m"]
EXPLAIN = ["explain", "--request", "f.json", "--model", "m"]


@pytest.mark.parametrize("command", [WARM, EXPLAIN], ids=["warm", "explain"])
@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        ("--pion-budget-gb", "number of gigabytes"),
        ("--pion-port", "port"),
        ("--pion-min-gain", "whole number"),
        ("--durable", "whole number"),
    ],
)
def test_what_is_no_number_is_called_by_what_it_was_to_be(
    command: list[str], flag: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"argument {flag}: 'x' is no {wanted}" in refused([*command, flag, "x"], capsys)


def test_a_branch_of_no_number_of_tokens_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["conversations", "branch", "a:1", "--at", "x"]
    assert "argument --at: 'x' is no whole number" in refused(words, capsys)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line that is wrong is told."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err
