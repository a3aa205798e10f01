"""The whole demo with a tiny model: real processes, a real server, a real kill."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="comes with the mlx extra")
pytest.importorskip("gguf", reason="comes with the demo extra")

from pion_vllm_mlx.demo.gguf_convert import GgufFile, convert
from pion_vllm_mlx.demo.run import main
from tests.demo.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    convert(GgufFile(write_tiny_gguf(folder / "tiny.gguf").path), folder, lambda _: None)
    return folder


def test_the_demo_finds_everything_as_promised(
    tiny_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    amounts = ["--prefix-tokens", "90", "--questions", "2", "--tokens", "3"]
    code = main(["--model", str(tiny_model), "--json", *amounts])
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["problems"] == [], err
    assert code == 0
    assert found["prefix_tokens"] == 90
    assert found["lane"] == "mapped"
    assert found["identical"] is True
    assert [len(found["questions"]), found["after_kill"], found["flipped_byte"]] == [
        2,
        "hit",
        "miss",
    ]
    assert found["flipped_byte_reason"]
    assert int(found["receipt"]["kvprefix_hits"]) >= 2
    assert not list(tmp_path.glob("pion-demo-*"))


def test_another_lane_than_the_expected_one_is_a_failure_with_its_name(
    tiny_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
    amounts = ["--prefix-tokens", "40", "--questions", "1", "--tokens", "2"]
    assert main(["--model", str(tiny_model), *amounts, "--keep-data"]) == 1
    out, _ = capfd.readouterr()
    assert re.search(r"NOT AS PROMISED: B, question 1: lane (stored|range)\n", out)
    assert re.search(r"NOT AS PROMISED: C: lane (stored|range)\n", out)
    assert "PROMISED: D" not in out
    (kept,) = tmp_path.glob("pion-demo-*")
    assert list((kept / "data").glob("pion.segments.*/*"))
