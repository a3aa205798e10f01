"""A data folder belongs to one server, and only its own files are written to."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pion_vllm_mlx import cli
from pion_vllm_mlx.config import DIRECTORY_NAME, EXIT_FOLDER_BUSY, LOCK_NAME, STATUS_NAME
from pion_vllm_mlx.errors import DataFolderBusy
from pion_vllm_mlx.server.folder import DataFolder
from pion_vllm_mlx.server.main import main
from pion_vllm_mlx.server.store.files import FileHandle, NotRegular
from tests.conftest import RunningServer, free_port_block
from tests.hostile.watching import eventually
from tests.server.wire import Refusal, Wire
from tests.small_disk import fill, small_disk

START = [sys.executable, "-m", "pion_vllm_mlx", "server", "--kvcache"]
SERVE = ("--kvcache", "-p", "0")


def is_taken(folder: Path) -> bool:
    try:
        DataFolder(folder).close()
    except DataFolderBusy:
        return True
    return False


def test_a_folder_without_its_lock_file_still_is_taken(
    pion_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (pion_server.dir / LOCK_NAME).unlink()
    assert main([*SERVE, "--dir", str(pion_server.dir)]) == EXIT_FOLDER_BUSY
    assert f"process {pion_server.pid}" in capsys.readouterr().err
    assert cli.main(["doctor", "--dir", str(pion_server.dir)]) != 0
    assert "in use" in capsys.readouterr().err


def test_a_folder_without_its_lock_file_is_taken_as_long_as_a_worker_lives(tmp_path: Path) -> None:
    server = RunningServer(free_port_block(8), tmp_path / "data", ("-w", "2"))
    try:
        server.start("--independent-workers")
        assert (server.dir / STATUS_NAME).exists(), "whoever is answered finds it"
        with Wire.tcp(server.port) as wire:
            wire.ok("SET", "a", "1")
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        if not children.exists():
            pytest.skip("the system does not name a process's children")
        worker = int(children.read_text().split()[0])
        os.kill(worker, signal.SIGSTOP)
        try:
            (server.dir / LOCK_NAME).unlink()
            server.kill()
            (server.dir / STATUS_NAME).unlink()  # nobody waits for an owner that is unknown
            assert is_taken(server.dir)
        finally:
            os.kill(worker, signal.SIGKILL)
        eventually(lambda: not is_taken(server.dir))
    finally:
        server.stop()


def test_what_is_no_folder_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.touch()
    assert main([*SERVE, "--dir", str(path)]) == 1
    assert f"the data folder {path} is not a folder" in capsys.readouterr().err
    assert main([*SERVE, "--dir", str(path / "below")]) == 1
    err = capsys.readouterr().err
    assert f"FATAL {path / 'below'}: Not a directory" in err


NAMES = ("pion.wal.0", "pion.snapshot.0", "pion.vstore.0", "pion.vstore.wal.0")
NAMES += ("pion.ssm.0", "pion.ssm.wal.0")


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def dangling(path: Path, target: Path) -> None:
    path.symlink_to(target.with_name("nowhere"))


def pipe(path: Path, target: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "place"),
    [*((name, link) for name in NAMES), ("pion.wal.0", dangling), ("pion.ssm.0", pipe)],
)
def test_a_link_or_pipe_in_a_files_place_is_refused_and_what_it_names_left_alone(
    tmp_path: Path,
    name: str,
    place: Callable[[Path, Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, target = tmp_path / "data", tmp_path / "target"
    folder.mkdir()
    target.write_bytes(b"PIONKW01 and what somebody else keeps")
    before = target.read_bytes()
    place(folder / name, target)
    command = [*START, "-p", str(free_port_block()), "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert f"{name} is not a regular file" in done.stderr
    assert cli.main(["doctor", "--dir", str(folder)]) == 1
    assert f"{name} is not a regular file" in capsys.readouterr().out
    server = RunningServer(free_port_block(), folder)
    try:
        server.start("--repair")
        with Wire.tcp(server.port) as wire:
            wire.ok("SET", "a", "1")
            wire.ok("SAVE")
            wire.ok("SSM.PREFIX.STORE", "n", 0, b"state")
            wire.ok("KV.PREFIX.SAVE")
        server.restart()
        with Wire.tcp(server.port) as wire:
            assert wire.ask("GET", "a") == b"1"
    finally:
        server.stop()
    assert target.read_bytes() == before
    assert not target.with_name("nowhere").exists()
    assert len([p for p in os.listdir(folder) if p.startswith(f"{name}.damaged-")]) == 1


def test_a_snapshot_that_is_a_link_costs_no_record_of_the_log(tmp_path: Path) -> None:
    server = RunningServer(free_port_block(), tmp_path / "data")
    try:
        server.start()
        with Wire.tcp(server.port) as wire:
            wire.ok("SET", "old", "1")
            wire.ok("SAVE")
            wire.ok("SET", "new", "2")
        server.kill()
        snapshot = server.dir / "pion.snapshot.0"
        snapshot.rename(tmp_path / "elsewhere")
        snapshot.symlink_to(tmp_path / "elsewhere")
        server.start("--repair")
        with Wire.tcp(server.port) as wire:
            assert wire.ask("GET", "old") is None
            assert wire.ask("GET", "new") == b"2"
    finally:
        server.stop()


def test_a_segment_that_is_a_link_is_neither_read_nor_written(tmp_path: Path) -> None:
    server = RunningServer(free_port_block(), tmp_path / "data")
    try:
        server.start()
        with Wire.tcp(server.port) as wire:
            wire.ok("KV.PREFIX.REGISTER", "n", 64, "fp16")
            for side in ("n_pk", "n_pv"):
                wire.ok("V.STOREBATCH", side, 0, 0, 1000, bytes(128_000), "FMT", "F16")
        server.kill()
        (segment,) = (server.dir / "pion.segments.0").iterdir()
        target = tmp_path / "elsewhere"
        segment.rename(target)
        before = target.read_bytes()
        segment.symlink_to(target)
        server.start()
        with Wire.tcp(server.port) as wire:
            wire.ask("V.FETCH", "n_pk", 0, "RANGE", 0, 1000, "FMT", "NATIVE")
            wire.ok("KV.PREFIX.SAVE")
            assert wire.ask("KV.PREFIX.LOOKUP", "n") == "MISS"
    finally:
        server.stop()
    assert target.read_bytes() == before


def folder_of_somebody(path: Path, target: Path) -> None:
    path.mkdir()
    (path / "note").write_text("somebody's")


@pytest.mark.parametrize("place", [folder_of_somebody, dangling, pipe])
@pytest.mark.parametrize("flags", [(), ("--repair",)])
def test_what_is_no_file_in_a_segments_place_costs_its_prefix_and_no_start(
    tmp_path: Path,
    place: Callable[[Path, Path], None],
    flags: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = RunningServer(free_port_block(), tmp_path / "data")
    try:
        server.start()
        with Wire.tcp(server.port) as wire:
            for name in ("gone", "whole"):
                wire.ok("KV.PREFIX.REGISTER", name, 64, "fp16")
                for side in ("pk", "pv"):
                    rows = bytes(128_000)
                    wire.ok("V.STOREBATCH", f"{name}_{side}", 0, 0, 1000, rows, "FMT", "F16")
                wire.ok("KV.PREFIX.SAVE")
        server.kill()
        segments = server.dir / "pion.segments.0"
        first = min(segments.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        first.unlink()
        place(first, tmp_path / "target")
        place(segments / "another", tmp_path / "target")
        assert cli.main(["doctor", "--dir", str(server.dir)]) == 1
        assert ": rows or states are missing on disk" in capsys.readouterr().out
        for _ in range(2):
            server.start(*flags)
            with Wire.tcp(server.port) as wire:
                assert wire.ask("KV.PREFIX.LOOKUP", "gone") == "MISS"
                assert wire.ask("KV.PREFIX.LOOKUP", "whole") == "HIT"
                assert len(wire.ask("V.FETCH", "whole_pk", 0, "RANGE", 0, 1000)) == 256_000
            server.kill()
    finally:
        server.stop()
    if place is folder_of_somebody:
        kept = list(server.dir.glob("pion.segments.0*/*/note"))
        assert len(kept) == 2


def test_no_file_of_ours_is_opened_through_a_link_or_waits_for_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        for name in ("link", "pipe", "folder"):
            with pytest.raises(NotRegular, match="not a regular file"):
                FileHandle(tmp_path / name, flags)
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_server_killed_on_a_full_disk_starts_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 8 << 20) as disk:
        server = RunningServer(free_port_block(), disk)
        server.log = tmp_path / "server.log"
        try:
            server.start()
            with Wire.tcp(server.port) as wire:
                wire.ok("SET", "a", os.urandom(1000))
                fill(disk / "filler")
                refused = wire.ask("SET", "b", os.urandom(1 << 20))
                assert "No space left" in str(refused)
                failed = str(wire.ask("SAVE"))
                assert failed.startswith("ERR SAVE failed: No space left on device; what was ")
                assert "make room on the disk" in failed
            assert server.output().count("the disk refuses, pion.wal.0: No space left") == 1
            assert server.output().count("the disk refuses, SAVE: No space left") == 1
            server.kill()
            (disk / STATUS_NAME).unlink()
            fill(disk / "filler 2")
            server.start()
            with Wire.tcp(server.port) as wire:
                assert len(wire.ask("GET", "a")) == 1000
            assert f"{STATUS_NAME} could not be written: No space left" in server.output()
            assert not list(disk.glob("*.tmp"))
        finally:
            server.stop()


def refused(wire: Wire, *words: bytes | str | int) -> None:
    answer, pong = wire.together(words, ("PING",))
    assert isinstance(answer, Refusal) and "No space left" in answer, (words[0], answer)
    assert pong == "PONG"


def refuse_writes(server: RunningServer, worker: int) -> None:
    with Wire.tcp(server.port + 2 + worker) as wire:
        refused(wire, "SET", "b", bytes(1 << 20))
        refused(wire, "SSM.PREFIX.STORE", f"n{worker}", 1, bytes(1 << 20))
        refused(wire, "V.STOREBATCH", f"n{worker}_pk", 1, 0, 8192, bytes(1 << 20), "FMT", "F16")


def serve_what_is_there(server: RunningServer, rows: list[bytes]) -> None:
    for worker in range(len(rows)):
        with Wire.tcp(server.port + 2 + worker) as wire:
            assert wire.ask("GET", "a") == b"%d" % worker
            for owner in range(len(rows)):
                assert wire.ask("KV.PREFIX.LOOKUP", f"n{owner}") == "HIT"
                assert wire.ask("KV.PREFIX.OWNER", f"n{owner}") == str(owner)
            fetch = ("V.FETCH", f"n{worker}_pk", 0, "RANGE", 0, 100, "FMT", "NATIVE")
            assert wire.ask(*fetch) == rows[worker]


def test_workers_killed_on_a_full_disk_start_again_and_serve(tmp_path: Path) -> None:
    rows = [os.urandom(100 * 128) for _ in range(3)]
    with small_disk(tmp_path / "small", 24 << 20) as disk:
        server = RunningServer(free_port_block(8), disk, ("-w", "3", "--independent-workers"))
        server.log = tmp_path / "server.log"
        try:
            server.start()
            for worker, blob in enumerate(rows):
                with Wire.tcp(server.port + 2 + worker) as wire:
                    wire.ok("SET", "a", str(worker))
                    wire.ok("KV.PREFIX.REGISTER", f"n{worker}", 64, "fp16")
                    wire.ok("V.STOREBATCH", f"n{worker}_pk", 0, 0, 100, blob, "FMT", "F16")
                    for number in range(100):  # so that who holds what takes room
                        name = f"{'long' * 50}{worker}.{number}"
                        wire.ok("KV.PREFIX.REGISTER", name, 64, "fp16")
            fill(disk / "filler")
            for worker in range(3):
                refuse_writes(server, worker)
            kill_all(server)
            for name in (STATUS_NAME, DIRECTORY_NAME):
                (disk / name).unlink(missing_ok=True)
            fill(disk / "filler 2")
            server.start()
            serve_what_is_there(server, rows)
            for worker in range(3):
                refuse_writes(server, worker)
            with Wire.tcp(server.port + 3) as wire:
                os.kill(int(wire.info("INFO", "server")["worker_process_id"]), signal.SIGKILL)
            serve_what_is_there(server, rows)  # who asks waits until the worker is back
            assert server.output().count("started again") == 1
            assert "FATAL" not in server.output()
            for filler in disk.glob("filler*"):
                filler.unlink()
            with Wire.tcp(server.port + 2) as wire, Wire.tcp(server.port + 3) as other:
                wire.ok("KV.PREFIX.REGISTER", "new", 64, "fp16")
                assert other.ask("KV.PREFIX.OWNER", "new") == "0"
                assert other.ask("KV.PREFIX.DROP", "n1") == 1
                assert wire.ask("KV.PREFIX.LOOKUP", "n1") == "MISS"
        finally:
            server.stop()


def until_its_log_is_full(wire: Wire, name: str) -> None:
    """No record as short as this one fits any more."""
    for words in itertools.cycle((("KV.PREFIX.PIN", name), ("KV.PREFIX.UNPIN", name))):
        answer = wire.ask(*words)
        if isinstance(answer, Refusal):
            assert "No space left" in answer
            return


def test_of_a_prefix_on_two_workers_one_is_refused_where_the_disk_takes_no_drop(
    tmp_path: Path,
) -> None:
    three = ("-w", "3", "--independent-workers")
    with small_disk(tmp_path / "small", 24 << 20) as disk:
        server = RunningServer(free_port_block(8), disk)
        server.log = tmp_path / "server.log"
        try:
            for flags, port in ((three, server.port + 3), ((), server.port + 2)):
                server.start(*flags)
                with Wire.tcp(port) as wire:
                    wire.ok("KV.PREFIX.REGISTER", "twice", 64, "fp16")
                    fill(disk / "filler")
                    until_its_log_is_full(wire, "twice")
                server.kill()
                (disk / "filler").unlink()
            fill(disk / "filler")
            server.start(*three)
            assert "not dropped here now: the log could not be written" in server.output()
            with Wire.tcp(server.port + 4) as wire:
                owner = int(wire.ask("KV.PREFIX.OWNER", "twice"))
            for worker in range(2):
                with Wire.tcp(server.port + 2 + worker) as wire:
                    answer = wire.ask("V.INFO", "twice_pk")
                assert isinstance(answer, bytes if worker == owner else Refusal), answer
        finally:
            server.stop()


def kill_all(server: RunningServer) -> None:
    """SIGKILL for the launcher and every worker, and wait until none of them is left."""
    pids = []
    for worker in range(3):
        with Wire.tcp(server.port + 2 + worker) as wire:
            pids.append(int(wire.info("INFO", "server")["worker_process_id"]))
    server.kill()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it follows its launcher
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda pid=pid: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_that_are_fewer_say_so_and_count_the_files_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = RunningServer(free_port_block(8), tmp_path / "data")
    try:
        server.start("-w", "3", "--independent-workers")
        for worker in range(3):
            with Wire.tcp(server.port + 2 + worker) as wire:
                wire.ok("KV.PREFIX.REGISTER", f"n{worker}", 64, "fp16")
                wire.ok(
                    "V.STOREBATCH", f"n{worker}_pk", 0, 0, 8000, os.urandom(1_024_000), "FMT", "F16"
                )
        server.stop()
        server.start("--disk-budget", str(64 << 20))
        assert "files of worker 1, 2, not running now" in server.output()
        assert "-w 3 --independent-workers" in server.output()
        with Wire.tcp(server.port) as wire:
            used = int(wire.info("INFO", "persistence")["disk_used_bytes"])
        on_disk = sum(p.lstat().st_blocks * 512 for p in server.dir.rglob("*"))
        assert abs(used - on_disk) < 100_000
        explain = ("explain", "n2", "--url", f"tcp://127.0.0.1:{server.port}")
        assert cli.main(explain) == 1
        told = capsys.readouterr().out
        assert "worker 1, 2, not running now, may hold it" in told
        assert "-w 3 --independent-workers" in told
        said = server.output().count("not running now")
        server.stop()
        server.start("-w", "3", "--independent-workers")
        assert server.output().count("not running now") == said
        assert cli.main(explain) == 1
        assert "not running" not in capsys.readouterr().out
    finally:
        server.stop()
