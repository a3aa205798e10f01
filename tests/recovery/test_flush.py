"""What is flushed when, formats of later versions, and numbers that are kept."""

from __future__ import annotations

import errno
import os
import struct
import threading
from pathlib import Path
from unittest import mock

import pytest
from crc32c import crc32c

from pion_vllm_mlx.errors import CommandError, DamagedData, NewerFormat
from pion_vllm_mlx.server.store import framing
from tests.conftest import RunningServer
from tests.recovery.broken import SSM_WAL, VSTORE_WAL
from tests.recovery.driving import Driver, Options, refused
from tests.recovery.faults import counting
from tests.recovery.material import register, rows, state, store_all
from tests.server.wire import Wire


def _names(driver: Driver, *words: object) -> list[str]:
    """The files that are flushed while a command runs."""
    seen: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real(fd)

    with mock.patch.object(os, "fsync", fsync):
        driver.ask(*words)  # type: ignore[arg-type]
    return seen


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@needs_proc
def test_always_flushes_rows_before_their_record_before_the_reply(folder: Path) -> None:
    with Driver(folder, Options(appendfsync="always")) as driver:
        assert _names(driver, *register("a")) == [VSTORE_WAL]
        assert _names(driver, *rows("a_pk", 0, 0, 3)) == [VSTORE_WAL]
        first, *_, last = _names(driver, *rows("a_pk", 0, 3, 700))
        assert first.endswith(".safetensors") and last == VSTORE_WAL
        assert _names(driver, *state("a", 0, 30)) == [SSM_WAL]


@needs_proc
@pytest.mark.parametrize("policy", ["everysec", "no"])
def test_otherwise_a_command_flushes_nothing_and_commit_all_that_is_due(
    folder: Path, policy: str
) -> None:
    with Driver(folder, Options(appendfsync=policy)) as driver:
        driver.ask(*register("a"))
        assert _names(driver, *rows("a_pk", 0, 3, 700)) == []
        assert driver.store.flush_soon()
        first, *_, last = _names(driver, "KV.PREFIX.COMMIT")
        assert first.endswith(".safetensors") and last == VSTORE_WAL
        assert not driver.store.flush_soon()
        assert _names(driver, "KV.PREFIX.COMMIT") == []
        driver.ask(*state("a", 0, 30))
        assert _names(driver, "KV.PREFIX.COMMIT") == [SSM_WAL]


@pytest.mark.parametrize("what", ["log", "segments"])
def test_who_flushes_waits_for_a_flush_that_has_begun(folder: Path, what: str) -> None:
    """Else a reply, or an unlink, comes before what it relies on is on stable storage."""
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 700))
        store = driver.store
        flush = store.vstore_wal.flush if what == "log" else store.segments.flush
        begun, go_on, real = threading.Event(), threading.Event(), os.fsync

        def fsync(fd: int) -> None:
            begun.set()
            assert go_on.wait(60)
            real(fd)

        with mock.patch.object(os, "fsync", fsync):
            other = threading.Thread(target=flush)
            other.start()
            assert begun.wait(60)
            mine = threading.Thread(target=flush)
            mine.start()
            mine.join(0.2)
            waits = mine.is_alive()
            go_on.set()
            other.join()
            mine.join()
        assert waits


def test_a_failed_flush_is_said_and_stays_due(folder: Path) -> None:
    with Driver(folder, Options(appendfsync="always")) as driver:
        store_all(driver, "a")
        error = OSError(errno.EIO, "input/output error")
        with mock.patch.object(os, "fsync", side_effect=error):
            assert "flushed" in refused(driver, *rows("a_pk", 0, 0, 700))
            assert driver.store.flush_soon()
            assert "COMMIT failed" in refused(driver, "KV.PREFIX.COMMIT")
            assert driver.store.flush_soon()
        driver.ask("KV.PREFIX.COMMIT")
        assert not driver.store.flush_soon()


@needs_proc
def test_a_sealed_header_is_flushed_before_the_manifest_that_names_it(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 700))
        driver.ask("KV.PREFIX.COMMIT")
        names = _names(driver, "KV.PREFIX.SAVE")
        (segment,) = {n for n in names if n.endswith(".safetensors")}
        assert names.index(segment) < names.index("pion.vstore.0.tmp")
        assert names.index("pion.vstore.0.tmp") < names.index("pion.ssm.0.tmp")


