"""The console command: what it prints, and its exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pion_vllm_mlx import __version__, cli
from pion_vllm_mlx.cache import data_folder
from pion_vllm_mlx.errors import DataFolderBusy
from pion_vllm_mlx.server.folder import DataFolder


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pion_vllm_mlx", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_printed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out.strip() == f"pion-vllm-mlx {__version__}"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_an_unknown_command_exits_2_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dmeo"]) == 2
    assert "did you mean 'demo'" in capsys.readouterr().err
    assert cli.main(["zzzzzz"]) == 2
    assert "one of: server, demo, " in capsys.readouterr().err


def test_the_module_runs_as_the_console_command_does() -> None:
    assert run_cli("--version").stdout.strip() == f"pion-vllm-mlx {__version__}"
    assert run_cli().returncode == 2


def test_a_missing_part_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needs_more.py").write_text("import gguf_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(cli.COMMANDS, "demo", cli.Command("needs_more", "", "demo"))
    assert cli.main(["demo"]) == 1
    err = capsys.readouterr().err
    assert "gguf_that_is_not_there" in err and "pip install 'pion-vllm-mlx[demo]'" in err


def test_data_path_prints_the_chosen_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PION_DATA_DIR", str(tmp_path))
    assert cli.main(["data", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)


def store_files(folder: Path) -> None:
    segments = folder / "pion.segments.0"
    segments.mkdir(parents=True)
    (segments / "a.safetensors").write_bytes(b"x" * 20_000)
    (folder / "pion.vstore.wal.0").write_bytes(b"x")
    (folder / "pion-export").mkdir()
    (folder / "notes.txt").write_text("not of the store")


def test_data_size_counts_the_files_of_the_store_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_files(tmp_path)
    (tmp_path / "notes.txt").write_bytes(b"x" * 10**6)
    assert cli.main(["data", "size", "--dir", str(tmp_path)]) == 0
    bytes_word, rest = capsys.readouterr().out.split(" ", 1)
    assert 20_000 <= int(bytes_word) < 10**6
    assert rest.startswith("bytes in 2 files")


def test_data_clear_removes_the_store_and_nothing_else(tmp_path: Path) -> None:
    store_files(tmp_path)
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (tmp_path / "pion-link").symlink_to(outside)
    assert cli.main(["data", "clear", "--dir", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]
    assert (outside / "kept").exists()
    assert cli.main(["data", "clear", "--dir", str(tmp_path / "absent")]) == 0


def test_data_clear_leaves_an_empty_folder_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "clear", "--dir", str(tmp_path)]) == 0
    assert "removed 0 bytes in 0 files" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_cleared_away_keeps_nobody_in_or_out(tmp_path: Path) -> None:
    store_files(tmp_path)
    (tmp_path / "pion.lock").touch()
    before = os.open(tmp_path / "pion.lock", os.O_RDWR)
    try:
        assert cli.main(["data", "clear", "--dir", str(tmp_path)]) == 0
        fcntl.flock(before, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = DataFolder(tmp_path)  # its lock is another file
        with pytest.raises(DataFolderBusy), data_folder.exclusive(tmp_path):
            raise AssertionError("owned twice")
        owner.close()
    finally:
        os.close(before)


def test_a_lock_opened_before_the_folder_was_cleared_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server starts while the folder is cleared: two of them never own it."""
    lock, taken = tmp_path / "pion.lock", fcntl.flock
    first: list[int] = []

    def cleared_in_between(descriptor: int, how: int) -> None:
        if not first and os.path.samestat(os.fstat(descriptor), lock.stat()):
            first.append(descriptor)
            lock.unlink()
        taken(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", cleared_in_between)
    for own in (lambda: DataFolder(tmp_path).close(), lambda: _own(tmp_path)):
        first.clear()
        own()
        assert first and lock.exists()


def _own(folder: Path) -> None:
    with data_folder.exclusive(folder), pytest.raises(DataFolderBusy):
        DataFolder(folder)


def test_data_clear_refuses_while_a_server_owns_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_files(tmp_path)
    (tmp_path / "pion.status").write_text(json.dumps({"pid": 4242, "port": 1974}))
    owner = os.open(tmp_path / "pion.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert cli.main(["data", "clear", "--dir", str(tmp_path)]) == 1
    finally:
        os.close(owner)
    assert "process 4242" in capsys.readouterr().err
    assert (tmp_path / "pion.segments.0" / "a.safetensors").exists()
    assert cli.main(["data", "clear", "--dir", str(tmp_path)]) == 0
    assert not (tmp_path / "pion.segments.0").exists()


def test_data_clear_leaves_a_running_server_s_folder_alone_without_its_lock_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_files(tmp_path)
    owner = DataFolder(tmp_path)
    try:
        (tmp_path / "pion.lock").unlink()
        before = sorted(tmp_path.rglob("*"))
        assert cli.main(["data", "clear", "--dir", str(tmp_path)]) == 1
        assert "in use by a server" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before
    finally:
        owner.close()
    assert cli.main(["data", "clear", "--dir", str(tmp_path)]) == 0


def test_a_folder_that_cannot_be_cleared_is_one_line_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pion.lock").mkdir()
    assert cli.main(["data", "clear", "--dir", str(tmp_path)]) == 1
    assert "pion.lock" in capsys.readouterr().err
