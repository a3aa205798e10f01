"""One byte of any file turned over: refused by name, or missed and counted; never wrong data."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from unittest import mock

import pytest

from pion_vllm_mlx.errors import DamagedData, NewerFormat
from pion_vllm_mlx.server.store import riding
from tests.recovery.broken import (
    SALVAGE,
    SSM_WAL,
    VSTORE_WAL,
    Copies,
    boundaries,
    content_of,
    damaged_files,
)
from tests.recovery.driving import Content, Driver
from tests.recovery.every_record import dense, everything, everything_of, fill
from tests.recovery.material import (
    COMPLETION_LAYER,
    agrees,
    register,
    rows,
    sealed_tensors,
    state,
)

WIDTH = 8
MANIFEST, SSM_SNAPSHOT = "pion.vstore.0", "pion.ssm.0"
#: bytes of a header that mean nothing
SPARE = range(28, 32)


def _fill(folder: Path, *after: str) -> Content:
    with Driver(folder) as driver:
        driver.ask(*register("n", 1, WIDTH))
        driver.ask(*rows("n_pk", 0, 0, 2, WIDTH))
        driver.ask(*rows("n_pv", 0, 0, 2, WIDTH))
        driver.ask(*state("n", 0, 20))
        driver.ask(*state("n", 0, 20, salt=1))
        driver.ask(*state("n", COMPLETION_LAYER, 20))
        if after:
            driver.ask(*after)
        return driver.content()


@pytest.mark.parametrize("log", [VSTORE_WAL, SSM_WAL])
def test_a_flipped_log_is_refused_by_file_and_offset_or_holds_what_came_before(
    folder: Path, log: str
) -> None:
    whole = fill(folder)
    copies = Copies(folder)
    ends = boundaries(folder / log)
    before = [everything_of(copies.cut(log, size)) for size in ends]
    assert before[-1] == whole
    last_record = ends[-2]
    refused = []
    for position in range((folder / log).stat().st_size):
        flipped = copies.flipped(log, position)
        bytes_before = (flipped / log).read_bytes()
        try:
            content = everything_of(flipped)
        except DamagedData as error:
            assert re.match(rf"{re.escape(log)} at \d+: ", str(error)), (position, error)
            assert (flipped / log).read_bytes() == bytes_before, "a refused start changes nothing"
            refused.append(position)
            content = everything_of(flipped, SALVAGE)
            (aside,) = (path for path in damaged_files(flipped) if path.is_file())
            assert aside.read_bytes() == bytes_before
        assert content in before, position
        assert (content == whole) == (position in SPARE), position
        assert everything_of(copies.folder) == content, "after a salvage the folder is sound"
    # damage of the last record cannot be told from a torn end
    assert refused == [n for n in range(last_record) if n not in SPARE]


def test_short_runs_that_a_salvage_kept_are_sealed_like_any_others(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask("SSM.PREFIX.STORE", "x", 0, b"y")
        for name in "mn":
            driver.ask(*register(name, 1, WIDTH))
        for name in ("n_pk", "m_pv", "m_pk", "n_pv"):
            driver.ask(*rows(name, 0, 0, 3, WIDTH))
        driver.ask("KV.PREFIX.DROP", "m")
        driver.ask(*rows("n_pv", 0, 1, 3, WIDTH))
        expected = driver.content()
        for start in (3, 6):
            driver.ask(*rows("n_pk", 0, start, 3, WIDTH))
    *_, last, _ = boundaries(folder / VSTORE_WAL)
    path = Copies(folder).flipped(VSTORE_WAL, last - 1)
    with Driver(path, SALVAGE) as driver:
        assert driver.content() == expected
        for start in (20, 30):
            driver.ask(*rows("n_pk", 0, start, 3, WIDTH))
            extended = driver.content()
            assert agrees(driver, "n") >= 4
    with Driver(path) as driver:
        assert driver.content() == extended
        assert agrees(driver, "n") >= 5


@pytest.mark.parametrize("name", [MANIFEST, SSM_SNAPSHOT])
def test_a_flipped_snapshot_is_refused_by_file_and_offset_or_set_aside(
    folder: Path, name: str
) -> None:
    """What is kept of it then is told by test_salvage."""
    fill(folder)
    with Driver(folder) as driver:
        driver.ask("KV.PREFIX.SAVE")
        whole = everything(driver)
    other = {
        key: value for key, value in whole.items() if (key[0] == "state") == (name == MANIFEST)
    }
    copies = Copies(folder)
    harmless = []
    for position in range((folder / name).stat().st_size):
        flipped = copies.flipped(name, position)
        try:
            content = everything_of(flipped)
        except DamagedData as error:
            assert re.match(rf"{re.escape(name)} at \d+: ", str(error)), (position, error)
            content = everything_of(flipped, SALVAGE)
            assert other.items() <= content.items() <= whole.items(), position
            (aside,) = (path for path in damaged_files(flipped) if path.is_file())
            assert aside.name.startswith(f"{name}.damaged-")
        else:
            assert content == whole
            harmless.append(position)
    assert harmless == list(SPARE)


@pytest.mark.parametrize("name", [MANIFEST, SSM_SNAPSHOT])
@pytest.mark.parametrize("more", [b"x", bytes(5000)])
def test_a_snapshot_with_bytes_behind_its_end_is_refused(
    folder: Path, name: str, more: bytes
) -> None:
    _fill(folder, "KV.PREFIX.SAVE")
    size = (folder / name).stat().st_size
    with (folder / name).open("ab") as file:
        file.write(more)
    with pytest.raises(DamagedData, match=rf"{name} at {size}: "):
        Driver(folder)


def test_without_its_manifest_the_log_is_served_as_far_as_it_stands_by_itself(
    folder: Path,
) -> None:
    _fill(folder, "KV.PREFIX.SAVE")
    with Driver(folder) as driver:
        driver.ask(*rows("n_pk", 0, 2, 2, WIDTH))
        driver.ask(*register("later", 1, WIDTH))
        driver.ask(*rows("later_pk", 0, 0, 2, WIDTH))
        whole = driver.content()
    copies = Copies(folder)
    for missing in (False, True):
        flipped = copies.flipped(MANIFEST, 16)  # its header: nothing of it is kept
        if missing:
            (flipped / MANIFEST).unlink()
        with pytest.raises(DamagedData):
            Driver(flipped)
        content = content_of(flipped, SALVAGE)
        assert content == {
            key: value for key, value in whole.items() if key[0] == "state" or b"later" in key[1]
        }
        assert content_of(flipped) == content


def _fill_densely(folder: Path, *after: str) -> Content:
    """Rows without room behind them: a file of few bytes."""
    with Driver(folder) as driver:
        driver.ask(*register("n", 1, WIDTH))
        driver.ask(*dense("n_pk", 0, 2))
        driver.ask(*dense("n_pv", 0, 2))
        driver.ask(*state("n", COMPLETION_LAYER, 20))
        if after:
            driver.ask(*after)
        return driver.content()


@pytest.mark.parametrize("spare", [False, True], ids=["every byte", "with spare rows"])
def test_a_flipped_byte_of_a_sealed_segment_is_a_counted_miss_or_a_spare_byte(
    folder: Path, spare: bool
) -> None:
    filled = _fill if spare else _fill_densely
    whole = filled(folder, "KV.PREFIX.MAP", "n")
    (segment,) = (folder / "pion.segments.0").iterdir()
    copies = Copies(folder)
    size = segment.stat().st_size
    missed = 0
    for position in random.Random(6).sample(range(size), 250) if spare else range(size):
        flipped = copies.flipped(f"pion.segments.0/{segment.name}", position)
        with Driver(flipped) as driver:
            content = driver.content()
            if content == whole:
                assert driver.store.counters.damaged == 0
                continue
            missed += 1
            assert content == {}, "the whole prefix goes, its states and record too"
            assert driver.store.counters.damaged == 2
            assert driver.ask("KV.PREFIX.LOOKUP", "n") == "MISS"
            assert b"damaged" in str(driver.ask("KV.PREFIX.EXPLAIN", "n")).encode()
        assert content_of(copies.folder) == {}, "the drop is logged"
    if not spare:
        # what stands between two tensors means nothing, nor what the header did not need
        dead = [data for name, data in sealed_tensors(segment).items() if name.startswith("dead")]
        assert missed >= size - sum(map(len, dead)) > 512


def test_a_flipped_byte_of_an_open_segment_is_a_counted_miss_or_means_nothing(
    folder: Path,
) -> None:
    """What is short and does not ride in the log lies in one; its header is not there yet."""
    with mock.patch.object(riding, "INLINE_BYTES", 0):
        whole = _fill_densely(folder)
    with Driver(folder) as driver:
        sessions, states = driver.store.state.sessions, driver.store.state.states
        runs = [(run.place, run.shape.file_bytes) for s in sessions.values() for run in s.runs()]
        places = [*runs, *((blob.place, blob.length) for blob in states[b"n"].values())]
        stored = {place.offset + at for place, length in places for at in range(length)}
    assert len(stored) == 2 * 2 * WIDTH * 2 + 20
    (segment,) = (folder / "pion.segments.0").iterdir()
    name = f"pion.segments.0/{segment.name}"
    copies = Copies(folder)
    for position in sorted(stored | set(range(0, segment.stat().st_size, 61))):
        with Driver(copies.flipped(name, position)) as driver:
            content = driver.content()
            assert content == ({} if position in stored else whole), position
            if position not in stored:
                assert driver.store.counters.damaged == 0
                continue
            assert driver.store.counters.damaged >= 1
            assert driver.ask("KV.PREFIX.LOOKUP", "n") == "MISS"
        assert content_of(copies.folder) == {}, "the drop is logged"


def test_every_flipped_row_byte_is_a_miss(folder: Path) -> None:
    _fill(folder, "KV.PREFIX.MAP", "n")
    with Driver(folder) as driver:
        runs = [run for s in driver.store.state.sessions.values() for run in s.runs()]
        places = [
            run.place.offset + piece.offset + byte
            for run in runs
            for piece in run.shape.pieces()
            for byte in range(piece.length)
        ]
    (segment,) = (folder / "pion.segments.0").iterdir()
    copies = Copies(folder)
    assert len(places) == 2 * 2 * WIDTH * 2
    for position in places:
        with Driver(copies.flipped(f"pion.segments.0/{segment.name}", position)) as driver:
            assert driver.content() == {}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("rows", r"n_pv dropped with its namespace: \S+ at \d+: checksum of rows is wrong"),
        ("state", "n dropped with its namespace: checksum of a state is wrong"),
    ],
)
def test_what_is_found_damaged_when_it_is_read_is_told_in_the_log(
    folder: Path, what: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("n", 1, WIDTH))
        driver.ask(*rows("n_pv", 0, 0, 2, WIDTH))
        driver.ask(*state("n", 0, 70_000))
        driver.ask("KV.PREFIX.MAP", "n")
        run = next(iter(driver.store.state.sessions[b"n_pv"].runs()))
        place = run.place if what == "rows" else driver.store.state.states[b"n"][0].place
        path, at = Path(place.segment.path), place.offset  # type: ignore[union-attr]
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with Driver(folder) as driver, caplog.at_level(logging.WARNING):
        assert driver.content() == {}
    (record,) = [record for record in caplog.records if "dropped" in record.message]
    assert re.fullmatch(told, record.message)


def test_a_flipped_byte_of_a_portable_copy_is_refused_or_missed(folder: Path) -> None:
    whole = _fill_densely(folder, "KV.PREFIX.SAVE", "copy.bin")
    target = folder.with_name("restored")
    target.mkdir()
    (target / MANIFEST).write_bytes((folder / "copy.bin").read_bytes())
    copies = Copies(target)
    size = (target / MANIFEST).stat().st_size
    states = {key: value for key, value in whole.items() if key[0] == "state"}
    outcomes: set[str] = set()
    for position in range(size):
        flipped = copies.flipped(MANIFEST, position)
        try:
            content = content_of(flipped)
        except (DamagedData, NewerFormat) as error:
            assert re.match(r"pion\.(vstore|ssm)\.0 ", str(error)), error
            outcomes.add("refused")
            continue
        outcomes.add("whole" if content == whole else "missed")
        assert content in (whole, {}, states), position
    assert outcomes >= {"refused", "missed"}