def test_a_server_takes_each_flush_policy_and_no_other(pion_server: RunningServer) -> None:
    with Wire.tcp(pion_server.port) as wire:
        wire.ok(*register("a"))
        wire.ok("KV.PREFIX.COMMIT")
    for policy in ("always", "everysec", "no"):
        pion_server.restart("--appendfsync", policy)
        with Wire.tcp(pion_server.port) as wire:
            assert wire.ask("KV.PREFIX.LOOKUP", "a") == "HIT"
            wire.ok(*rows("a_pk", 0, 3, 700))
    pion_server.kill()
    with pytest.raises(RuntimeError, match="appendfsync"):
        pion_server.start("--appendfsync", "sometimes")


def _newer(path: Path) -> None:
    """Give a file the header of the next format version."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, framing.VERSION + 1)
    struct.pack_into("<I", data, 24, crc32c(bytes(data[:24])))
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["pion.vstore.0", "pion.ssm.0", VSTORE_WAL, SSM_WAL])
@pytest.mark.parametrize("salvage", [False, True])
def test_a_file_of_a_newer_version_is_refused_by_name_and_left_alone(
    folder: Path, name: str, salvage: bool
) -> None:
    with Driver(folder) as driver:
        store_all(driver, "a")
        driver.ask("KV.PREFIX.SAVE")
        driver.ask(*rows("a_pk", 0, 40, 3))
        driver.ask(*state("a", 3, 30))
    _newer(folder / name)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(NewerFormat, match=f"{name} has format version 2"):
        Driver(folder, Options(salvage=salvage))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_record_this_version_cannot_read_is_refused_by_file_and_offset(folder: Path) -> None:
    with Driver(folder) as driver:
        store_all(driver, "a")
        whole = driver.content()
        lsn, size = driver.store.vstore_wal.next_lsn, driver.store.vstore_wal.size
    with (folder / VSTORE_WAL).open("ab") as file:
        file.write(framing.frame(lsn, 77, b"from the future"))
        file.write(framing.frame(lsn + 1, 1, b"no JSON"))
    with pytest.raises(DamagedData, match=rf"{VSTORE_WAL} at {size}: unknown operation 77"):
        Driver(folder)
    with Driver(folder, Options(salvage=True)) as driver:
        assert driver.content() == whole


def test_a_log_that_starts_too_late_is_refused_by_name(folder: Path) -> None:
    with Driver(folder) as driver:
        store_all(driver, "a")
        driver.ask("KV.PREFIX.SAVE")
        driver.ask(*rows("a_pk", 0, 40, 3))
    (folder / "pion.vstore.0").unlink()
    with pytest.raises(DamagedData, match=f"{VSTORE_WAL} at 32: records 1 to .* are missing"):
        Driver(folder)


def test_the_server_refuses_a_damaged_log_by_name_and_repairs_it_when_asked(
    pion_server: RunningServer,
) -> None:
    with Wire.tcp(pion_server.port) as wire:
        wire.ok(*register("a"))
        for start in (0, 3, 6):
            wire.ok(*rows("a_pk", 0, start, 3))
    pion_server.kill()
    path = pion_server.dir / VSTORE_WAL
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(RuntimeError, match=rf"FATAL {VSTORE_WAL} at \d+: record \d+ is invalid"):
        pion_server.start()
    pion_server.start("--repair")
    with Wire.tcp(pion_server.port) as wire:
        assert wire.ask("KV.PREFIX.LOOKUP", "a") == "HIT"
        assert list(pion_server.dir.glob(f"{VSTORE_WAL}.damaged-*"))
        assert path.stat().st_size == 0


def test_a_long_torn_end_of_zeros_is_cut_off(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        expected = driver.content()
    with (folder / VSTORE_WAL).open("ab") as file:
        file.write(bytes(3 << 20))
    with counting("ftruncate") as cut, Driver(folder) as driver:
        assert driver.content() == expected and len(cut) == 1


def test_an_unknown_layer_is_refused_before_anything_is_logged(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        size = driver.store.vstore_wal.size
        with pytest.raises(CommandError):
            driver.ask(*rows("a_pk", 5000, 0, 3))
        assert driver.store.vstore_wal.size == size
