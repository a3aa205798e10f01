"""The model's folder is whole or absent, and a damaged one is never used."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="comes with the demo extra")
pytest.importorskip("tqdm", reason="comes with the demo extra")

from pion_vllm_mlx.demo.model import MANIFEST, UNFINISHED, GgufSource, damage, ensure_model
from pion_vllm_mlx.errors import DamagedData
from tests.demo.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").path


def _source(gguf_path: Path, sha256: str | None = None) -> GgufSource:
    digest = sha256 or hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    return GgufSource(
        "tiny", digest, gguf_path.stat().st_size, lambda target: shutil.copy(gguf_path, target)
    )


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


KILLED_AT = """
    import os, shutil, signal, sys
    from pathlib import Path
    from pion_vllm_mlx.demo.model import GgufSource, ensure_model

    cache, gguf, sha256, name = sys.argv[1:]

    def hook(event, arguments):
        if event in ("open", "os.rename") and os.fsdecode(arguments[0]).endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)

    source = GgufSource("tiny", sha256, 1, lambda target: shutil.copy(gguf, target))
    sys.addaudithook(hook)
    ensure_model(Path(cache), source, quiet=True)
"""


@pytest.mark.parametrize(
    "name",
    ["source.gguf", "model.safetensors", "config.json", "tokenizer.json", MANIFEST, "/model"],
)
def test_a_killed_conversion_leaves_no_folder_and_the_next_one_cleans_up(
    tmp_path: Path, gguf_path: Path, name: str
) -> None:
    source = _source(gguf_path)
    command = [sys.executable, "-c", textwrap.dedent(KILLED_AT)]
    # The manifest is first looked for where the finished folder would be.
    name = f"/model/{name}" if name == MANIFEST else name
    arguments = [str(tmp_path), str(gguf_path), source.sha256, name]
    killed = subprocess.run([*command, *arguments], cwd=Path(__file__).parents[2], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "tiny-float32").exists()
    assert list(tmp_path.glob(f"{UNFINISHED}*"))

    folder = ensure_model(tmp_path, source, quiet=True)
    assert damage(folder, source) is None
    assert not list(tmp_path.glob(f"{UNFINISHED}*"))


def test_a_second_call_finds_the_folder_without_assembling_again(
    tmp_path: Path, gguf_path: Path
) -> None:
    source = _source(gguf_path)
    folder = ensure_model(tmp_path, source, quiet=True)

    def refuse(target: Path) -> None:
        raise AssertionError("assembled again")

    again = GgufSource(source.name, source.sha256, source.size_bytes, refuse)
    assert ensure_model(tmp_path, again, quiet=True) == folder


def test_a_folder_with_other_timestamps_but_the_same_content_is_used(
    tmp_path: Path, gguf_path: Path
) -> None:
    source = _source(gguf_path)
    folder = ensure_model(tmp_path, source, quiet=True)
    os.utime(folder / "model.safetensors", (1, 1))
    assert damage(folder, source) is None


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("hurt", [_cut, _flip, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", MANIFEST])
def test_a_damaged_file_is_noticed_and_the_folder_made_again(
    tmp_path: Path, gguf_path: Path, hurt: object, name: str
) -> None:
    source = _source(gguf_path)
    folder = ensure_model(tmp_path, source, quiet=True)
    before = _content(folder)
    assert callable(hurt)
    hurt(folder / name)
    assert damage(folder, source) is not None
    assert _content(ensure_model(tmp_path, source, quiet=True)) == before
    assert damage(folder, source) is None


def test_a_joined_file_with_another_sha256_is_refused(tmp_path: Path, gguf_path: Path) -> None:
    with pytest.raises(DamagedData, match="SHA-256"):
        ensure_model(tmp_path, _source(gguf_path, sha256="0" * 64), quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, gguf_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    source = _source(gguf_path)
    # More than the GGUF, less than the float32 weights.
    resource.setrlimit(resource.RLIMIT_FSIZE, (source.size_bytes + 4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            ensure_model(tmp_path, source, quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_processes_that_convert_at_once_end_with_one_whole_folder(
    tmp_path: Path, gguf_path: Path
) -> None:
    source = _source(gguf_path)
    command = [sys.executable, "-c", textwrap.dedent(KILLED_AT), str(tmp_path), str(gguf_path)]
    running = [
        subprocess.Popen(
            [*command, source.sha256, "nothing has this name"], cwd=Path(__file__).parents[2]
        )
        for _ in range(3)
    ]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert damage(tmp_path / "tiny-float32", source) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "tiny-float32"]


def test_the_notice_and_the_manifest_name_the_licence(
    tmp_path: Path, gguf_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ensure_model(tmp_path, _source(gguf_path))
    assert "Gemma Terms of Use" in capsys.readouterr().err
    assert "ai.google.dev/gemma/terms" in json.loads((folder / MANIFEST).read_text())["licence"]
