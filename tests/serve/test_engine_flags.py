"""Values of mlx-lm's flags with which no request would be served: refused before a model loads."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from pion_vllm_mlx.serve import engine_flags

pytest.importorskip("mlx_lm")

ENGINE = "pion_vllm_mlx.serve.engine_mlx_lm"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--prompt-concurrency", "0"), "--prompt-concurrency must be at least 1"),
        (("--decode-concurrency", "-1"), "--decode-concurrency must be at least 1"),
        (("--max-tokens", "0"), "--max-tokens must be at least 1"),
        (("--prompt-cache-size", "0"), "--prompt-cache-size must be at least 1"),
        (("--prompt-cache-size", "-1"), "--prompt-cache-size must be at least 1"),
        (("--temp", "-1"), "--temp must be at least 0"),
        (("--temp", "nan"), "--temp must be at least 0"),
        (("--top-p", "7"), "--top-p must be at least 0 and at most 1"),
        (("--min-p", "-0.5"), "--min-p must be at least 0 and at most 1"),
        (("--top-k", "-1"), "--top-k must be at least 0"),
        (("--num-draft-tokens", "-1"), "--num-draft-tokens must be at least 0"),
        (("--chat-template-args", "[1]"), "--chat-template-args must be a JSON object"),
        (("--prompt-cache-bytes", "5X"), "--prompt-cache-bytes: '5X' is no size"),
        (("--prompt-cache-bytes", ""), "--prompt-cache-bytes: '' is no size"),
    ],
)
def test_a_flag_with_which_every_request_would_fail_is_refused_by_name(
    words: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
    mlx_lm_server: Any,
) -> None:
    with pytest.raises(SystemExit) as ended:
        engine_flags.main([ENGINE, "--model", "m", *words])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--kv-bits", "7"), "--kv-bits must be one of 2, 3, 4, 5, 6, 8"),
        (("--kv-bits", "8", "--kv-group-size", "48"), "--kv-group-size must be one of 32, 64, 128"),
    ],
)
def test_a_quantization_that_there_is_not_is_refused_by_name(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], mlx_lm_server: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        engine_flags.main([ENGINE, "--model", "m", *words])
    assert ended.value.code == 2
    if "unrecognized arguments" not in (said := capsys.readouterr().err):  # mlx-lm 0.31
        assert told in said


def test_flags_that_can_be_served_pass(mlx_lm_server: Any) -> None:
    words = ("--temp", "0.7", "--top-p", "0", "--max-tokens", "1", "--prompt-cache-bytes", "2GB")
    assert engine_flags.main([ENGINE, "--model", "m", *words]) == 0


@pytest.fixture
def mlx_lm_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """mlx-lm's server, whose names that a check replaces come back."""
    server: Any = importlib.import_module("mlx_lm.server")

    for name in ("run", "ModelProvider", "_parse_size"):
        monkeypatch.setattr(server, name, getattr(server, name))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    return server
