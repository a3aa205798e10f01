"""The examples of docs/attention.md run as they are written, over a tiny model."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from pion_vllm_mlx.cache import inproc
from pion_vllm_mlx.patch import uninstall_pion_attention_patch
from tests.serve.tiny_folder import make_folder

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
MANUAL = "To reset it, hold both keys until the lamp is green. " * 8


def examples(page: Path) -> list[tuple[int, str]]:
    """Line and text of every block of Python."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, one.start(1)) + 1, one.group(1)) for one in found]


@pytest.mark.parametrize("lane", ["in-process", "resp"])
def test_every_example_of_the_page_runs_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lane: str
) -> None:
    blocks = examples(PAGE)
    assert len(blocks) == PAGE.read_text(encoding="utf-8").count("```python")
    load, folder = mlx_lm.load, make_folder(tmp_path / "model")
    (tmp_path / "manual.txt").write_text(MANUAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlx_lm, "load", lambda name: load(str(folder))[:2])
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1" if lane == "resp" else "")
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as data:  # a socket's path is short
        monkeypatch.setenv("PION_DATA_DIR", f"{data}/data")
        try:
            for line, block in blocks:
                exec(compile("\n" * (line - 1) + block, str(PAGE), "exec"), names)
            assert names["pc"].misses == 1
        finally:
            uninstall_pion_attention_patch()
            inproc.PROCESS.forget()
            if "pc" in names:
                names["pc"].close()
    told = capsys.readouterr().out
    assert told.startswith(f"{lane}\n") and f"{{'{lane}': 2}}" in told
    assert "(2, 5, 64) (2, 5)" in told
