"""The files that a release wrote are read by this version, and give the same answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_vllm_mlx.server.keyspace import recovery as keyspace
from pion_vllm_mlx.server.store import framing, records
from pion_vllm_mlx.tools import doctor
from tests.conftest import RunningServer, free_port_block
from tests.fixtures.make_release import (
    LONG_ROWS,
    MERGED_ROWS,
    OPEN_ROWS,
    ROW,
    STATE_BYTES,
    TWIN_BYTES,
    TWIN_ROWS,
    TWINS,
    answers,
    noise,
    twin_rows,
)
from tests.server.wire import Wire

RELEASES = sorted(path for path in (Path(__file__).parents[1] / "fixtures").glob("[0-9]*"))
SHARED = sorted(path for path in (Path(__file__).parents[1] / "fixtures").glob("shared-*"))


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def copied(release: Path, folder: Path) -> Path:
    """A data folder with the release's files; the portable copy stays out."""
    folder.mkdir(mode=0o700)
    for path in release.glob("pion.*"):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, folder / path.name)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    one = RunningServer(free_port_block(), tmp_path / "data")
    try:
        yield one
    finally:
        one.stop()


def has_more(release: Path) -> bool:
    """Whether the folder has what the first release had not."""
    return release.name != "0.1"


def test_a_release_is_there() -> None:
    assert [has_more(release) for release in RELEASES] == [False, True]


def test_every_answer_is_the_one_that_the_release_gave(
    release: Path, server: RunningServer
) -> None:
    copied(release, server.dir)
    expected = json.loads((release / "expected.json").read_text())
    more = has_more(release)
    server.start()
    assert "FATAL" not in server.output() and "damaged" not in server.output()
    with Wire.tcp(server.port) as wire:
        found = answers(wire, more)
        assert found == expected
        # and after this version has written the files in its own way
        wire.ok("KV.PREFIX.SAVE")
        wire.ok("SAVE")
    server.restart()
    # why a namespace went is remembered by the log alone, which a save truncates
    expected["explain gone"] = ["miss", "never registered here"]
    with Wire.tcp(server.port) as wire:
        assert answers(wire, more) == expected


def test_rows_and_states_are_the_bytes_that_were_sent(release: Path, server: RunningServer) -> None:
    copied(release, server.dir)
    server.start()
    with Wire.tcp(server.port) as wire:
        fetch = ("FMT", "STORED", "LAYOUT", "HND")
        sealed = wire.ask("V.FETCH", "spaced_pv", 0, "RANGE", 0, 6, *fetch)
        assert sealed == noise("spaced_pv", 96)
        tail = wire.ask("V.FETCH", "spaced_pk", 0, "RANGE", 6, 10, "FMT", "STORED")
        assert tail == noise("moved", 16) + bytes(32) + noise("after a gap", 16)
        in_log = wire.ask("V.FETCH", "chat_pk", 0, "RANGE", 6, 8, "FMT", "STORED")
        assert in_log == noise("more", 32)
        assert wire.ask("V.FETCH", "cut", 0, "RANGE", 0, 5) == noise("cut", 80)
        assert wire.ask("SSM.PREFIX.FETCH", "chat", 0) == noise("state", 100)
        assert wire.ask("SSM.PREFIX.FETCH", "chat", 65535) == noise("record", 200)


@pytest.mark.parametrize("saved", [False, True])
def test_what_the_first_release_had_not_is_the_bytes_that_were_sent(
    server: RunningServer, saved: bool
) -> None:
    (release,) = filter(has_more, RELEASES)
    copied(release, server.dir)
    server.start()
    with Wire.tcp(server.port) as wire:
        if saved:
            wire.ok("KV.PREFIX.SAVE")
        fetch = ("FMT", "STORED", "LAYOUT", "HND")
        long = wire.ask("V.FETCH", "long_pk", 0, "RANGE", 0, LONG_ROWS, *fetch)
        assert long == noise("long", LONG_ROWS * ROW)
        opened = wire.ask("V.FETCH", "long_pv", 0, "RANGE", 0, OPEN_ROWS, "FMT", "STORED")
        assert opened == noise("open", OPEN_ROWS * ROW)
        merged = wire.ask("V.FETCH", "merged_pk", 0, "RANGE", 0, MERGED_ROWS, "FMT", "STORED")
        assert merged == noise("merged", MERGED_ROWS * ROW)
        shown = noise("shown", 5 * ROW)[: 3 * ROW] + noise("shown in part", 6 * ROW)[: 2 * ROW]
        assert wire.ask("V.FETCH", "shown", 0, "RANGE", 0, 5) == shown
        assert wire.ask("SSM.PREFIX.FETCH", "long", 0) == noise("long state", STATE_BYTES)
        assert wire.ask("SSM.PREFIX.FETCH", "long", 1) == noise("open state", STATE_BYTES)


