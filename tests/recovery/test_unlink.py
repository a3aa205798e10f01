"""Unlinking: never before the records that say so are durable, never a pause for others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.files import FileHandle
from pion_vllm_mlx.server.store.findings import Finding, Kind
from pion_vllm_mlx.server.store.index import InSegment
from pion_vllm_mlx.server.store.segment import Segment
from tests.recovery.broken import content_of
from tests.recovery.driving import Driver, Options
from tests.recovery.faults import failing
from tests.recovery.material import register, rows

COUNT, WIDE = 64, 1024


def prefix(driver: Driver, name: str) -> None:
    """A prefix whose rows lie in a segment."""
    driver.ask(*register(name, 2, WIDE))
    for layer in range(2):
        for side in ("_pk", "_pv"):
            driver.ask(*rows(name + side, layer, 0, COUNT, WIDE))


def names(driver: Driver) -> set[str]:
    return {path.name for path in driver.store.segments.path.iterdir()}


@contextmanager
def no_unlink() -> Iterator[None]:
    with mock.patch("os.unlink", side_effect=OSError(1, "operation not permitted")):
        yield


def mend(driver: Driver) -> None:
    driver.loop.run_until_complete(driver.server.mend())


def test_segments_that_were_flushed_go_after_the_records_that_say_so(folder: Path) -> None:
    """Else a power cut keeps the unlink and loses the record: rows that were durable are gone."""
    with Driver(folder) as driver:
        order: list[str] = []
        real_flush, real_unlink = driver.store.vstore_wal.flush, Segment.unlink

        def flush() -> None:
            order.append("flush")
            real_flush()

        def unlink(segment: Segment) -> None:
            order.append("unlink")
            real_unlink(segment)

        with (
            mock.patch.object(driver.store.vstore_wal, "flush", flush),
            mock.patch.object(Segment, "unlink", unlink),
        ):
            prefix(driver, "a")
            driver.ask("KV.PREFIX.DROP", "a")
            assert order == ["unlink"]  # nothing of it was ever durable
            prefix(driver, "a")
            driver.ask("KV.PREFIX.COMMIT")
            order.clear()
            driver.ask("KV.PREFIX.DROP", "a")
            assert order == ["flush", "unlink"]
            prefix(driver, "a")
            driver.ask("KV.PREFIX.MAP", "a")
            driver.ask("KV.PREFIX.COMMIT")
            order.clear()
            prefix(driver, "a")
            assert order == ["flush", "unlink"]


def test_a_disk_that_refuses_the_flush_keeps_the_file_until_it_does_not(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        driver.ask("KV.PREFIX.COMMIT")
        with failing(0, forever=True):
            with pytest.raises(CommandError):
                driver.ask(*rows("a_pk", 0, 0, 4, WIDE))  # the log refuses
        with mock.patch("os.fsync", side_effect=OSError(5, "input/output error")):
            driver.ask("KV.PREFIX.DROP", "a")
            assert len(names(driver)) == 1
        driver.loop.run_until_complete(driver.store.flush())
        assert names(driver) == set()
    assert content_of(folder) == {}


def test_a_start_flushes_what_it_acts_upon(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        prefix(driver, "b")
        driver.ask("KV.PREFIX.COMMIT")
        with mock.patch.object(Segment, "unlink"):
            driver.ask("KV.PREFIX.DROP", "a")
    flushed: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        flushed.append(os.fstat(fd).st_ino)
        real(fd)

    log = (folder / "pion.vstore.wal.0").stat().st_ino
    with mock.patch("os.fsync", fsync), Driver(folder) as driver:
        assert log in flushed
        assert len(names(driver)) == 1


def test_a_file_that_went_is_closed_by_a_thread_when_nobody_reads_it(folder: Path) -> None:
    """Closing it frees its blocks: with a large file that takes longer than a PING may wait."""
    with Driver(folder) as driver:
        prefix(driver, "a")
        place = driver.store.state.sessions[b"a_pk"].layers[0].extents[0].run.place
        assert isinstance(place, InSegment)
        reader = place.segment.file
        del place
        inode = os.fstat(reader.fd).st_ino
        driver.ask("KV.PREFIX.DROP", "a")
        retired = driver.store.segments.files.retired
        assert names(driver) == set() and not retired
        assert os.pread(reader.fd, 4, 1 << 16)
        fd = reader.fd
        del reader
        assert retired and os.fstat(fd).st_ino == inode
        driver.loop.run_until_complete(driver.store.close_retired())
        assert not retired
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_file_that_goes_while_a_thread_opens_it_is_kept_open_by_nobody_else(folder: Path) -> None:
    """Else its blocks stay taken until as many other files were used."""
    with Driver(folder) as driver:
        prefix(driver, "a")
        (segment,) = driver.store.segments.segments.values()
        files = driver.store.segments.files
        files.forget(segment.path)
        real, gone = files.add, []

        def add(handle: FileHandle) -> FileHandle:
            if not gone:
                gone.append(handle.path)
                driver.ask("KV.PREFIX.DROP", "a")
            return real(handle)

        with mock.patch.object(files, "add", add):
            reader = segment.file
        assert gone and names(driver) == set() and len(files) == 0
        assert os.pread(reader.fd, 4, 1 << 16)


def test_an_upload_that_breaks_off_in_an_emptied_segment_is_no_refusal_of_the_disk(
    folder: Path,
) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        driver.ask("KV.PREFIX.COMMIT")
        store = driver.store
        region = store.space.reserve(b"a", 4096, 1)
        assert len(names(driver)) == 1

        async def breaks_off() -> None:
            store.space.release(region)

        with (
            mock.patch.object(store.space, "excess", side_effect=[1, 1, 1, 0]),
            mock.patch.object(store, "close_retired", breaks_off),
        ):
            driver.loop.run_until_complete(store.make_room(1))
        assert names(driver) == set()


def test_a_disk_that_refuses_the_flush_of_an_eviction_costs_no_other_prefix(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "ab":
            prefix(driver, name)
        driver.ask("KV.PREFIX.COMMIT")
        with (
            mock.patch.object(driver.store.space, "excess", return_value=1),
            mock.patch("os.fsync", side_effect=OSError(5, "input/output error")),
            pytest.raises(CommandError, match="refused to flush the log"),
        ):
            driver.loop.run_until_complete(driver.store.make_room(1))
        assert driver.ask("KV.PREFIX.LOOKUP", "b") == "HIT"
        driver.loop.run_until_complete(driver.store.flush())
        assert len(names(driver)) == 1


def test_a_drop_whose_file_the_disk_keeps_is_a_drop_and_the_file_counts_until_it_goes(
    folder: Path,
) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        (segment,) = driver.store.segments.segments.values()
        used = driver.store.space.disk_bytes()
        offset = next(iter(driver.store.state.sessions[b"a_pk"].runs())).place.offset
        with no_unlink():
            assert driver.ask("KV.PREFIX.DROP", "a") == 1
            assert driver.ask("KV.PREFIX.LOOKUP", "a") == "MISS"
            mend(driver)
        assert names(driver) == {segment.path.name}
        assert driver.store.space.disk_bytes() == used
        assert os.pread(segment.file.fd, 4, offset) != bytes(4)
        prefix(driver, "a")  # under its name others are stored meanwhile
        kept = driver.content()
        mend(driver)
        assert segment.path.name not in names(driver) and len(names(driver)) == 1
        assert driver.store.space.disk_bytes() == used
        assert os.pread(segment.file.fd, 4, offset) != bytes(4), "who has it open reads on"
    assert content_of(folder) == kept


def test_where_the_disk_keeps_every_file_few_prefixes_leave_for_room(folder: Path) -> None:
    """Each that leaves frees nothing: one after the other all would."""
    count = 12
    with Driver(folder) as driver:
        for number in range(count):
            prefix(driver, f"n{number}")
        used = driver.store.space.used_bytes()
    with Driver(folder, Options(disk_budget=used + (64 << 10))) as driver:
        before = driver.store.space.disk_bytes()
        with no_unlink():
            for _ in range(10):
                with pytest.raises(CommandError, match="delete what left"):
                    driver.ask(*rows("n11_pk", 0, COUNT, COUNT, WIDE))
        held = [driver.ask("KV.PREFIX.LOOKUP", f"n{number}") for number in range(count)]
        assert held.count("MISS") == 4 and driver.store.space.disk_bytes() == before
        driver.ask(*rows("n11_pk", 0, COUNT, COUNT, WIDE))
        assert len(names(driver)) == count - 4 + 1
        expected = driver.content()
    assert content_of(folder) == expected


def test_an_orphan_that_cannot_be_deleted_costs_no_start_and_counts_until_it_goes(
    folder: Path,
) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        expected, used = driver.content(), driver.store.space.disk_bytes()
    orphan = folder / "pion.segments.0" / "orphan.safetensors"
    orphan.write_bytes(bytes(100_000))
    (folder / "pion.vstore.0.tmp").write_bytes(b"half a manifest")
    with no_unlink(), Driver(folder) as driver:
        assert Finding(Kind.UNDELETED, count=1) in driver.store.replayed.notes
        assert not [one for one in driver.store.replayed.notes if one.kind is Kind.ORPHANS]
        assert driver.content() == expected
        assert driver.store.space.disk_bytes() >= used + 100_000
    assert orphan.exists()
    with no_unlink():
        driver = Driver(folder)
    with driver:
        mend(driver)
        assert not orphan.exists() and driver.store.space.disk_bytes() == used
        driver.ask("KV.PREFIX.SAVE")
    assert content_of(folder) == expected


def test_orphans_that_cannot_be_deleted_keep_nobody_from_leaving_for_room(folder: Path) -> None:
    unlink = os.unlink

    def no_orphans(path: Path) -> None:
        if "orphan" in path.name:
            raise OSError(1, "operation not permitted")
        unlink(path)

    with Driver(folder) as driver:
        for number in range(6):
            prefix(driver, f"n{number}")
        used = driver.store.space.used_bytes()
    for number in range(6):
        (folder / "pion.segments.0" / f"orphan{number}.safetensors").write_bytes(b"x")
    options = Options(disk_budget=used + (64 << 10))
    with mock.patch("os.unlink", side_effect=no_orphans), Driver(folder, options) as driver:
        mend(driver)
        driver.ask(*rows("n5_pk", 0, COUNT, COUNT, WIDE))
        held = [driver.ask("KV.PREFIX.LOOKUP", f"n{number}") for number in range(6)]
        assert 0 < held.count("MISS") <= 2
        expected = driver.content()
    assert content_of(folder) == expected


def test_an_export_that_the_disk_keeps_fails_no_command_and_goes_later(folder: Path) -> None:
    with Driver(folder) as driver:
        prefix(driver, "a")
        driver.ask("V.EXPORT", "a_pk", "a_pv", 0, 8, 1, 2, WIDE // 2)
        with no_unlink():
            driver.ask("KV.PREFIX.DROP", "a")
        assert len(list((folder / "pion-export").iterdir())) == 1
        mend(driver)
        assert not list((folder / "pion-export").iterdir())
        assert names(driver) == set()
