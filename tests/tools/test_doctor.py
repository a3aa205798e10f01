"""The doctor says what is damaged and what a repair would do, and changes nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from pion_vllm_mlx import cli
from pion_vllm_mlx.cache.completion import COMPLETION_LAYER, CompletionRecord
from pion_vllm_mlx.tools import doctor
from tests.conftest import RunningServer, running_server
from tests.recovery.driving import Driver, Options
from tests.recovery.material import noise, store_all


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with a saved prefix, and one that is in the logs alone."""
    where = tmp_path / "data"
    where.mkdir()
    with Driver(where) as driver:
        store_all(driver, "saved")
        driver.ask("KV.PREFIX.SAVE")
        store_all(driver, "logged")
    (where / "pion.wal.0").touch()  # as a server makes it
    return where


def image(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file's bytes, mode and time of change."""
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


def examine(folder: Path, *flags: str) -> int:
    """The exit code; the folder is as it was."""
    before = image(folder)
    code = cli.main(["doctor", "--dir", str(folder), *flags])
    assert image(folder) == before
    return code


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_sound_folder_is_told_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(folder) == 0
    out = capsys.readouterr().out
    assert out.endswith("sound\n") and "damaged" not in out
    assert "2 prefixes, 0 of them with a completion record" in out
    assert "saved: " in out and "logged: " in out


def test_a_flipped_row_is_found_only_by_reading(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = noise(("saved_pk", 1, 0, 600), 600 * 128)
    segment = next(
        path for path in (folder / "pion.segments.0").iterdir() if rows[:64] in path.read_bytes()
    )
    flip(segment, segment.read_bytes().index(rows[:64]))
    assert examine(folder, "--quick") == 0
    assert capsys.readouterr().out.endswith("\nsound, rows and states were not read\n")
    assert examine(folder) == 1
    out = capsys.readouterr().out
    assert "saved_pk" in out and "checksum of rows is wrong" in out
    assert "saved_pk is dropped with its prefix" in out


def test_a_missing_segment_is_found_without_reading(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (folder / "pion.segments.0").iterdir():
        path.unlink()
    assert examine(folder, "--quick") == 1
    out = capsys.readouterr().out
    assert "missing on disk" in out and "is dropped" in out


@pytest.mark.parametrize("name", ["team:name", "torn end: nothing names; the file is kept as x"])
def test_damage_is_sorted_by_its_kind_whatever_a_session_is_called(
    tmp_path: Path, name: str
) -> None:
    where = tmp_path / "data"
    where.mkdir()
    with Driver(where) as driver:
        store_all(driver, name)
        driver.ask("KV.PREFIX.SAVE")
    (where / "pion.wal.0").touch()
    for path in (where / "pion.segments.0").iterdir():
        path.unlink()
    report = doctor.check(where, quick=True)
    sides = [f"{name}_pk", f"{name}_pv"]
    assert report.starts and {line.removesuffix(" is dropped") for line in report.starts} <= {
        name,
        *sides,
    }
    assert all(line.endswith(": rows or states are missing on disk") for line in report.damage)
    assert len(report.damage) == len(report.starts) and not report.notes


@pytest.mark.parametrize("at", [16, 60])
@pytest.mark.parametrize("name", ["pion.vstore.0", "pion.ssm.0", "pion.vstore.wal.0"])
def test_what_it_announces_is_what_a_repair_does(folder: Path, name: str, at: int) -> None:
    flip(folder / name, at)
    report = doctor.check(folder, quick=True)
    assert report.damage and any(line.startswith(f"{name} is set aside") for line in report.repairs)
    left = {prefix.namespace for prefix in report.prefixes}
    with Driver(folder, Options(salvage=True)) as driver:
        assert {n.decode() for n in driver.store.state.namespaces()} == left
    assert any(path.name.startswith(f"{name}.damaged-") for path in folder.iterdir())
    moved = [len(list(path.iterdir())) for path in folder.glob("pion.segments.0.damaged-*")]
    assert [
        f"{count} segment files" in line for count in moved for line in report.repairs[-1:]
    ] == [True for _ in moved]
    assert all("nothing of it is kept" not in line for line in report.repairs) == (
        at == 60 or "wal" in name
    )
    assert doctor.check(folder, quick=False).damage == []


def test_it_never_says_that_it_has_repaired(folder: Path) -> None:
    flip(folder / "pion.vstore.0", 60)
    done = subprocess.run(
        [sys.executable, "-m", "pion_vllm_mlx", "doctor", "--dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and done.stdout.endswith("damaged\n")
    assert "is kept as" not in done.stdout + done.stderr


def with_record(folder: Path, namespace: str, blob: bytes) -> None:
    with Driver(folder) as driver:
        driver.ask("SSM.PREFIX.STORE", namespace, COMPLETION_LAYER, blob)
        driver.ask("KV.PREFIX.SAVE")


def whole_record(tokens: int) -> bytes:
    return CompletionRecord({"model": "m"}, np.arange(tokens, dtype=np.uint32), [], []).encode()


@pytest.mark.parametrize("flags", [(), ("--quick",)])
def test_a_damaged_completion_record_is_damage(
    folder: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    record = whole_record(50)
    with_record(folder, "saved", record)
    assert examine(folder, *flags) == 0
    assert "saved: " in (out := capsys.readouterr().out) and "50 tokens" in out
    with_record(folder, "saved", record[:-9] + b"x" + record[-8:])
    assert examine(folder, *flags) == 1
    out = capsys.readouterr().out
    assert "saved: completion record: checksum does not match: not a hit" in out
    assert "saved is dropped with its prefix when it is first read, prefilled again" in out
    assert out.endswith("damaged\n") != bool(flags) and "\ndamaged" in out


@pytest.mark.parametrize("flags", [(), ("--quick",)])
def test_a_completion_record_that_lies_in_a_segment_is_read_whole(
    folder: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with_record(folder, "saved", whole_record(30_000))
    assert examine(folder, *flags) == 0
    assert "30,000 tokens" in capsys.readouterr().out


def test_a_completion_record_whose_file_was_flipped_is_damage_and_is_dropped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = whole_record(30_000)  # too long for the snapshot: it lies in a segment
    with_record(folder, "saved", record)
    (segment,) = (p for p in (folder / "pion.segments.0").iterdir() if record in p.read_bytes())
    flip(segment, segment.read_bytes().index(record) + 2)
    assert examine(folder, "--quick") == 1
    assert "saved: completion record" in capsys.readouterr().out
    assert examine(folder) == 1
    out = capsys.readouterr().out
    assert out.count("saved is dropped with its prefix") == 1 and "stored anew" in out
    with Driver(folder) as driver:
        assert driver.ask("SSM.PREFIX.FETCH", "saved", COMPLETION_LAYER) is None
        assert str(driver.ask("KV.PREFIX.LOOKUP", "saved")) == "MISS"
    assert examine(folder) == 0


@pytest.fixture
def portable(folder: Path, tmp_path: Path) -> Path:
    """A folder with nothing but a portable copy in the manifest's place."""
    with Driver(folder) as driver:
        driver.ask("KV.PREFIX.SAVE", "copy")
    where = tmp_path / "restored"
    where.mkdir()
    (folder / "copy").rename(where / "pion.vstore.0")
    return where


def test_a_portable_copy_is_checked_as_it_will_be_unpacked(
    portable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(portable) == 0
    out = capsys.readouterr().out
    assert "is a portable copy: the next start unpacks it" in out
    assert "saved: " in out and "logged: " in out


def test_damage_in_any_part_of_a_portable_copy_is_found(
    portable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = portable / "pion.vstore.0"
    content = path.read_bytes()
    rows = noise(("saved_pk", 1, 0, 600), 600 * 128)
    places = {"manifest": 60, "rows": content.index(rows[:64]), "table": len(content) - 40}
    for part, at in places.items():
        flip(path, at)
        assert examine(portable) == 1, part
        assert capsys.readouterr().out.endswith("damaged\n")
        path.write_bytes(content)
    path.write_bytes(content[:-30])
    assert examine(portable) == 1
    assert "cut short" in capsys.readouterr().out


def test_a_last_record_that_was_changed_is_not_called_torn(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wal = folder / "pion.vstore.wal.0"
    flip(wal, wal.stat().st_size - 1)
    assert examine(folder) == 1
    out = capsys.readouterr().out
    assert "has its length and a wrong checksum" in out and "torn end" not in out
    assert "the last record of pion.vstore.wal.0 is cut off" in out


def test_a_torn_end_is_no_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wal = folder / "pion.vstore.wal.0"
    wal.write_bytes(wal.read_bytes()[:-3])
    assert examine(folder) == 0
    out = capsys.readouterr().out
    assert "torn end" in out and "may have been acknowledged" in out
    assert "any start would do this:\n  the torn end" in out


def test_a_newer_format_is_named_and_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from crc32c import crc32c

    path = folder / "pion.vstore.0"
    content = bytearray(path.read_bytes())
    content[8:12] = (99).to_bytes(4, "little")
    content[24:28] = crc32c(bytes(content[:24])).to_bytes(4, "little")
    path.write_bytes(content)
    assert examine(folder) == 1
    assert "format version 99" in capsys.readouterr().out


def test_a_folder_in_use_is_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(tmp_path / "served") as server:
        # its own files come and go meanwhile: only the answer counts
        assert cli.main(["doctor", "--dir", str(server.dir)]) == 1
        assert "in use by a server" in capsys.readouterr().err
    assert examine(server.dir) == 0


def test_no_server_starts_while_it_looks(folder: Path, tmp_path: Path) -> None:
    (folder / "pion.lock").touch()
    server = RunningServer(1, folder)
    with doctor.not_in_use(folder), pytest.raises(RuntimeError, match="in use"):
        server.start()


def test_what_is_no_store_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pion.txt").touch()
    assert examine(tmp_path) == 1
    assert "no files of a store" in capsys.readouterr().err
    assert cli.main(["doctor", "--dir", str(tmp_path / "absent")]) == 1


def test_where_there_are_several_workers_each_prefix_says_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for worker in range(2):
        with Driver(folder) as driver:
            store_all(driver, f"name{worker}")
        (folder / "pion.wal.0").touch()
        for path in list(folder.glob("pion.*.0")):
            path.rename(path.with_name(f"{path.name[:-1]}{1 - worker}"))
    # the first was renamed to 1; the second stays at 0
    assert examine(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("name0: " in line and line.endswith("not a hit") for line in lines)
    assert any("name0: " in line and "worker 1" in line for line in lines)
    assert any("name1: " in line and "worker 0" in line for line in lines)
    assert any("worker 1: " in line and " sessions" in line for line in lines)


@pytest.mark.parametrize("name", ["pion.wal.0", "pion.ssm.wal.0", "pion.vstore.wal.0"])
def test_a_log_that_is_missing_is_damage(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).unlink()
    assert examine(folder) == 1
    out = capsys.readouterr().out
    assert f"{name} is missing: what it held is lost" in out and out.endswith("damaged\n")


def test_without_any_log_it_is_not_known_what_came_after_the_save(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in folder.glob("pion.*wal.0"):
        path.unlink()
    assert examine(folder) == 0
    out = capsys.readouterr().out
    assert "not known:\n  what was stored since the last save" in out


def test_segments_that_nothing_can_name_any_more_are_damage_and_are_not_deleted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in folder.glob("pion.*.0"):
        if path.is_file():
            path.unlink()
    count = len(list((folder / "pion.segments.0").iterdir()))
    assert examine(folder) == 1
    out = capsys.readouterr().out
    assert f"{count} segment files that nothing names are there, and no log or snapshot" in out
    assert f"any start would do this:\n  {count} segment files that nothing names are set" in out


def test_a_log_that_is_missing_beside_empty_ones_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pion.vstore.wal.0", "pion.ssm.wal.0"):
        (tmp_path / name).touch()  # killed before it made the third, or that one was deleted
    assert examine(tmp_path) == 0
    assert "whether anything was stored: pion.wal.0 missing" in capsys.readouterr().out


def test_what_a_repair_has_set_aside_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder / "pion.vstore.0", 60)
    with Driver(folder, Options(salvage=True)):
        pass
    assert examine(folder) == 0
    assert "set aside by a repair, to delete or to keep: pion." in capsys.readouterr().out


#: root can read everything: it becomes a user who owns nothing, once all is imported
_AS_NOBODY = """
import os, sys
from pion_vllm_mlx import cli
from pion_vllm_mlx.tools import doctor
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(cli.main(["doctor", "--dir", sys.argv[1]]))
"""


@pytest.mark.parametrize("what", [".", "pion.lock", "pion.vstore.0", "pion.segments.0", "segment"])
def test_what_may_not_be_read_is_said_in_one_line(folder: Path, what: str) -> None:
    with tempfile.TemporaryDirectory(prefix="pion-test-") as name:
        Path(name).chmod(0o755)
        where = Path(name) / "data"
        shutil.copytree(folder, where)
        (where / "pion.lock").touch()
        for path in (where, *where.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        closed = next((where / "pion.segments.0").iterdir()) if what == "segment" else where / what
        closed.chmod(0)
        try:
            done = subprocess.run(
                [sys.executable, "-c", _AS_NOBODY, str(where)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            closed.chmod(0o755)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "it could not be checked: " in done.stderr and "Permission denied" in done.stderr


@pytest.mark.parametrize("tool", ["doctor", "stats", "explain"])
def test_a_host_without_mlx_has_the_tools_that_need_none(folder: Path, tool: str) -> None:
    without = (
        "import sys; sys.modules.update({'mlx': None, 'mlx.core': None, 'mlx_lm': None}); "
        "from pion_vllm_mlx import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    arguments = {
        "doctor": ["--dir", str(folder)],
        "stats": ["--url", "tcp://127.0.0.1:1"],
        "explain": ["name", "--url", "tcp://127.0.0.1:1"],
    }
    for words in (["--help"], arguments[tool]):
        done = subprocess.run(
            [sys.executable, "-c", without, tool, *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr and "mlx is missing" not in done.stderr, done.stderr
        assert done.returncode == (0 if tool == "doctor" or words == ["--help"] else 1)