def test_the_portable_copy_of_the_release_is_unpacked(release: Path, server: RunningServer) -> None:
    server.dir.mkdir(mode=0o700)
    shutil.copyfile(release / "portable", server.dir / "pion.vstore.0")
    server.start()
    with Wire.tcp(server.port) as wire:
        fetch = ("FMT", "STORED", "LAYOUT", "HND")
        rows = wire.ask("V.FETCH", "chat_pk", 0, "RANGE", 0, 6, *fetch)
        assert rows == noise("chat_pk", 96)
        assert wire.ask("SSM.PREFIX.FETCH", "chat", 0) == noise("state", 100)
        assert wire.ask("KV.PREFIX.LOOKUP", "gone") == "HIT"  # dropped after that save


def test_the_files_hold_every_kind_of_record(release: Path) -> None:
    """Else the release would prove less than it says."""
    found: set[tuple[str, int]] = set()
    for name, magic in (
        ("pion.vstore.0", framing.VSTORE_SNAPSHOT),
        ("pion.vstore.wal.0", framing.VSTORE_WAL),
        ("pion.ssm.0", framing.SSM_SNAPSHOT),
        ("pion.ssm.wal.0", framing.SSM_WAL),
        ("pion.snapshot.0", keyspace.SNAPSHOT_MAGIC),
        ("pion.wal.0", keyspace.WAL_MAGIC),
    ):
        scan = framing.scan(memoryview((release / name).read_bytes()), magic, name)
        assert scan.frames and not scan.torn_bytes and scan.damage is None, name
        found |= {(name.split(".")[1], frame.op) for frame in scan.frames}
    kinds = (records.Create, records.Rows, records.Drop, records.Seal, records.Truncate)
    kinds += (records.Blocks, records.Pin, records.Expire)
    assert {op for log, op in found if log == "vstore"} >= {kind.op for kind in kinds}
    states = {records.StoreState.op, records.DropStates.op}
    assert {op for log, op in found if log == "ssm"} >= states


def test_the_doctor_finds_the_release_sound(release: Path, tmp_path: Path) -> None:
    report = doctor.check(copied(release, tmp_path / "data"), quick=False)
    assert report.damage == [] and report.repairs == []
    more = {"long", "merged"} if has_more(release) else set()
    assert {prefix.namespace for prefix in report.prefixes} == {"chat", "spaced"} | more


@pytest.mark.parametrize("folder", SHARED, ids=lambda path: path.name)
def test_rows_that_two_prefixes_of_a_release_share_are_both_of_theirs(
    folder: Path, server: RunningServer
) -> None:
    log = framing.scan(
        memoryview((folder / "pion.vstore.wal.0").read_bytes()), framing.VSTORE_WAL, "log"
    )
    parsed = [records.parse(frame.op, frame.payload)[0] for frame in log.frames]
    moves = [
        (one.segment, at)
        for one in parsed
        if isinstance(one, records.Seal)
        for _, at, _ in one.moves
    ]
    copied_rows = [one for one in parsed if isinstance(one, records.Rows) and one.copied]
    assert len(copied_rows) == 2
    assert {(one.segment, one.offset) for one in copied_rows} <= set(moves), "a place of the other"
    report = doctor.check(copied(folder, server.dir), quick=False)
    assert report.damage == [] and report.repairs == []
    server.start()
    with Wire.tcp(server.port) as wire:
        for _ in range(2):
            for ns in TWINS:
                for side in ("_pk", "_pv"):
                    words = ("V.FETCH", ns + side, 0, "RANGE", 0, TWIN_ROWS, "FMT", "STORED")
                    assert wire.ask(*words) == twin_rows(side)[0]
            wire.ok("KV.PREFIX.SAVE")  # and as this version writes them
        assert int(wire.info("KV.PREFIX.INFO")["vstore_disk_bytes"]) < 4 * TWIN_BYTES
        assert wire.ask("KV.PREFIX.DROP", TWINS[0]) == 1
        assert (
            wire.ask("V.FETCH", TWINS[1] + "_pv", 0, "RANGE", 0, TWIN_ROWS, "FMT", "STORED")
            == (twin_rows("_pv")[0])
        )


def test_a_folder_with_shared_rows_is_there() -> None:
    assert SHARED
